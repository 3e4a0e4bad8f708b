"""Requests from a DataFrame or a list of mappings, as a workload file of emu's own format.

Columns, by any of these names: `arrival_s` or `arrival_time_ns`, `prompt_tokens` or `input_toks`,
`output_tokens` or `output_toks` (these three are required), `max_output_tokens`, `tenant`,
`priority`, `deadline_s`. Any other column is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol, SupportsFloat, runtime_checkable

import msgspec

from emu.errors import InputError
from emu.report.atomic import write_bytes
from emu.units import NS_PER_S

Row = Mapping[str, object]


@runtime_checkable
class PolarsFrame(Protocol):
    """A DataFrame of polars."""

    def to_dicts(self) -> list[dict[str, object]]:
        """Its rows."""
        ...


@runtime_checkable
class PandasFrame(Protocol):
    """A DataFrame of pandas."""

    def to_dict(self, orient: str) -> list[dict[str, object]]:
        """Its rows, with `orient` "records"."""
        ...


Table = PolarsFrame | PandasFrame | Iterable[Row]

_SOURCE: Final = "workload"
_NAMES: Final[Mapping[str, tuple[str, float]]] = {
    "arrival_s": ("arrival_time_ns", NS_PER_S),
    "arrival_time_ns": ("arrival_time_ns", 1),
    "prompt_tokens": ("input_toks", 1),
    "input_toks": ("input_toks", 1),
    "output_tokens": ("output_toks", 1),
    "output_toks": ("output_toks", 1),
    "max_output_tokens": ("max_output_toks", 1),
    "priority": ("priority", 1),
    "deadline_s": ("deadline_ns", NS_PER_S),
    "tenant": ("tenant", 0),
}
"""Column -> field of a line and its unit; 0 = a word."""
_NEEDED: Final = ("arrival_time_ns", "input_toks", "output_toks")


def write_workload(requests: Table, path: Path) -> Path:
    """Write the requests; the path. Raises InputError for what is no table of requests."""
    lines = list(workload_lines(requests))
    if not lines:
        raise InputError(_SOURCE, None, "", "has no request")
    path.parent.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    write_bytes(path, b"".join(encoder.encode(line) + b"\n" for line in lines))
    return path


def workload_lines(requests: Table) -> Iterator[dict[str, object]]:
    """Lines of emu's own format, one for each row."""
    rows: Iterable[object]
    if isinstance(requests, PolarsFrame):
        rows = requests.to_dicts()
    elif isinstance(requests, PandasFrame):
        rows = requests.to_dict("records")
    else:
        rows = requests
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(_SOURCE, number, "", f"expected a mapping, got {type(row).__name__}")
        yield _line(number, row)


def _line(number: int, row: Row) -> dict[str, object]:
    line: dict[str, object] = {}
    for name, value in row.items():
        if name not in _NAMES:
            known = ", ".join(_NAMES)
            raise InputError(_SOURCE, number, str(name), f"unknown column; there are {known}")
        field, unit = _NAMES[name]
        try:
            line[field] = round(_number(value) * unit) if unit else str(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(_SOURCE, number, name, f"expected a number, got {value!r}") from None
    for field in _NEEDED:
        if field not in line:
            names = " or ".join(name for name, (its, _) in _NAMES.items() if its == field)
            raise InputError(_SOURCE, number, names, "missing")
    return line


def _number(value: object) -> float:
    if isinstance(value, (str, SupportsFloat)):
        return float(value)
    raise TypeError
