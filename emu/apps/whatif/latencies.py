"""The log as a workload with the replicas that served it, and how far the emulation is from it.

    lines = lines_of(log, places_of(log, ["10.0.0.5:8000", "10.0.0.6:8000"], 2))
    rows = distances(recorded(log.records), latencies)

A log says which server served a request where the format has it; servers are the replicas of the
configuration in their order (replica-2 before replica-10), or as `--servers` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError
from emu.workload.items import Line
from emu.workload.logs.log_record import Log, LogRecord, line_of

Floats = NDArray[np.float64]

PERCENTS: Final = (50.0, 90.0, 95.0, 99.0)
METRICS: Final = ("TTFT", "TPOT", "E2E")
_SOURCE: Final = "whatif"


class Latencies(msgspec.Struct):
    """Latencies of one run or of the log, in order of arrival; ms, NaN where there is none."""

    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats

    def of(self, metric: str) -> Floats:
        """One of METRICS."""
        return {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "E2E": self.e2e_ms}[metric]


class Distance(msgspec.Struct, frozen=True):
    """One statistic of the log and of its replay."""

    name: str
    recorded_ms: float
    emulated_ms: float

    @property
    def percent(self) -> float:
        """(emulated - recorded) / recorded."""
        if not self.recorded_ms:
            return 0.0 if not self.emulated_ms else float("inf")
        return 100 * (self.emulated_ms - self.recorded_ms) / self.recorded_ms


class Paired(msgspec.Struct, frozen=True):
    """Absolute error request by request, per cent."""

    metric: str
    count: int
    mean: float
    median: float
    p99: float


def recorded(records: Sequence[LogRecord]) -> Latencies:
    """What the log measured."""
    ttft = np.array([r.ttft_ns / 1e6 if r.ttft_ns >= 0 else np.nan for r in records])
    e2e = np.array([r.e2e_ns / 1e6 if r.e2e_ns >= 0 else np.nan for r in records])
    gaps = np.array([r.output_tokens - 1 for r in records], dtype=np.float64)
    gaps[gaps < 1] = np.nan
    return Latencies(ttft, (e2e - ttft) / gaps, e2e)


def places_of(log: Log, servers: Sequence[str], replicas: int) -> dict[str, int]:
    """Server -> replica. Empty if the log names no servers. Raises InputError."""
    known = log.servers
    if servers:
        unknown = [name for name in known if name not in servers]
        if unknown:
            problem = f"lacks {unknown[0]!r}, which served requests of the log"
            raise InputError(_SOURCE, None, "--servers", problem)
        known = list(servers)
    if len(known) > replicas:
        problem = (
            f"{len(known)} servers served ({', '.join(known[:4])}, ...), and the configuration "
            f"has {replicas} replicas"
        )
        raise InputError(_SOURCE, None, "--servers", problem)
    numbered = [name.rpartition("-")[2] for name in known]
    own = all(
        name.startswith("replica-") and n.isdigit() for name, n in zip(known, numbered, strict=True)
    )
    if own and not servers:  # a run of emu: the names are the ids
        return {name: int(number) for name, number in zip(known, numbered, strict=True)}
    return {name: index for index, name in enumerate(known)}


def lines_of(log: Log, places: dict[str, int]) -> list[Line]:
    """The requests, in order of arrival, from 0 on, each pinned to the replica that served it."""
    first_ns = log.records[0].arrival_ns
    lines = []
    for record in log.records:
        line = line_of(record)
        line.arrival_time_ns = record.arrival_ns - first_ns
        line.replica = places.get(record.server, -1)
        if record.decode_server and record.decode_server != record.server:
            line.decode_replica = places.get(record.decode_server, -1)
        lines.append(line)
    return lines


def distances(log: Latencies, run: Latencies) -> list[Distance]:
    """Mean and percentiles of both, over requests that both have."""
    found = []
    for metric in METRICS:
        mine, theirs = run.of(metric), log.of(metric)
        both = ~(np.isnan(mine) | np.isnan(theirs))
        if not both.any():
            continue
        figures = [("mean", theirs[both].mean(), mine[both].mean())]
        for percent in PERCENTS:
            there, here = (float(np.percentile(v[both], percent)) for v in (theirs, mine))
            figures.append((f"p{percent:g}", there, here))
        found += [Distance(f"{metric} {name}", float(t), float(m)) for name, t, m in figures]
    return found


def paired(log: Latencies, run: Latencies) -> list[Paired]:
    """Errors request by request."""
    found = []
    for metric in METRICS:
        mine, theirs = run.of(metric), log.of(metric)
        both = ~(np.isnan(mine) | np.isnan(theirs)) & (theirs > 0)
        if both.any():
            error = 100 * np.abs(mine[both] - theirs[both]) / theirs[both]
            p99 = float(np.percentile(error, 99))
            count = int(both.sum())
            found.append(Paired(metric, count, float(error.mean()), float(np.median(error)), p99))
    return found
