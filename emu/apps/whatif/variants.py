"""One run of the log under some configuration; its latencies request by request.

`run_variant` is what a worker does; everything it needs is in the `Variant`, its result is plain.
A run that ends with an error is a result too: its requests have no latencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.api import Rows, load
from emu.apps.whatif.latencies import Floats, Latencies
from emu.config.load import config_from_text
from emu.config.schema import Config
from emu.errors import EmuError
from emu.process.interrupts import scratch
from emu.runs.runner import execute
from emu.workload.items import Line


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
    met: float | None = None
    """Part of the requests that met every objective; None without objectives."""
    hit_rate: float = 0.0
    """Prompt tokens that a cache held / prompt tokens."""
    tokens: dict[int, int] = {}
    """Prompt and output of the requests that each replica gave the first token."""


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
            summary.slo.joint_attainment,
            summary.prefix_hit_rate,
            _tokens(result.requests),
        )


def _tokens(rows: Rows) -> dict[int, int]:
    """Tokens by the replica that gave the first one."""
    sums: dict[int, int] = {}
    sizes = rows["prompt_toks"] + rows["decode_toks"]
    for replica_id, size in zip(rows["instance_id"].tolist(), sizes.tolist(), strict=True):
        if replica_id >= 0:
            sums[replica_id] = sums.get(replica_id, 0) + size
    return sums


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
