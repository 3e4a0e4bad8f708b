"""What keys and figures of a sweep are called in tables and charts, and which are shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from emu.apps.shared.conditions import parse_conditions
from emu.apps.sweeps.drive import SweepResult

FIGURES: Final[Mapping[str, str]] = {
    "completed": "completed",
    "p99_ttft_ms": "TTFT p99",
    "p99_tpot_ms": "TPOT p99",
    "p99_e2el_ms": "E2E p99",
    "output_throughput": "tokens/s",
    "request_goodput": "goodput",
    "gpus": "GPUs",
    "gpu_seconds.total": "GPU s",
    "cost": "cost",
    "load.verdict": "load",
}
"""Figure -> its short name; those that every sweep shows."""
_LATENCY: Final = re.compile(r"(mean|median|std|p\d+)_(ttft|tpot|itl|e2el)_ms")
_METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_GROUP: Final = re.compile(r"replicas\.(\d+)\.(.+)")


def conditions_of(result: SweepResult) -> list[str]:
    """Figures that the conditions of a search name."""
    if result.sweep.search is None:
        return []
    meet = result.sweep.search.meet
    return [one.name for one in parse_conditions(meet, result.source, "search.meet")]


def shown_figures(result: SweepResult, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Figures of the tables: those of the conditions, then the usual ones.

    A condition on p95 TTFT stands in place of the usual p99.
    """
    asked = list(dict.fromkeys(conditions_of(result)))
    metrics = {match[2] for name in asked if (match := _LATENCY.fullmatch(name))}
    usual = [
        name
        for name in FIGURES
        if not ((match := _LATENCY.fullmatch(name)) and match[2] in metrics)
    ]
    return [name for name in dict.fromkeys((*asked, *usual)) if any(columns.get(name, ()))]


def latencies(result: SweepResult) -> list[str]:
    """The latencies that charts show: of the conditions, else p99 of TTFT and TPOT."""
    asked = [name for name in conditions_of(result) if _LATENCY.fullmatch(name)]
    return asked or ["p99_ttft_ms", "p99_tpot_ms"]


def plot_names(result: SweepResult) -> tuple[str, str]:
    """The axes (x, y) of the trade-off."""
    plot, pareto = result.sweep.plot, result.sweep.pareto
    if pareto is not None and len(pareto.minimize) > 1:
        return pareto.minimize[0], pareto.minimize[1]
    return plot.x, plot.y or latencies(result)[0]


def figure_label(name: str) -> str:
    """TTFT p95 for p95_ttft_ms; other names as they are."""
    match = _LATENCY.fullmatch(name)
    if match is not None:
        return f"{_METRICS[match[2]]} {match[1]}"
    return FIGURES.get(name, name)


def key_label(key: str, keys: Sequence[str], roles: Sequence[str]) -> str:
    """The last part of a dotted key, or as much of its end as tells it apart from the others.

    A group of replicas is called by its role (`prefill count`) where no other group has it.
    """
    match = _GROUP.fullmatch(key)
    if match is not None and int(match[1]) < len(roles):
        role = roles[int(match[1])]
        return f"{role if roles.count(role) == 1 else f'{role} {match[1]}'} {match[2]}"
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = parts[-count:]
        if sum(other.split(".")[-count:] == end for other in keys) <= 1:
            return ".".join(end)
    return key


def in_order(result: SweepResult) -> list[int]:
    """Rows along the axis: of a search and of random points the keys count, not the trials."""
    order = list(range(len(result.rows)))
    if result.sweep.search is None and result.sweep.random is None and result.sweep.pareto is None:
        return order

    def place(index: int) -> list[tuple[bool, float, str]]:
        values = [result.rows[index].point.values.get(key) for key in result.keys]
        return [
            (True, float(v), "")
            if isinstance(v, (int, float)) and not isinstance(v, bool)
            else (False, 0.0, str(v))
            for v in values
        ]

    return sorted(order, key=lambda index: (place(index), result.rows[index].point.seed or 0))
