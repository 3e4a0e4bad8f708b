"""Values of a log's fields, each with the words for what is wrong with it.

A field that is missing or is not what it should be ends the reading (`Wrong`); a request that
cannot be used is left out and counted (`Skip`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from emu.units import NS_PER_MS, NS_PER_S
from emu.workload.formats.decimals import exact_decimal

Fields = Mapping[str, object]
LEAST: Final = -(2**63)
_MOST: Final = 2**62
"""The least integer that OTLP has, and the most of a count, or of ns, that a run can have."""
_DIGITS_MAX: Final = 20
_SHOWN_CHARS: Final = 60


class Skip(Exception):
    """A request that is left out, and why."""


class Wrong(Exception):
    """A field that is missing or is not what it should be."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def as_object(value: object, field: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Wrong(field, "must be an object")
    return value


def as_list(value: object, field: str) -> list[object]:
    """An array; one that is absent is empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Wrong(field, "must be an array")
    return value


def as_optional(value: object, field: str) -> dict[str, object]:
    """An object; one that is absent is empty."""
    return {} if value is None else as_object(value, field)


def count_of(row: Fields, field: str, *, least: int = 0) -> int:
    """A whole number that is there, `least` or above."""
    value = _number(row.get(field))
    if type(value) is not int or not least <= value <= _MOST:
        raise Wrong(field, "missing" if value is None else _no_count(value, least))
    return value


def _number(value: object) -> object:
    """The integer that a value stands for, else the value."""
    if isinstance(value, str) and len(value) <= _DIGITS_MAX:
        return int(value) if value.removeprefix("-").isdecimal() else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_count(value: object, least: int) -> str:
    if type(value) is int and value > _MOST:
        return f"is too large: {_short(value)}"
    return f"must be a whole number >= {least}, not {_short(value)}"


def _bounded(time_ns: int, field: str, value: object) -> int:
    """A time in ns that a run can have."""
    if abs(time_ns) > _MOST:
        raise Wrong(field, f"is too large: {_short(value)}")
    return time_ns


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def first_of(row: Fields, *fields: str) -> object:
    """The first of these fields that is there."""
    for field in fields:
        value = row.get(field)
        if value is not None and value != "":
            return value
    return None


def text_of(row: Fields, fields: tuple[str, ...]) -> str:
    """The first of these fields that is there, as text; empty without any."""
    value = first_of(row, *fields)
    return "" if value is None else str(value)


def seconds(value: object, field: str) -> int:
    """Seconds as ns, exactly as they are written."""
    return _scaled(value, field, NS_PER_S, 9)


def milliseconds(value: object, field: str) -> int:
    return _scaled(value, field, NS_PER_MS, 6)


def _scaled(value: object, field: str, unit: int, digits: int) -> int:
    problem = "missing" if value is None else f"must be a number, not {_short(value)}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Wrong(field, problem)
    exact: int | None
    if isinstance(value, int):
        exact = value * unit
    else:
        exact = exact_decimal(value if isinstance(value, str) else repr(value), digits)
    if exact is None:
        try:
            exact = round(float(value) * unit)
        except (ValueError, OverflowError):
            raise Wrong(field, problem) from None
    return _bounded(exact, field, value)


def instant(value: object, field: str) -> int:
    """Unix seconds, or an ISO 8601 date with up to nine digits of a second, as Unix ns."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return seconds(value, field)
    if not isinstance(value, str):
        raise Wrong(field, "missing" if value is None else f"must be a time, not {_short(value)}")
    match = re.fullmatch(r"(.*?:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", value.strip())
    try:
        if match is None:
            raise ValueError
        zone = (match.group(3) or "Z").replace("Z", "+00:00")
        whole = datetime.datetime.fromisoformat(match.group(1) + zone)
    except ValueError:
        raise Wrong(field, f"must be a time, not {_short(value)}") from None
    fraction = (match.group(2) or ".0")[1:10].ljust(9, "0")
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    time_ns = (whole - epoch) // datetime.timedelta(seconds=1) * NS_PER_S + int(fraction)
    return _bounded(time_ns, field, value)


class Lengths(NamedTuple):
    """Tokens of a request."""

    prompt_tokens: int
    output_tokens: int


def lengths(prompt: object, output: object) -> Lengths:
    """Tokens of prompt and output; a request without one of them is left out."""
    found = []
    for value, name in ((prompt, "prompt"), (output, "output")):
        value = _number(value)
        if value is None:
            raise Skip(f"without tokens of the {name}")
        if type(value) is not int or not 0 <= value <= _MOST:
            raise Wrong(f"{name} tokens", _no_count(value, 0))
        if value == 0:
            raise Skip(f"with an empty {name}")
        found.append(value)
    return Lengths(found[0], found[1])
