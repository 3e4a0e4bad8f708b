"""Fields of a JSON object, read one by one: the exact words for what is wrong with each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import msgspec

from emu.errors import InputError
from emu.workload.items import ID_MAX, Notes


class Place:
    """Where a value stands, for messages: file, line, and the path within the line."""

    def __init__(self, source: str, line: int, path: str = "") -> None:
        self.source = source
        self.line = line
        self.path = path

    def inside(self, path: str) -> Place:
        """A place further in."""
        return Place(self.source, self.line, self.path + path)

    def error(self, field: str, problem: str) -> InputError:
        """The error for a field at this place."""
        return InputError(self.source, self.line, self.path + field, problem)


def read_object(place: Place, raw: bytes) -> dict[str, object]:
    """A JSON object, or InputError: bad UTF-8, bad JSON, something else."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise place.error("$", f"not valid UTF-8 (byte {error.start})") from None
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise place.error("$", "nested too deeply") from None
    except msgspec.DecodeError as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise place.error("$", f"not valid JSON: {problem[:1].lower()}{problem[1:]}") from None
    if not isinstance(value, dict):
        raise place.error("$", f"must be a JSON object, not {show(value)}")
    repeated = repeated_key(raw)
    if repeated is not None:
        raise place.error(repeated, "is given twice in one object")
    return value


class _Repeated(Exception):
    """A key that an object gives twice."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _Repeated(name)
    return {}


def repeated_key(raw: bytes) -> str | None:
    """A key that some object of this JSON text gives twice; None if there is none."""
    try:
        json.loads(raw, object_pairs_hook=_once)
    except _Repeated as error:
        return str(error.args[0])
    except (ValueError, RecursionError):  # read by another parser: it has judged the text
        return None
    return None


def read_int(
    place: Place,
    fields: Mapping[str, object],
    name: str,
    low: int,
    high: int,
    default: int | None = None,
) -> int:
    """An integer of [low, high]; `default` None = the field is required."""
    if name not in fields:
        if default is None:
            raise place.error(name, "required field is missing")
        return default
    return check_int(place, name, fields[name], low, high)


def check_int(place: Place, name: str, value: object, low: int, high: int) -> int:
    """The value if it is an integer of [low, high]."""
    if type(value) is not int:
        raise place.error(name, f"must be an integer, not {show(value)}")
    if value < low:
        raise place.error(name, f"must be at least {low}, not {value}")
    if value > high:
        raise place.error(name, f"must be at most {high}, not {value}")
    return value


def read_ids(place: Place, fields: Mapping[str, object], name: str) -> list[int] | None:
    """A list of ids; absent and null are None."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise place.error(name, f"must be a list of integers, not {show(value)}")
    return [
        check_int(place, f"{name}[{index}]", item, 0, ID_MAX) for index, item in enumerate(value)
    ]


def show(value: object) -> str:
    """A value as JSON, cut to fit in a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def note_unknown(names: Iterable[str], notes: Notes) -> None:
    """Warn once about each field that is not part of the format."""
    for name in names:
        notes.warn(f"unknown field {name!r} is ignored")
