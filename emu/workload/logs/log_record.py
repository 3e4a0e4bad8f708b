"""One request of a server's log, whatever program wrote it; and a log that has been read."""

from __future__ import annotations

import re

import msgspec

from emu.workload.items import Block, Line


class LogRecord(msgspec.Struct, kw_only=True):
    """One request of a log. Times in ns; -1 where the log does not tell."""

    arrival_ns: int
    """On the log's own clock."""
    prompt_tokens: int
    output_tokens: int
    line: int
    """Where it stands: a line of the file, or its place in an array (from 1)."""
    ttft_ns: int = -1
    e2e_ns: int = -1
    """From arrival to the last token."""
    max_output_tokens: int = 0
    """0 = not told."""
    cached_tokens: int = -1
    server: str = ""
    """The server of the request: the address or the name of a replica."""
    decode_server: str = ""
    request_id: str = ""
    session: str = ""
    tenant: str = ""
    model: str = ""
    priority: int = 0


class Log(msgspec.Struct):
    """A log that has been read."""

    format: str
    records: list[LogRecord]
    """In the order of arrival."""
    skipped: dict[str, int]
    """Requests left out, by reason."""

    @property
    def servers(self) -> list[str]:
        """Names of those that served, sorted: numbers by value."""
        names = {one.server for one in self.records} | {one.decode_server for one in self.records}
        return sorted(names - {""}, key=natural)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key under which replica-2 comes before replica-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts))


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
    import numpy as np

    count = len(records)
    is_plain = not any(r.tenant or r.priority or r.max_output_tokens for r in records)
    return Block(
        np.fromiter((record.arrival_ns for record in records), np.int64, count),
        np.fromiter((record.prompt_tokens for record in records), np.int64, count),
        np.fromiter((record.output_tokens for record in records), np.int64, count),
        np.fromiter((record.line for record in records), np.int64, count),
        np.arange(count, dtype=np.int64),
        None if is_plain else [line_of(record) for record in records],
    )
