"""A log of a real server as a source of requests: arrivals, lengths, limits, tenants, priorities.

Latencies of the log are not used here: `emu whatif` and `emu compare --measured` read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from emu.workload.chunks import CHUNK_BYTES, TextFile
from emu.workload.items import Block, Line, Notes
from emu.workload.logs import Log, LogRecord, read_log


class LogSource:
    """The requests of a log, in order of arrival."""

    is_absolute = True
    has_arrivals = True
    prompt_field = "prompt tokens"

    def __init__(self, file: TextFile, format: str) -> None:
        self._file = file
        self.name = format
        self._log: Log | None = None

    @property
    def is_small(self) -> bool:
        """One block may be kept between the passes."""
        return self._file.size_bytes <= CHUNK_BYTES

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All requests; what is left out is counted."""
        if self._log is None:
            self._log = read_log(self._file.path, self._file.source, self.name)
        for reason, count in self._log.skipped.items():
            notes.skip(f"requests {reason}", count)
        yield block_of(self._log.records)

    def rows_at(self, offsets: Any) -> Iterator[Block]:
        """Never asked for: they are in order of arrival."""
        raise AssertionError("requests of a log are in order of arrival")


def line_of(record: LogRecord) -> Line:
    """A request as a line of emu's own format, without a place to be served."""
    return Line(
        arrival_time_ns=record.arrival_ns,
        input_toks=record.prompt_tokens,
        output_toks=record.output_tokens,
        max_output_toks=max(record.max_output_tokens, record.output_tokens)
        if record.max_output_tokens
        else 0,
        tenant=record.tenant,
        priority=record.priority,
    )


def block_of(records: list[LogRecord]) -> Block:
    """Requests as columns."""
    count = len(records)

    def column(values: Iterator[int]) -> Any:
        return np.fromiter(values, np.int64, count)

    is_plain = not any(r.tenant or r.priority or r.max_output_tokens for r in records)
    return Block(
        column(record.arrival_ns for record in records),
        column(record.prompt_tokens for record in records),
        column(record.output_tokens for record in records),
        column(record.line for record in records),
        np.arange(count, dtype=np.int64),
        None if is_plain else [line_of(record) for record in records],
    )
