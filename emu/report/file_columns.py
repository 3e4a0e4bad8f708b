"""Figures of requests in a file of rows, read one column at a time.

Percentiles of millions of requests then need memory for one column, not for all. Not compiled:
an extension class takes no weak references.
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_READ_ROWS: Final = 16_384


class FileColumns(Mapping[str, "array[int]"]):
    """Columns of a binary file of int64 rows, each read anew at each access.

    The file may be unlinked; its contents go with this object.
    """

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self._names = names
        self._file = os.open(path, os.O_RDONLY)
        self._rows = os.fstat(self._file).st_size // (8 * len(names))
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, name: str) -> array[int]:
        index, width = self._names.index(name), len(self._names)
        column = array("q")
        for start in range(0, self._rows, _READ_ROWS):
            data = os.pread(self._file, _READ_ROWS * 8 * width, start * 8 * width)
            column.extend(array("q", data)[index::width])
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
