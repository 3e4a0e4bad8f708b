"""The line of an error that a file's meaning has, and its text has not: found from its field.

Types and bounds are checked while the text is at hand (`load.py`). A model that the catalogue does
not know, a GPU too small for the weights or a degree that does not divide come out later, from code
that knows a key and no text. `placing` reads the file once more, and only when there is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath

from emu.config.locate import Path, line_of, locate
from emu.errors import InputError

_UNPLACED = "config"
"""Source of errors whose place does not know its file."""


@contextlib.contextmanager
def placing(source: str) -> Iterator[None]:
    """Errors about keys of the configuration file `source` get its name and the key's line."""
    try:
        yield
    except InputError as error:
        placed = placed_in(error, source)
        if placed is None:
            raise
        raise placed from error


@contextlib.contextmanager
def blaming(overrides: Sequence[str]) -> Iterator[None]:
    """Errors about keys that `--set` gave name no line: the file's is not to blame."""
    try:
        yield
    except InputError as error:
        for override in overrides:
            key = override.partition("=")[0].strip()
            if error.field == key or error.field.startswith(f"{key}."):
                raise InputError(error.source, None, error.field, error.problem) from error
        raise


def placed_in(error: InputError, source: str) -> InputError | None:
    """The error with its place in `source`; None if it has one, or is about another file."""
    named, colon, table = error.source.partition(": ")
    is_ours = named == source or error.source == _UNPLACED
    if error.line is not None or not is_ours:
        return None
    field = error.field
    if colon and named == source:  # `cluster.toml: replicas.0`, then what is wrong with it
        field = ": ".join(part for part in (table, field) if part)
    line = line_of_field(FilePath(source), (table if colon else "") or field)
    if line is None and error.source == source:
        return None
    return InputError(source, line, field, error.problem)


def line_of_field(file: FilePath, field: str) -> int | None:
    """Line of a dotted key in a TOML file, or of the nearest table around it.

    A key of an array of tables without an index is looked for in all of them.
    """
    try:
        lines = locate(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    path: Path = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    if len(path) > 1 and (path[0], 0) in lines and not isinstance(path[1], int):
        index = 0
        while (path[0], index) in lines:
            if (path[0], index, *path[1:]) in lines:
                return lines[(path[0], index, *path[1:])]
            index += 1
    for own in (path, _shared(path)):
        if own and own in lines:
            return lines[own]
    return line_of(lines, path)


def _shared(path: Path) -> Path:
    """`replicas.0.scheduler.x` stands in `scheduler.x` where the group does not say it."""
    is_of_group = path[:1] == ("replicas",) and len(path) > 3
    return path[2:] if is_of_group else ()
