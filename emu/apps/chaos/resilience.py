"""What faults cost: a run beside the same run without its faults.

Both runs have the same seed, so the same requests arrive at the same times; a request that fares
differently was affected by the faults. Reads only what the runs wrote, plus the books of recovery.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from emu.cluster.backends import make_latency
from emu.cluster.plan import Plan, make_plan
from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.process.console import open_console
from emu.process.interrupts import scratch
from emu.report.summary import Summary
from emu.runs.runner import execute
from emu.units import NS_PER_MS, NS_PER_S

WINDOW_S: Final = 1.0
"""Requests are judged by the second in which they arrive."""
NORMAL: Final = 1.2
"""A second is normal if mean TTFT and TPOT are at most so many times the fault-free ones ..."""
SLACK_MS: Final = 50.0
"""... or so little above: TTFT ..."""
SHOWN: Final = 4
"""So many targets are named."""
TPOT_SLACK_MS: Final = 2.0
"""... and TPOT."""
Pair = tuple[float, list[tuple[float, float]]]
"""Arrival in seconds; TTFT, then TPOT, in ms without the faults and with them."""


class Cost(msgspec.Struct, kw_only=True):
    """The price of the faults of one run."""

    faults: dict[str, int]
    targets: list[str]
    """What they struck, in order, each once."""
    missed: list[str]
    """Faults that found nothing to strike, and why."""
    first_fault_s: float
    affected: int
    """Requests that fared differently (latency, or end)."""
    worse: int
    """Of those, with a later end than without the faults, or none."""
    retried: int
    """Requests that were started again."""
    lost_ends: int
    """Requests that completed without the faults and did not with them."""
    extra_ttft_ms_mean: float
    """Over the affected requests that have both."""
    extra_ttft_ms_max: float
    extra_e2e_ms_mean: float
    recomputed_tokens: int
    lost_gpu_s: float
    """GPU seconds to compute those tokens again, each request's alone; -1: not known."""
    down_gpu_s: float
    """GPU seconds in which crashed replicas were away."""
    recovery_s: float
    """From the first fault to the end of the last second that was not normal."""


def resilience(config: Config, source: str, directory: Path) -> tuple[Summary, Summary, Cost]:
    """Run with and without the faults; both summaries and the cost."""
    if not config.faults:
        raise InputError(
            source,
            None,
            "faults",
            "missing: add [[faults]], or see what breaks first: emu chaos CONFIG --slo",
        )
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
    pairs: list[Pair] = []
    for key, row in before.items():
        other = after.get(key)
        if other is None:
            continue
        retried += other["retries"] != row["retries"]
        is_same = all(other[k] == row[k] for k in ("first_token_ns", "last_token_ns", "status"))
        if row["ttft_ns"] and other["ttft_ns"]:
            arrival_s = int(row["arrival_ns"]) / NS_PER_S
            times = [(_ms(row[name]), _ms(other[name])) for name in ("ttft_ns", "tpot_ns")]
            pairs.append((arrival_s, times))
        if is_same:
            continue
        affected += 1
        if row["status"] == "completed" and other["status"] != "completed":
            lost_ends += 1
            worse += 1
            continue
        if row["ttft_ns"] and other["ttft_ns"]:
            ttft.append(_ms(other["ttft_ns"]) - _ms(row["ttft_ns"]))
        if row["latency_ns"] and other["latency_ns"]:
            e2e.append(_ms(other["latency_ns"]) - _ms(row["latency_ns"]))
            worse += e2e[-1] > 0
        else:
            worse += 1
    again = {
        key: int(row["recomputed_toks"]) - int(before[key]["recomputed_toks"])
        for key, row in after.items()
        if key in before
    }
    plan = make_plan(config)
    return Cost(
        faults=struck.faults,
        targets=_marked(directory / "with", "fault", lambda row: row["target"]),
        missed=_marked(
            directory / "with", "fault missed", lambda row: f"{row['target']}: {row['text']}"
        ),
        first_fault_s=first_s,
        affected=affected,
        worse=worse,
        retried=retried,
        lost_ends=lost_ends,
        extra_ttft_ms_mean=float(np.mean(ttft)) if ttft else 0.0,
        extra_ttft_ms_max=max(ttft, default=0.0),
        extra_e2e_ms_mean=float(np.mean(e2e)) if e2e else 0.0,
        recomputed_tokens=sum(again.values()),
        lost_gpu_s=_price_s(plan, again.values()),
        down_gpu_s=_down_s(plan, directory / "with", struck.simulated_s),
        recovery_s=_recovery_s(pairs, first_s),
    )


def _price_s(plan: Plan, tokens: Iterable[int]) -> float:
    """GPU seconds of prefilling so many tokens, each count by itself, where prompts are served."""
    replica = next((r for r in plan.replicas if r.role in ("prefill", "colocated")), None)
    if replica is None:
        return -1.0
    latency = make_latency(replica.latency_context(plan.config))
    if latency.foreign:  # a real process is not asked
        return -1.0
    total_ns = 0
    for count in tokens:
        if count:
            shape = BatchShape(prefill_new=[abs(count)], prefill_context=[0], sequences=1)
            total_ns += latency.iteration_ns(shape) * (1 if count > 0 else -1)
    return total_ns * len(replica.gpus) / NS_PER_S


def _down_s(plan: Plan, directory: Path, end_s: float) -> float:
    """GPU seconds in the state `failed`."""
    since_s: dict[int, float] = {}
    total_s = 0.0
    gpus = {replica.replica_id: len(replica.gpus) for replica in plan.replicas}
    with (directory / "transitions.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            replica, at_s = int(row["replica"]), int(row["time_ns"]) / NS_PER_S
            if row["to"] == "failed":
                since_s[replica] = at_s
            elif row["from"] == "failed":
                total_s += (at_s - since_s.pop(replica)) * gpus[replica]
    return total_s + sum((end_s - at_s) * gpus[replica] for replica, at_s in since_s.items())


def _recovery_s(pairs: list[Pair], first_s: float) -> float:
    """Seconds until TTFT and TPOT are again what they would have been without the faults."""
    seconds: dict[int, list[Pair]] = {}
    for pair in pairs:
        if pair[0] >= first_s - WINDOW_S:
            seconds.setdefault(int(pair[0] / WINDOW_S), []).append(pair)
    last = -1.0
    for second, members in seconds.items():
        for index, slack_ms in enumerate((SLACK_MS, TPOT_SLACK_MS)):
            calm = float(np.mean([times[index][0] for _, times in members]))
            struck = float(np.mean([times[index][1] for _, times in members]))
            if struck > max(NORMAL * calm, calm + slack_ms):
                last = max(last, (second + 1) * WINDOW_S)
    return max(0.0, last - first_s)


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


def _marked(directory: Path, kind: str, say: Callable[[dict[str, str]], str]) -> list[str]:
    """What there is to say of marks of a kind, in order, each once."""
    with (directory / "marks.csv").open(newline="") as file:
        said = [say(row) for row in csv.DictReader(file) if row["kind"] == kind]
    return list(dict.fromkeys(said))


def _ms(ns: str) -> float:
    return int(ns) / NS_PER_MS


def resilience_command(path: Path, overrides: Sequence[str], output: Path | None) -> int:
    """`emu resilience`."""
    config = load_config(path, overrides)
    console = open_console()
    if output is not None:
        print_cost(*resilience(config, str(path), output), console)
    else:
        with scratch("emu-resilience-") as directory:
            print_cost(*resilience(config, str(path), directory), console)
    if config.recovery.ep_fault == "mask":
        from emu.apps.chaos.copies import copies_of, copies_table

        for name, rows in copies_of(make_plan(config, str(path))):
            console.print(copies_table(name, rows))
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
    if calm.slo.joint_attainment is not None and struck.slo.joint_attainment is not None:
        a, b = 100 * calm.slo.joint_attainment, 100 * struck.slo.joint_attainment
        table.add_row("objectives met (%)", f"{a:.1f}", f"{b:.1f}", f"{b - a:+.1f} points")
    console.print(table)
    kinds = ", ".join(f"{kind} x{count}" for kind, count in cost.faults.items()) or "none struck"
    ends = Table(title="what the faults cost", show_header=False)
    ends.add_column("")
    ends.add_column("", justify="right")
    for name, value in (
        ("faults that struck", kinds),
        ("what they struck", _some(cost.targets)),
        *([("found nothing to strike", _some(cost.missed))] if cost.missed else []),
        ("first one at", f"{cost.first_fault_s:.3f} s"),
        ("requests affected", f"{cost.affected} ({cost.worse} of them for the worse)"),
        ("requests that started again", str(cost.retried)),
        ("no longer completed", str(cost.lost_ends)),
        ("extra TTFT, mean of the affected", f"{cost.extra_ttft_ms_mean:,.1f} ms"),
        ("extra TTFT, worst", f"{cost.extra_ttft_ms_max:,.1f} ms"),
        ("extra latency, mean of the affected", f"{cost.extra_e2e_ms_mean:,.1f} ms"),
        ("tokens computed again", f"{cost.recomputed_tokens:,}"),
        ("lost work", f"{cost.lost_gpu_s:,.2f} GPU s" if cost.lost_gpu_s >= 0 else "not known"),
        ("crashed replicas away", f"{cost.down_gpu_s:,.2f} GPU s"),
        ("time to recover", f"{cost.recovery_s:,.1f} s"),
    ):
        ends.add_row(name, value)
    console.print(ends)


def _some(names: Sequence[str]) -> str:
    """The first ones, and how many more."""
    more = len(names) - SHOWN
    return "\n".join([*names[:SHOWN], *([f"and {more} more"] if more > 0 else [])]) or "nothing"


_FIGURES: Final[tuple[tuple[str, str, int], ...]] = (
    ("completed", "completed", 0),
    ("failed", "failed", 0),
    ("rejected", "rejected", 0),
    ("TTFT mean (ms)", "mean_ttft_ms", 1),
    ("TTFT p95 (ms)", "p95_ttft_ms", 1),
    ("TTFT p99 (ms)", "p99_ttft_ms", 1),
    ("TPOT mean (ms)", "mean_tpot_ms", 2),
    ("TPOT p95 (ms)", "p95_tpot_ms", 2),
    ("ITL max (ms)", "max_itl_ms", 1),
    ("E2E p99 (ms)", "p99_e2el_ms", 1),
    ("simulated (s)", "simulated_s", 2),
)


def _figure(summary: Summary, name: str) -> float:
    value: Any = getattr(summary, name)
    return float(value or 0.0)
