"""The CSV traces: which headers mean which format, and which column has what, in which unit.

A dialect says for each thing that emu needs which column has it and in which unit; units stand
in the header or are fixed by the format, never guessed. Azure (2023, 2024), BurstGPT, Vidur,
SplitwiseSim, BlitzScale, and emu's plain CSV, which also reads a `requests.csv` of an earlier
run, so that a run can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

STAMP: Final = -1
"""In place of a power of ten: the column is a date and time."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One CSV format. Names of columns are compared without case and surrounding blanks."""

    name: str
    arrival: Mapping[str, int]
    """Possible arrival columns: name -> power of ten from its unit to ns, or `STAMP`."""
    prompt: Sequence[str]
    output: Sequence[str]
    texts: Mapping[str, str] = MappingProxyType({})
    """Columns -> text fields of `Line`."""
    numbers: Mapping[str, str] = MappingProxyType({})
    """Columns -> integer fields of `Line`."""
    model: str = ""
    """Column with the name of the model; read where several models are served."""
    ignored: Sequence[str] = ()
    """Columns that are known and not needed: no warning."""
    skip_zero: bool = True
    """Rows without prompt or output tokens are failures of the traced system: left out, counted."""
    arrival_optional: bool = False
    whole_floats: bool = False
    """Counts may be spelled 12.0 (the tool that writes the format does so)."""
    default_header: Sequence[str] = ()
    """Columns of a file without a header line."""


_PLAIN_ARRIVAL: Final = MappingProxyType(
    {
        "arrival_time_ns": 0,
        "arrival_ns": 0,
        "arrival_us": 3,
        "arrival_ms": 6,
        "arrival_s": 9,
        "arrival_timestamp": STAMP,
    }
)
_REQUESTS_CSV: Final = tuple(
    """request_id first_token_ns last_token_ns ttft_ns tpot_ns latency_ns prefix_hit_len
    npu_cache_hit storage_cache_hit instance_id sub_request_index decode_instance_id queue_ns
    preemptions migrations status reason""".split()  # noqa: SIM905
)
DIALECTS: Final = (
    Dialect(
        name="azure",
        arrival={"timestamp": STAMP},
        prompt=["contexttokens"],
        output=["generatedtokens"],
        ignored=["numimages"],
    ),
    Dialect(
        name="burstgpt",
        arrival={"timestamp": 9},
        prompt=["request tokens"],
        output=["response tokens"],
        texts={"session id": "session_id"},
        model="model",
        ignored=["elapsed time", "total tokens", "log type"],
    ),
    Dialect(
        name="vidur",
        arrival={"arrived_at": 9},
        prompt=["num_prefill_tokens"],
        output=["num_decode_tokens"],
        ignored=["num_total_tokens", "pd_ratio"],
        arrival_optional=True,
        whole_floats=True,
    ),
    Dialect(
        name="splitwise",
        arrival={"arrival_timestamp": 9},
        prompt=["prompt_size"],
        output=["token_size"],
        ignored=["request_id", "request_type", "application_id", "batch_size"],
    ),
    Dialect(
        name="blitzscale",
        arrival={"timestamp(ms)": 6, "timestamp": 6},
        prompt=["prefill"],
        output=["decode"],
        default_header=["timestamp", "prefill", "decode"],
    ),
    Dialect(
        name="csv",
        arrival=_PLAIN_ARRIVAL,
        prompt=["input_toks", "prompt_tokens", "prompt_toks", "input_tokens"],
        output=["output_toks", "output_tokens", "decode_toks"],
        texts={"tenant": "tenant", "session_id": "session_id", "adapter": "adapter"},
        model="model",
        numbers={
            "priority": "priority",
            "deadline_ns": "deadline_ns",
            "cancel_after_ns": "cancel_after_ns",
            "max_output_toks": "max_output_toks",
            "max_output_tokens": "max_output_toks",
            "acceptance_rate": "acceptance_rate",
        },
        ignored=_REQUESTS_CSV,
        skip_zero=False,
        arrival_optional=True,
    ),
)


def split_header(line: bytes) -> list[str]:
    """The column names of a header line, as they are spelled."""
    text = line.decode("utf-8", "replace").strip("\r\n")
    if not any(mark in text for mark in '"\r\n'):
        return [name.strip() for name in text.split(",")] if text else []
    import csv  # what it is needed for is rare, and loading it costs as much as a whole trace

    try:
        return [name.strip() for name in next(csv.reader([text]), [])]
    except csv.Error:  # a carriage return in the middle: no program writes such a header
        return []


def dialect_of(names: Sequence[str]) -> Dialect | None:
    """The format that a header line belongs to."""
    header = [name.lower() for name in names]
    for dialect in DIALECTS:
        if find_column(header, dialect.prompt) < 0 or find_column(header, dialect.output) < 0:
            continue
        if dialect.arrival_optional or find_column(header, list(dialect.arrival)) >= 0:
            return dialect
    return None


def find_column(header: Sequence[str], names: Sequence[str]) -> int:
    return next((header.index(name) for name in names if name in header), -1)
