"""Stated intervals: between which multiples of an emulated figure a measured one lies.

The interval of a group of points (engine, GPU, precision, kind of model) comes from all other
groups, each with the same weight: it says what may be expected of a group that was never compared.
Its share of the group's own points is what it is judged by.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

LEVEL: Final = 0.9
"""Share of points that an interval is stated for."""
_OTHERS_MIN: Final = 2
"""Groups that an interval needs besides the one that it is stated for."""


class Interval(msgspec.Struct, frozen=True):
    """One metric of one group; bounds are multiples of the emulated figure."""

    group: str
    metric: str
    points: int
    low: float
    high: float
    inside: float
    """Share of the group's points between the bounds."""

    @property
    def width_percent(self) -> float:
        """From bound to bound, in per cent of the emulated figure."""
        return 100 * (self.high - self.low)


class Held(msgspec.Struct, frozen=True):
    """How the intervals of a metric hold over all groups."""

    metric: str
    groups: int
    inside: float
    """Share of all points."""
    worst_group: float
    """The least share of a group."""
    width_percent: float
    """Mean over the groups."""


def intervals_of(ratios: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Interval]:
    """Intervals by metric and group; `ratios`: measured over emulated by metric, then group."""
    found = []
    for metric, groups in ratios.items():
        known = {name: [r for r in values if math.isfinite(r)] for name, values in groups.items()}
        known = {name: values for name, values in known.items() if values}
        if len(known) <= _OTHERS_MIN:
            continue
        for name in sorted(known):
            others = [known[other] for other in sorted(known) if other != name]
            low = _quantile(others, (1 - LEVEL) / 2)
            high = _quantile(others, (1 + LEVEL) / 2)
            own = known[name]
            inside = sum(low <= ratio <= high for ratio in own) / len(own)
            found.append(Interval(name, metric, len(own), low, high, inside))
    return found


def _quantile(groups: Sequence[Sequence[float]], part: float) -> float:
    """Of all values, where each group weighs the same."""
    weighted = sorted((value, 1 / len(values)) for values in groups for value in values)
    left = part * len(groups)
    for value, weight in weighted:
        left -= weight
        if left <= 0:
            return value
    return weighted[-1][0]


def held(intervals: Sequence[Interval]) -> list[Held]:
    """How they hold, metric by metric."""
    by_metric: defaultdict[str, list[Interval]] = defaultdict(list)
    for one in intervals:
        by_metric[one.metric].append(one)
    return [
        Held(
            metric,
            len(rows),
            sum(row.inside * row.points for row in rows) / sum(row.points for row in rows),
            min(row.inside for row in rows),
            math.fsum(row.width_percent for row in rows) / len(rows),
        )
        for metric, rows in by_metric.items()
    ]
