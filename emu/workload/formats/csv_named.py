"""CSV tables with columns of their own: which one has what, in which unit (`workload.columns`).

    named_dialect({"arrival_ms": "time", "prompt": "in", "output": "out"}, header, row, "log.csv")

`arrival_s`, `arrival_ms`, `arrival_us` and `arrival_ns` say the unit. With `arrival` the column
says it: by its name (`time_ms`), by dates, or by numbers that can only be times since 1970. Other
numbers are refused with the choice of units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from emu.config.names import did_you_mean
from emu.errors import InputError
from emu.workload.formats.csv_dialects import DIALECTS, STAMP, Dialect
from emu.workload.formats.decimals import exact_decimal

_UNITS: Final[Mapping[str, int]] = {"ns": 0, "us": 3, "ms": 6, "s": 9}
"""Unit -> power of ten to ns."""
_ARRIVALS: Final = ("arrival", *(f"arrival_{unit}" for unit in _UNITS))
_TEXTS: Final[Mapping[str, str]] = {
    "session": "session_id",
    "tenant": "tenant",
    "adapter": "adapter",
}
_NUMBERS: Final[Mapping[str, str]] = {"priority": "priority", "max_output": "max_output_toks"}
MEANINGS: Final = (*_ARRIVALS, "prompt", "output", "model", *_TEXTS, *_NUMBERS)
"""Keys of `workload.columns`."""
KEY: Final = "workload.columns"
EPOCH_NS: Final = 10**17
"""Later times (1973) of numbers count from 1970: no workload lasts three years."""
_SYNONYMS: Final[Mapping[str, tuple[str, ...]]] = {
    "arrival": ("arriv", "timestamp", "start", "time", "ts", "created", "date"),
    "prompt": ("prompt", "input", "context", "prefill", "in"),
    "output": ("output", "completion", "generated", "response", "decode", "out"),
}
"""Beginnings or parts of names that such columns often have, the surest first."""


def named_dialect(
    columns: Mapping[str, str], header: Sequence[str], row: Sequence[str], source: str
) -> Dialect:
    """The format of a table whose columns the user named. `row`: its first.

    Raises InputError for a meaning or a column that does not exist.
    """
    lower = [name.lower() for name in header]
    for meaning, column in columns.items():
        if meaning not in MEANINGS:
            problem = f"no meaning {meaning!r}{did_you_mean(meaning, MEANINGS)}"
            raise InputError(source, None, KEY, f"{problem}; there are {', '.join(MEANINGS)}")
        if column.lower() not in lower:
            names = ", ".join(header)
            raise InputError(source, 1, KEY, f"no column {column!r}; there are {names}")
    for meaning in ("prompt", "output"):
        if meaning not in columns:
            problem = f"say which column has the {meaning}: {meaning}=NAME, of {', '.join(header)}"
            raise InputError(source, 1, KEY, problem)
    named = {meaning: column.lower() for meaning, column in columns.items()}
    if len(set(named.values())) < len(named):
        raise InputError(source, 1, KEY, "a column cannot have two meanings")
    arrivals = [meaning for meaning in named if meaning in _ARRIVALS]
    if len(arrivals) > 1:
        raise InputError(source, 1, KEY, f"give one of {', '.join(arrivals)}")
    units = {}
    for meaning in arrivals:
        at = lower.index(named[meaning])
        value = row[at] if at < len(row) else ""
        units[named[meaning]] = _unit_of(meaning, header[at], value, source)
    return Dialect(
        name="csv",
        arrival=units,
        prompt=[named["prompt"]],
        output=[named["output"]],
        texts={named[key]: field for key, field in _TEXTS.items() if key in named},
        numbers={named[key]: field for key, field in _NUMBERS.items() if key in named},
        model=named.get("model", ""),
        ignored=lower,
        skip_zero=False,
        arrival_optional=True,
    )


def _unit_of(meaning: str, column: str, value: str, source: str) -> int:
    """Power of ten from a column's unit to ns, or STAMP. Raises InputError if nothing says it."""
    if meaning != _ARRIVALS[0]:
        return _UNITS[meaning.removeprefix("arrival_")]
    plain = column.lower().replace("(", "_").replace(")", "").replace(" ", "_")
    for unit, shift in _UNITS.items():
        if plain.endswith(f"_{unit}"):
            return shift
    if exact_decimal(value, 0) is None:
        return STAMP
    guess = epoch_unit(value)
    if guess:
        return _UNITS[guess]
    choices = " or ".join(f"arrival_{unit}={column}" for unit in ("s", "ms"))
    problem = f"say the unit of {column!r} (its first value is {value[:40]}): {choices}"
    raise InputError(source, 2, KEY, problem)


def epoch_unit(value: str) -> str:
    """The unit in which a number is a time between 1973 and 2100; empty: in none."""
    number = exact_decimal(value, 0)
    for unit, shift in _UNITS.items():
        if number is not None and EPOCH_NS <= number * 10**shift < 41 * EPOCH_NS:
            return unit
    return ""


def columns_of(text: str, option: str = "--columns") -> dict[str, str]:
    """`arrival=time,prompt=in` as a table. Raises InputError."""
    found: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        meaning, equals, column = (piece.strip() for piece in part.partition("="))
        if not (equals and meaning and column):
            problem = f"{part.strip()!r}: expected arrival=time,prompt=in,output=out"
            raise InputError("workload", None, option, problem)
        if meaning in found:
            raise InputError("workload", None, option, f"{meaning} is given twice")
        found[meaning] = column
    return found


def unknown_header(header: Sequence[str], source: str) -> InputError:
    """The error for a header that no format has: what was found, what is wanted, and a guess."""
    plain = DIALECTS[-1]
    wanted = f"{plain.prompt[0]} or {plain.prompt[1]}, {plain.output[0]} or {plain.output[1]}"
    problem = (
        f"no format has the columns {', '.join(header[:12])}; wanted are {wanted}, and "
        "arrival_s, arrival_ms, arrival_ns or arrival_timestamp; or say which is which"
    )
    guess = ",".join(f"{meaning}={name}" for meaning, name in _guessed(header).items())
    example = guess or "arrival=time,prompt=in,output=out"
    return InputError(source, 1, "$", f"{problem}: --columns {example} ({KEY})")


def _guessed(header: Sequence[str]) -> dict[str, str]:
    """Columns by what their names contain; nothing if not all are found."""
    found: dict[str, str] = {}
    for meaning, parts in _SYNONYMS.items():
        for part in parts:
            name = next((one for one in header if _has(one, part)), "")
            if name and name not in found.values():
                found[meaning] = name
                break
    return found if len(found) == len(_SYNONYMS) else {}


def _has(name: str, part: str) -> bool:
    """Whether a name has a word that begins so; short parts must be whole words."""
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return any(word == part or (len(part) > 2 and word.startswith(part)) for word in words)
