"""CSV tables with a header line: named columns, converted, every malformed field an error.

Owns the errors: each ends in an `InputError` with file, line and field. Does not know what a
bundle is.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from emu.errors import InputError


class Kind(NamedTuple):
    """What a column holds: how its text converts, and what to call it in an error."""

    convert: Callable[[str], Any]
    noun: str


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**40:
        raise ValueError
    return value


def _time_ns(text: str) -> int:
    value = float(text)
    if not (math.isfinite(value) and 0 <= value < 1e15):
        raise ValueError
    return max(1, round(value * 1000))


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


TEXT: Final = Kind(str, "a name")
COUNT: Final = Kind(_count, "a count")
NUMBER: Final = Kind(_number, "a number")
TIME_US: Final = Kind(_time_ns, "a time in microseconds")
"""Becomes integer nanoseconds: to the nearest, half to even, at least 1."""


def read_header(path: Path) -> list[str]:
    """Names of the columns of a CSV file."""
    with _open_csv(path) as file:
        return next(csv.reader(file), [])


def read_csv(path: Path, columns: Mapping[str, Kind]) -> list[tuple[Any, ...]]:
    """The named columns, converted, of every row of a CSV file with a header line."""
    with _open_csv(path) as file:
        return _parse_csv(str(path), csv.reader(file), columns)


@contextmanager
def _open_csv(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.csv"))
        have = f"the folder has {', '.join(siblings)}" if siblings else "the folder has no tables"
        raise InputError(str(path), None, "", f"missing; {have}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), None, "", f"cannot be read: {error}") from None


def _parse_csv(source: str, reader: Any, columns: Mapping[str, Kind]) -> list[tuple[Any, ...]]:
    header = next(reader, None)
    if header is None:
        raise InputError(source, None, "", "the file is empty")
    for column in columns:
        if column not in header:
            problem = f"missing column; the file has {', '.join(header)}"
            raise InputError(source, 1, column, problem)
    wanted = [(header.index(column), kind.convert) for column, kind in columns.items()]
    rows: list[tuple[Any, ...]] = []
    for row in reader:
        if not row:
            continue
        if len(row) != len(header):
            problem = f"{len(row)} fields, the header has {len(header)}"
            raise InputError(source, reader.line_num, "row", problem)
        try:
            rows.append(tuple([convert(row[index]) for index, convert in wanted]))
        except (ValueError, OverflowError):
            raise _bad_field(source, reader.line_num, row, header, columns) from None
    if not rows:
        raise InputError(source, None, "", "no rows")
    return rows


def _bad_field(
    source: str, line: int, row: list[str], header: list[str], columns: Mapping[str, Kind]
) -> InputError:
    """Which field of a row that did not convert is to blame."""
    for column, kind in columns.items():
        text = row[header.index(column)]
        try:
            kind.convert(text)
        except (ValueError, OverflowError):
            return InputError(source, line, column, f"{text!r} is not {kind.noun}")
    raise AssertionError("a row that failed must fail again")
