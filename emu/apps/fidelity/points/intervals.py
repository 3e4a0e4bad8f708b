"""Stated intervals: between which multiples of an emulated figure a measured one lies.

The interval of a part of the points comes from the groups (engine, GPU, precision, kind of model)
of all other parts, each group with the same weight: it says what may be expected of a part that was
never compared. A part is a group, or all groups of an engine, a GPU or a model. The share of the
part's own points that the interval holds is what it is judged by.
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
"""Groups that an interval needs besides those that it is stated for."""

Ratios = Mapping[str, Mapping[str, Sequence[float]]]
"""Measured over emulated, by the part that is left out, then by group."""


class Interval(msgspec.Struct, frozen=True):
    """One metric of one part; bounds are multiples of the emulated figure."""

    group: str
    """The group, engine, GPU or model that is left out."""
    metric: str
    points: int
    low: float
    high: float
    inside: float
    """Share of the part's points between the bounds."""

    @property
    def width_percent(self) -> float:
        """From bound to bound, in per cent of the emulated figure."""
        return 100 * (self.high - self.low)


class Held(msgspec.Struct, frozen=True):
    """How the intervals of a metric hold over all parts."""

    metric: str
    groups: int
    inside: float
    """Share of all points."""
    worst_group: float
    """The least share of a part."""
    width_percent: float
    """Mean over the parts."""


def intervals_of(ratios: Mapping[str, Ratios]) -> list[Interval]:
    """Intervals by metric and part; `ratios` has those of each metric."""
    found = []
    for metric, parts in ratios.items():
        known = {part: _known(groups) for part, groups in parts.items()}
        for part in sorted(known):
            own = [ratio for values in known[part] for ratio in values]
            others = [values for other in sorted(known) if other != part for values in known[other]]
            if not own or len(others) < _OTHERS_MIN:
                continue
            low = _quantile(others, (1 - LEVEL) / 2)
            high = _quantile(others, (1 + LEVEL) / 2)
            inside = sum(low <= ratio <= high for ratio in own) / len(own)
            found.append(Interval(part, metric, len(own), low, high, inside))
    return found


def _known(groups: Mapping[str, Sequence[float]]) -> list[list[float]]:
    """The groups of a part that have measured points."""
    finite = ([r for r in groups[name] if math.isfinite(r)] for name in sorted(groups))
    return [values for values in finite if values]


def _quantile(groups: Sequence[Sequence[float]], part: float) -> float:
    """The quantile of all values, where each group weighs the same."""
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
