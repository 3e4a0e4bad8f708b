"""Figures over draws of what is not known (draws.json): intervals, their sources, comparisons.

Owns the file's form and what is said of it. Pure but for reading it; the draws are run by
`emu/apps/sweeps/draws.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from emu.errors import InputError
from emu.process.prepared import prepared
from emu.report.table import number

if TYPE_CHECKING:
    from rich.console import Console


NAME: Final = "draws.json"
SOURCES: Final = ("engine", "arrivals", "sampling")
LEVEL: Final = 90
"""Per cent of an interval."""
SHOWN: Final = {
    **{
        f"{statistic}_{metric}_ms": f"{label} {'p50' if statistic == 'median' else statistic}, ms"
        for metric, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2E"))
        for statistic in ("mean", "median", "p95", "p99")
    },
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "request_goodput": "goodput, requests/s",
    "slo.joint_attainment": "objectives met",
    "gpu_seconds.total": "GPU time, s",
    "cost": "cost",
}
"""Figures that tables over seeds and draws have, with their labels."""
_EMPIRICAL_MIN: Final = 40
"""Draws from which quantiles are taken as they are; below, of a normal logarithm."""
_T95: Final = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771),
    *(1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706),
    *(1.703, 1.701, 1.699, 1.697, 1.696, 1.694, 1.692, 1.691, 1.690, 1.688, 1.687, 1.686, 1.685),
)
"""95 % quantiles of Student's t for 1 to 39 degrees of freedom."""
HIGHER_IS_BETTER: Final = frozenset(
    (
        "request_throughput",
        "output_throughput",
        "total_token_throughput",
        "request_goodput",
        "slo.joint_attainment",
    )
)


class Interval(msgspec.Struct, frozen=True):
    """A figure over all draws."""

    median: float
    low: float
    high: float
    values: list[float]
    shares: dict[str, float]
    """Part of the variance from each source that varies; empty if nothing varies."""


class Draws(msgspec.Struct, frozen=True):
    """draws.json."""

    count: int
    """Draws that ended."""
    asked: int
    """Draws that were wanted."""
    seed: int
    level_percent: int
    engines: list[str]
    """What each kind of replica's engine was drawn from, in words."""
    varied: list[str]
    """Sources that vary."""
    numbers: list[list[int]]
    """Of each draw: the numbers of its engine, arrivals and sampling."""
    figures: dict[str, Interval]


def interval_of(
    values: Mapping[int, float], numbers: Sequence[Sequence[int]], varied: Sequence[str]
) -> Interval:
    """Interval and sources of one figure; `values` by number of the draw."""
    column = np.array([values[index] for index in sorted(values)])
    median = float(np.median(column))
    low, high = median, median
    if len(column) >= _EMPIRICAL_MIN:
        low, high = (float(v) for v in np.quantile(column, (0.05, 0.95)))
    elif len(column) > 1:
        is_positive = bool((column > 0).all())
        scaled = np.log(column) if is_positive else column
        wide = _T95[len(column) - 2] * float(scaled.std(ddof=1))
        low, high = float(scaled.mean()) - wide, float(scaled.mean()) + wide
        if is_positive:
            low, high = math.exp(low), math.exp(high)
    parts = dict.fromkeys(varied, 0.0)
    counts = dict.fromkeys(varied, 0)
    for index in range(0, len(numbers) - 1, 2):
        if index in values and index + 1 in values:
            unlike = [
                i
                for i, pair in enumerate(zip(*numbers[index : index + 2], strict=True))
                if pair[0] != pair[1]
            ]
            for source in unlike:
                name = SOURCES[source]
                parts[name] += (values[index] - values[index + 1]) ** 2
                counts[name] += 1
    means = {name: parts[name] / counts[name] for name in varied if counts[name]}
    total = sum(means.values())
    shares = {name: value / total for name, value in means.items()} if total > 0 else {}
    return Interval(median, low, high, column.tolist(), shares)


def shown(result: Draws) -> list[tuple[str, str, Interval]]:
    """(name, label, interval) of the figures that tables have."""
    return [
        (name, label, result.figures[name])
        for name, label in SHOWN.items()
        if name in result.figures
    ]


def interval_text(interval: Interval) -> str:
    """`370 to 460`."""
    return f"{number(interval.low)} to {number(interval.high)}"


def share_text(interval: Interval) -> str:
    """`engine 80 %, arrivals 20 %`, the largest first."""
    ordered = sorted(interval.shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in ordered if share >= 0.005)


class Odds(msgspec.Struct, frozen=True):
    """A figure of a base and another configuration, draw by draw."""

    name: str
    intervals: list[Interval]
    better: list[float]
    """Probability that the second, third... is better than the first."""


def read_draws(directory: Path) -> Draws:
    """draws.json. Raises InputError."""
    path = directory / NAME
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), prepared(Draws))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(str(path), None, "", f"unusable: {error}") from None


def better_part(name: str, base: Draws, other: Draws) -> float | None:
    """How often the other's draws of a figure are better than the base's, draw by draw.

    None if they are not the same draws, or one has not the figure. Equal figures count half.
    """
    if (other.seed, other.numbers) != (base.seed, base.numbers):
        return None
    if name not in base.figures or name not in other.figures:
        return None
    sign = -1.0 if name in HIGHER_IS_BETTER else 1.0
    apart = sign * (np.array(other.figures[name].values) - np.array(base.figures[name].values))
    return float(((apart < 0) + 0.5 * (apart == 0)).mean())


def compare_draws(directories: Sequence[Path]) -> list[Odds]:
    """Draws against the first's. Raises InputError if they are not the same draws."""
    sets = [read_draws(directory) for directory in directories]
    for directory, one in zip(directories, sets, strict=True):
        if (one.seed, one.numbers) != (sets[0].seed, sets[0].numbers):
            problem = "has other draws than the first: run both with the same --draws and seed"
            raise InputError(str(directory / NAME), None, "", problem)
    found = []
    for name, label in SHOWN.items():
        if not all(name in one.figures for one in sets):
            continue
        intervals = [one.figures[name] for one in sets]
        better = [better_part(name, sets[0], other) or 0.0 for other in sets[1:]]
        found.append(Odds(label, intervals, better))
    return found


def print_odds(directories: Sequence[Path], names: Sequence[str], console: Console) -> None:
    """The comparison as a table."""
    from rich.table import Table

    first = read_draws(directories[0])
    title = f"Medians and {first.level_percent} % intervals of {first.count} draws, draw by draw"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for index, name in enumerate(names):
        table.add_column(name, justify="right")
        table.add_column("from")
        if index:
            table.add_column(f"better than {names[0]}", justify="right")
    for row in compare_draws(directories):
        cells = []
        for at, interval in enumerate(row.intervals):
            cells.append(f"{number(interval.median)} ({interval_text(interval)})")
            cells.append(share_text(interval))
            if at:
                cells.append(f"{100 * row.better[at - 1]:.0f} %")
        table.add_row(row.name, *cells)
    console.print(table)
    console.print("engines: " + "; ".join(first.engines), soft_wrap=True)
