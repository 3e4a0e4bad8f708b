"""Loads of ranks that share experts: how far the busiest is above the mean.

Owns the figures that follow from popularity and placement for one group of ranks. The busiest rank
sets the pace of a layer, because all wait for it in the exchange. Beside its part of the expected
load, chance makes it busier: with rows drawn independently, by about the expected maximum of as
many normal variables as there are ranks near the busiest. Pure.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import msgspec

from emu.latency.experts.placement import Slots, balanced, in_order, moved, rank_loads
from emu.latency.experts.popularity import Popularity

_AGES: Final = 4
"""Ages of a plan that its mean effect is taken over."""


class Deal(msgspec.Struct, frozen=True, kw_only=True):
    """What a placement is made for."""

    experts: int
    ranks: int
    slots: int
    """Of a layer on all ranks."""
    groups: int = 1
    nodes: int = 1
    seed: int = 42
    plans: bool = False
    """Experts are placed by load; else in order."""
    likeness: float = 1.0
    """Correlation of the logarithms of the loads that a fresh plan was made from and of those it
    serves."""
    interval_s: float = 0.0
    drift_s: float = 0.0


class Balance:
    """Loads of the ranks of a group."""

    def __init__(self, popularity: Popularity, deal: Deal) -> None:
        self.deal = deal
        self._popularity = popularity
        shares = popularity.shares(deal.experts, deal.seed)
        placed = [
            [self._placed(plan) for plan in popularity.earlier(deal.experts, deal.seed, likeness)]
            for likeness in self._likenesses()
        ]
        self.placed = placed[0]
        """Experts of each rank, by layer."""
        self._loads = [
            sorted((load * deal.ranks for load in rank_loads(slots, row)), reverse=True)
            for plans in placed
            for slots, row in zip(plans, shares, strict=True)
        ]
        """Loads of ranks in units of the mean, by layer and age of the plan, the busiest first."""
        self._slots = [
            [row[expert] / _copies(slots)[expert] for own in slots for expert in own]
            for slots, row in zip(placed[0], shares, strict=True)
        ]
        self._skews: dict[int, float] = {}

    def _placed(self, loads: list[float]) -> Slots:
        deal = self.deal
        if not deal.plans:
            return in_order(deal.experts, deal.ranks, deal.slots)
        return balanced(loads, deal.slots, deal.ranks, groups=deal.groups, nodes=deal.nodes)

    def _likenesses(self) -> list[float]:
        """How alike the loads of a plan and those of now are, over the plan's life."""
        deal = self.deal
        if not deal.plans or not deal.drift_s:
            return [deal.likeness]
        if not deal.interval_s:
            return [0.0]  # the plan is as old as the server
        ages = [(at + 0.5) / _AGES * deal.interval_s for at in range(_AGES)]
        return [deal.likeness * math.exp(-age / deal.drift_s) for age in ages]

    def skew(self, rows: float) -> float:
        """Rows of the busiest rank beside the mean, where the mean is `rows`."""
        known = self._skews.get(round(rows))
        if known is None:
            each = [_busiest(loads, max(1.0, rows)) for loads in self._loads]
            known = self._skews[round(rows)] = math.fsum(each) / len(each)
        return known

    @property
    def balancedness(self) -> float:
        """Mean load of the ranks beside the busiest, by expected loads alone."""
        return math.fsum(1.0 / loads[0] for loads in self._loads) / len(self._loads)

    def met(self, rows: float) -> float:
        """Slots of a rank whose weights are read for so many rows on all ranks together."""
        found = [math.fsum(-math.expm1(-rows * share) for share in slots) for slots in self._slots]
        return max(1.0, math.fsum(found) / len(found) / self.deal.ranks)

    def moved_slots(self) -> int:
        """Most slots of a layer that a rank fills anew when the plan is made again."""
        deal = self.deal
        if not (deal.plans and deal.interval_s and deal.drift_s):
            return 0
        likeness = math.exp(-deal.interval_s / deal.drift_s)
        shares = self._popularity.shares(deal.experts, deal.seed)
        before = self._popularity.earlier(deal.experts, deal.seed, likeness)
        return max(
            moved(self._placed(old), self._placed(new))
            for old, new in zip(before, shares, strict=True)
        )


def _copies(slots: Slots) -> dict[int, int]:
    copies: dict[int, int] = {}
    for own in slots:
        for expert in own:
            copies[expert] = copies.get(expert, 0) + 1
    return copies


def _busiest(loads: list[float], rows: float) -> float:
    """Expected rows of the busiest of ranks with these loads, the busiest first."""
    top = loads[0]
    spread = math.sqrt(top / rows)
    near = sum(1 for load in loads if load >= top - spread)
    return top + spread * expected_maximum(near)


def expected_maximum(count: int) -> float:
    """Expected maximum of so many standard normal variables (Blom's approximation)."""
    if count <= 1:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
