"""Stated intervals: between which multiples of an emulated figure a measured one lies.

The interval of a part of the points comes from the groups (engine, GPU, precision, kind of model,
one server or prefill and decode apart) of all other parts: it says what may be expected of a part
that was never compared. It holds nine tenths of what those groups show, each with the same weight,
and a little more, as a new group may lie outside all that were seen: of n groups the share is
0.9 (n + 1) / n. No distribution is assumed, so that a single row that is far off widens nothing.

Fewer than `_GROUPS_MIN` groups have no such tails. There the logarithms of the points are taken to
scatter about the mean of their group, and these means about a common one (random effects); a new
group has both scatters, and the doubt of the common mean, with Student's factor for so few groups.

A part is a group, or all groups of an engine, a GPU or a model. Servers of prefill and decode apart
and single ones are told of each other's intervals nothing. The share of a part's own points that
its interval holds is what it is judged by.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import msgspec

_ROUNDING: Final = 1e-9
LEVEL: Final = 0.9
"""Share of points that an interval is stated for."""
_POINTS_MIN: Final = 5
"""A part of fewer points is not judged by the share of its own that is held."""
_OTHERS_MIN: Final = 2
"""Groups that an interval needs besides those that it is stated for."""
_GROUPS_MIN: Final = 9
"""Groups from which on they are counted: fewer do not reach the share."""

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
    """The least share of a part of five points and more."""
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
            low, high = _of_a_new_group(others)
            inside = sum(low <= ratio <= high for ratio in own) / len(own)
            found.append(Interval(part, metric, len(own), low, high, inside))
    return found


def _known(groups: Mapping[str, Sequence[float]]) -> list[list[float]]:
    """The groups of a part that have measured points."""
    finite = ([r for r in groups[name] if math.isfinite(r)] for name in sorted(groups))
    return [values for values in finite if values]


def _of_a_new_group(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The interval of a group that was not compared, from those that were."""
    if len(groups) < _GROUPS_MIN:
        return _of_few(groups)
    weighed = sorted((ratio, 1 / len(values)) for values in groups for ratio in values)
    out = (len(groups) - LEVEL * (len(groups) + 1)) / 2 + _ROUNDING
    return _beyond(weighed, out), _beyond(weighed[::-1], out)


def _beyond(weighed: Sequence[tuple[float, float]], weight: float) -> float:
    """The first of some ordered values before which lies no more than a weight."""
    sums = accumulate(of_it for _, of_it in weighed)
    beyond = (value for (value, _), so_far in zip(weighed, sums, strict=True) if so_far > weight)
    return next(beyond, weighed[-1][0])


def _of_few(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The same, by random effects."""
    logs = [[math.log(ratio) for ratio in values] for values in groups]
    means = [statistics.fmean(values) for values in logs]
    squares = math.fsum(
        (value - mean) ** 2 for values, mean in zip(logs, means, strict=True) for value in values
    )
    freedom = sum(map(len, logs)) - len(logs)
    between = statistics.variance(means) * (1 + 1 / len(means))
    sigmas = _student((1 + LEVEL) / 2, len(means) - 1)
    half = sigmas * math.sqrt(between + squares / max(1, freedom))
    middle = statistics.fmean(means)
    return math.exp(middle - half), math.exp(middle + half)


def _student(share: float, freedom: int) -> float:
    """Student's t below which so large a share lies: exact for one and two degrees of freedom,
    within 0.4 % for more (Abramowitz and Stegun 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = statistics.NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


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
            min((row.inside for row in rows if row.points >= _POINTS_MIN), default=1.0),
            math.fsum(row.width_percent for row in rows) / len(rows),
        )
        for metric, rows in by_metric.items()
    ]
