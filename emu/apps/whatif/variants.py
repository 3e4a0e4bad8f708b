"""One run of the log under some configuration; its latencies request by request.

`run_variant` is what a worker does; everything it needs is in the `Variant`, its result is plain.
A run that ends with an error is a result too: its requests have no latencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.api import Rows, load
from emu.config.load import config_from_text
from emu.config.schema import Config
from emu.errors import EmuError, InputError
from emu.process.interrupts import scratch
from emu.rng import rng_stream
from emu.runs.runner import execute
from emu.workload.items import Line
from emu.workload.logs.log_record import Log, LogRecord, line_of

# --------------------------------------------------------------------------------------------------
# The log as a workload with the replicas that served it, and how far the emulation is from it.
#
#     lines = lines_of(log, ["10.0.0.5:8000", "10.0.0.6:8000"])
#     rows = distances(log, latencies)
#
# A log says which server served a request where the format has it; servers are the replicas of the
# configuration in their order (replica-2 before replica-10), or as `--servers` lists them.

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


# --- One run of the log under some configuration --------------------------------------------------

_BLOCKS: Final = 40
_RESAMPLES: Final = 1000


class Variant(msgspec.Struct, frozen=True):
    """A run to be done."""

    key: str
    config: Config
    lines: list[Line]


class Outcome(msgspec.Struct):
    """What came of it, in the order of the lines."""

    key: str
    error: str
    latencies: Latencies
    replicas: NDArray[np.int64]
    """Which one gave the first token; -1 = none."""
    gpu_seconds: float
    cost: float | None
    """In the unit of `nodes.hourly_price`."""


class Change(msgspec.Struct, frozen=True):
    """How much longer requests take than in the replay of the log, ms; negative = less."""

    metric: str
    mean_ms: float
    low_ms: float
    high_ms: float
    """95 %, a bootstrap over blocks of consecutive requests."""
    better: float
    """Part of the requests that are faster by more than 1 %."""
    worse: float


def with_lines(
    text: str, source: str, folder: Path, overrides: Sequence[str], placeholder: Path
) -> Config:
    """The configuration with the log as its workload. Raises InputError.

    `placeholder`: a file that exists; each run writes its own lines.
    """
    keys = [
        f"workload.path={str(placeholder.resolve())!r}",
        "workload.format='jsonl'",
        "workload.limit=0",
        "workload.time_scale=1.0",
        "workload.start_s=0.0",
        "workload.oversized='reject'",
    ]
    return config_from_text(text, source, [*overrides, *keys], folder)


def run_variant(variant: Variant) -> Outcome:
    """Run it. KeyboardInterrupt passes through."""
    with scratch("emu-whatif-") as directory:
        path = directory / "workload.jsonl"
        encoder = msgspec.json.Encoder()
        path.write_bytes(b"".join(encoder.encode(line) + b"\n" for line in variant.lines))
        config = variant.config
        output = msgspec.structs.replace(
            config.output,
            dir=str(directory / "run"),
            trace=False,
            events=False,
            timeseries_interval_ms=0,
        )
        workload = msgspec.structs.replace(config.workload, path=str(path), synthetic=None)
        config = msgspec.structs.replace(config, output=output, workload=workload)
        try:
            execute(config, "whatif", report=False)
        except EmuError as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            nothing = np.full(len(variant.lines), np.nan)
            none = Latencies(nothing, nothing, nothing)
            return Outcome(
                variant.key, text, none, np.full(len(variant.lines), -1), float("nan"), None
            )
        result = load(directory / "run")
        summary = result.summary
        return Outcome(
            variant.key,
            "",
            latencies_of(result.requests, len(variant.lines)),
            _in_order(result.requests, len(variant.lines), "instance_id"),
            summary.gpu_seconds.total,
            summary.cost,
        )


def latencies_of(rows: Rows, count: int) -> Latencies:
    """Latencies by request id (the place of its line); NaN for what did not complete."""
    done = rows["status"] == "completed"

    def column(name: str) -> Floats:
        values = np.full(count, np.nan)
        mine = rows[name].astype(np.float64)
        mine[(mine < 0) | ~done] = np.nan
        values[rows["request_id"]] = mine / 1e6
        return values

    ttft, e2e = column("ttft_ns"), column("latency_ns")
    return Latencies(ttft, column("tpot_ns"), e2e)


def _in_order(rows: Rows, count: int, name: str) -> NDArray[np.int64]:
    values = np.full(count, -1, dtype=np.int64)
    values[rows["request_id"]] = rows[name]
    return values


def changes(base: Latencies, other: Latencies, seed: int) -> list[Change]:
    """Differences of pairs: other - base."""
    found = []
    for metric in ("TTFT", "TPOT", "E2E"):
        mine, theirs = other.of(metric), base.of(metric)
        both = ~(np.isnan(mine) | np.isnan(theirs))
        if not both.any():
            continue
        difference = (mine - theirs)[both]
        low, high = block_interval(difference, seed)
        share = 0.01 * theirs[both]
        found.append(
            Change(
                metric,
                float(difference.mean()),
                low,
                high,
                float((difference < -share).mean()),
                float((difference > share).mean()),
            )
        )
    return found


def block_interval(values: Floats, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of values in order of arrival."""
    blocks = np.array_split(values, min(_BLOCKS, len(values)))
    sums = np.array([block.sum() for block in blocks])
    sizes = np.array([len(block) for block in blocks])
    rng = rng_stream(seed, "whatif.bootstrap")
    drawn = rng.integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
