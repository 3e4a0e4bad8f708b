"""What faults cost: a run beside the same run without its faults.

Both runs have the same seed, so the same requests arrive at the same times; a request that fares
differently was affected by the faults. Reads only what the runs wrote, plus the books of recovery.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError
from emu.report.summary import Summary
from emu.runner import execute
from emu.terminal import open_console
from emu.units import NS_PER_MS, NS_PER_S

WINDOW_S: Final = 1.0
"""Requests are judged by the second in which they arrive."""
NORMAL: Final = 1.2
"""A second is normal again when its mean TTFT is at most so many times the fault-free one ..."""
SLACK_MS: Final = 50.0
"""... or so little above it."""


class Cost(msgspec.Struct, kw_only=True):
    """The price of the faults of one run."""

    faults: dict[str, int]
    first_fault_s: float
    affected: int
    """Requests that fared differently (latency, or end)."""
    worse: int
    """Of those, with a later end than without the faults, or none."""
    retried: int
    lost_ends: int
    """Requests that completed without the faults and did not with them."""
    extra_ttft_ms_mean: float
    """Over the affected requests that have both."""
    extra_ttft_ms_max: float
    extra_e2e_ms_mean: float
    recomputed_tokens: int
    lost_gpu_s: float
    """Busy GPU seconds more than without the faults: work done twice or for nothing."""
    recovery_s: float
    """From the first fault to the end of the last second that was not normal; -1: no request."""


def resilience(config: Config, source: str, directory: Path) -> tuple[Summary, Summary, Cost]:
    """Run with and without the faults; both summaries and the cost."""
    if not config.faults:
        raise InputError(source, None, "faults", "missing; there is nothing to compare")
    calm = msgspec.structs.replace(config, faults=[])
    summaries: list[Summary] = []
    for name, variant in (("without", calm), ("with", config)):
        table = msgspec.structs.replace(config.output, dir=str(directory / name))
        variant = msgspec.structs.replace(variant, output=table)
        result = execute(variant, source, report=False)
        assert result.summary is not None
        summaries.append(result.summary)
    return summaries[0], summaries[1], _cost(config, directory, *summaries)


def _cost(config: Config, directory: Path, calm: Summary, struck: Summary) -> Cost:
    before = _rows(directory / "without")
    after = _rows(directory / "with")
    first_s = _first_strike(directory / "with", min(fault.at_s for fault in config.faults))
    affected = worse = lost_ends = retried = 0
    ttft: list[float] = []
    e2e: list[float] = []
    pairs: list[tuple[float, float, float]] = []
    for key, row in before.items():
        other = after.get(key)
        if other is None:
            continue
        retried += other["retries"] != row["retries"]
        is_same = all(other[k] == row[k] for k in ("first_token_ns", "last_token_ns", "status"))
        if row["ttft_ns"] and other["ttft_ns"]:
            arrival_s = int(row["arrival_ns"]) / NS_PER_S
            pairs.append((arrival_s, _ms(row["ttft_ns"]), _ms(other["ttft_ns"])))
        if is_same:
            continue
        affected += 1
        completed = row["status"] == "completed"
        lost_ends += completed and other["status"] != "completed"
        if row["ttft_ns"] and other["ttft_ns"]:
            ttft.append(_ms(other["ttft_ns"]) - _ms(row["ttft_ns"]))
        if row["latency_ns"] and other["latency_ns"]:
            e2e.append(_ms(other["latency_ns"]) - _ms(row["latency_ns"]))
            worse += e2e[-1] > 0
        else:
            worse += 1
    busy = [
        s.gpu_seconds.total - s.gpu_seconds.idle - s.gpu_seconds.loading for s in (calm, struck)
    ]
    return Cost(
        faults=struck.faults,
        first_fault_s=first_s,
        affected=affected,
        worse=worse,
        retried=retried,
        lost_ends=lost_ends,
        extra_ttft_ms_mean=float(np.mean(ttft)) if ttft else 0.0,
        extra_ttft_ms_max=max(ttft, default=0.0),
        extra_e2e_ms_mean=float(np.mean(e2e)) if e2e else 0.0,
        recomputed_tokens=sum(int(r["recomputed_toks"]) for r in after.values())
        - sum(int(r["recomputed_toks"]) for r in before.values()),
        lost_gpu_s=busy[1] - busy[0],
        recovery_s=_recovery_s(pairs, first_s),
    )


def _recovery_s(pairs: list[tuple[float, float, float]], first_s: float) -> float:
    """Until requests fare again as they would have without the faults."""
    seconds: dict[int, list[tuple[float, float]]] = {}
    for arrival_s, calm_ms, struck_ms in pairs:
        if arrival_s >= first_s - WINDOW_S:
            seconds.setdefault(int(arrival_s / WINDOW_S), []).append((calm_ms, struck_ms))
    last = -1.0
    for second in sorted(seconds):
        calm = float(np.mean([a for a, _ in seconds[second]]))
        struck = float(np.mean([b for _, b in seconds[second]]))
        if struck > max(NORMAL * calm, calm + SLACK_MS):
            last = (second + 1) * WINDOW_S
    return max(0.0, last - first_s) if last >= 0 else 0.0


def _rows(directory: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Requests by id and attempt (a client that tries again makes a new row)."""
    with (directory / "requests.csv").open(newline="") as file:
        rows: dict[tuple[str, str], dict[str, str]] = {}
        counts: dict[str, int] = {}
        for row in csv.DictReader(file):
            count = counts[row["request_id"]] = counts.get(row["request_id"], -1) + 1
            rows[row["request_id"], str(count)] = row
        return rows


def _first_strike(directory: Path, configured_s: float) -> float:
    with (directory / "marks.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] == "fault":
                return int(row["time_ns"]) / NS_PER_S
    return configured_s


def _ms(ns: str) -> float:
    return int(ns) / NS_PER_MS


def resilience_command(path: Path, overrides: Sequence[str], output: Path | None) -> int:
    """`emu resilience`."""
    config = load_config(path, overrides)
    console = open_console()
    if output is not None:
        print_cost(*resilience(config, str(path), output), console)
    else:
        with tempfile.TemporaryDirectory(prefix="emu-resilience-") as name:
            print_cost(*resilience(config, str(path), Path(name)), console)
    return 0


def print_cost(calm: Summary, struck: Summary, cost: Cost, console: Console) -> None:
    """Both runs side by side, and the price."""
    table = Table(title="resilience")
    for column in ("", "without faults", "with faults", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    for name, attribute, digits in _FIGURES:
        a, b = _figure(calm, attribute), _figure(struck, attribute)
        change = "" if not a else f"{(b - a) / a * 100:+.1f} %"
        table.add_row(name, f"{a:,.{digits}f}", f"{b:,.{digits}f}", change)
    console.print(table)
    kinds = ", ".join(f"{kind} x{count}" for kind, count in cost.faults.items()) or "none struck"
    ends = Table(title="what the faults cost", show_header=False)
    ends.add_column("")
    ends.add_column("", justify="right")
    for name, value in (
        ("faults that struck", kinds),
        ("first one at", f"{cost.first_fault_s:.3f} s"),
        ("requests affected", f"{cost.affected} ({cost.worse} of them for the worse)"),
        ("requests that started again", str(cost.retried)),
        ("no longer completed", str(cost.lost_ends)),
        ("extra TTFT, mean of the affected", f"{cost.extra_ttft_ms_mean:,.1f} ms"),
        ("extra TTFT, worst", f"{cost.extra_ttft_ms_max:,.1f} ms"),
        ("extra latency, mean of the affected", f"{cost.extra_e2e_ms_mean:,.1f} ms"),
        ("tokens computed again", f"{cost.recomputed_tokens:,}"),
        ("extra busy GPU time", f"{cost.lost_gpu_s:,.2f} GPU s"),
        ("time to recover", f"{cost.recovery_s:,.1f} s"),
    ):
        ends.add_row(name, value)
    console.print(ends)


_FIGURES: Final[tuple[tuple[str, str, int], ...]] = (
    ("completed", "completed", 0),
    ("failed", "failed", 0),
    ("rejected", "rejected", 0),
    ("TTFT mean (ms)", "mean_ttft_ms", 1),
    ("TTFT p99 (ms)", "p99_ttft_ms", 1),
    ("TPOT mean (ms)", "mean_tpot_ms", 2),
    ("ITL max (ms)", "max_itl_ms", 1),
    ("E2E p99 (ms)", "p99_e2el_ms", 1),
    ("simulated (s)", "simulated_s", 2),
)


def _figure(summary: Summary, name: str) -> float:
    value: Any = getattr(summary, name)
    return float(value or 0.0)
