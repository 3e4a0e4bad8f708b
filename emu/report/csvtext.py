"""Lines of CSV, written in batches. Owns the file handle of one table.

`csv.writer` costs more than the whole row of a request; numbers need no quoting, and the few
text fields go through `quote`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

_BATCH_ROWS: Final = 1024


def quote(text: str) -> str:
    """A field of RFC 4180: quoted only where it must be."""
    if '"' in text or "," in text or "\n" in text or "\r" in text:
        return '"' + text.replace('"', '""') + '"'
    return text


class CsvFile:
    """A table being written: header first, then whole lines in batches."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.rows = 0
        self._file: BinaryIO = path.open("wb")
        self._batch: list[str] = [",".join(columns) + "\n"]

    def line(self, text: str) -> None:
        """One row, its line end included."""
        self._batch.append(text)
        self.rows += 1
        if len(self._batch) >= _BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.write("".join(self._batch).encode())
        self._batch.clear()

    def close(self) -> None:
        """Write the rest; idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()
