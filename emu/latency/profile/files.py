"""Reading the two file formats of profile bundles: CSV tables and YAML mappings.

Owns the errors: every malformed field ends in an `InputError` with file, line and field.
Does not know what a bundle is (`profile_bundle.py`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from emu.errors import InputError, needs_extra

with needs_extra("profiles", "config", "latency.backend"):
    import yaml


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


class YamlFile:
    """A YAML mapping with errors that name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(str(path), None, "", "missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(str(path), None, "", f"cannot be read: {error}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = None if mark is None else mark.line + 1
            problem = getattr(error, "problem", None) or "not YAML"
            raise InputError(str(path), line, "", problem) from None
        if not isinstance(data, dict):
            raise self.fail("", "expected a mapping of keys")
        self.data: dict[str, Any] = data

    def fail(self, field: str, problem: str) -> InputError:
        """The error to raise about one key of this file."""
        return InputError(str(self.path), None, field, problem)

    def text(self, key: str) -> str:
        """A name that must be there."""
        value = self.data.get(key)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "missing" if value is None else f"{value!r} is not a name")
        return value

    def table(self, key: str, *, optional: bool = False) -> dict[Any, Any]:
        """A mapping; absent is an empty one when it is optional."""
        return self.mapping(self.data.get(key, {} if optional else None), key)

    def mapping(self, value: object, field: str) -> dict[Any, Any]:
        """`value` if it is a mapping."""
        if not isinstance(value, dict):
            raise self.fail(field, "missing" if value is None else "expected a mapping of keys")
        return value

    def count(self, table: Mapping[Any, Any], key: str) -> int:
        """A count that may be absent (0)."""
        value = table.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fail(key, f"{value!r} is not a count")
        return value

    def number(self, value: object, field: str) -> float:
        """`value` if it is a finite number."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(field, f"{value!r} is not a number")
        if not math.isfinite(value):
            raise self.fail(field, f"{value!r} is not finite")
        return float(value)
