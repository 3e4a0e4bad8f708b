"""How much more traffic a cluster takes: runs as long as those of the answer, at growing rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from emu.apps.plan.answer import Headroom
from emu.apps.plan.layouts import Candidate
from emu.apps.plan.question import Objective, Question
from emu.apps.plan.traffic import traffic_at
from emu.apps.plan.worlds import World, Worlds
from emu.apps.shared.give_up import RATIO
from emu.apps.shared.points import Driver, Row, meets
from emu.documents import Document

STEPS: Final = (1.1, 1.2, 1.4, 1.7, 2.0)
"""Factors between which it is looked for."""
TOLERANCE: Final = 0.03
_OVER: Final = ("overloaded", "unknown")


def headroom(
    driver: Driver, question: Question, worlds: Worlds, best: Candidate, plain: Document
) -> Headroom:
    """The largest factor at which the cluster meets with every seed.

    The first seed finds it, all confirm it; where they do not, less is promised.
    """
    rate = worlds.rate_per_s
    rows: dict[float, list[Row]] = {}

    def are_met(factor: float, seeds: Sequence[World]) -> bool:
        more = traffic_at(factor, plain, rate)
        met = tuple(one.limit(1.0) for one in question.objectives)
        points = [
            msgspec.structs.replace(worlds.point(best, world, more), limits=met) for world in seeds
        ]
        rows[factor] = driver.rows(points)
        return all(_is_met(row, question) for row in rows[factor])

    first = worlds.plain[:1]
    low, high = _bracket(lambda factor: are_met(factor, first))
    while high is not None and high - low > TOLERANCE * high:
        middle = round((low + high) / 2, 3)
        if are_met(middle, first):
            low = middle
        else:
            high = middle
    while low > 1 and not are_met(low, worlds.plain):
        low, high = max(1.0, round(low - TOLERANCE * low, 3)), low
    return Headroom(low, high, [] if high is None else _broken(rows[high], question))


def _bracket(are_met: Callable[[float], bool]) -> tuple[float, float | None]:
    """The last of STEPS that is met and the first that is not; 1 and None at the ends.

    It begins in their middle and looks above it first, as a run that misses ends early.
    """
    low, high = -1, len(STEPS)
    while high - low > 1:
        middle = (low + high + 1) // 2
        if are_met(STEPS[middle]):
            low = middle
        else:
            high = middle
    return 1.0 if low < 0 else STEPS[low], None if high == len(STEPS) else STEPS[high]


def _is_met(row: Row, question: Question) -> bool:
    conditions = [objective.condition for objective in question.objectives]
    figures = row.result.figures
    return meets(row.result, conditions, 0.0) and figures["load.verdict"] not in _OVER


def _is_missed(figures: Document, objective: Objective) -> bool:
    if RATIO in figures:
        return bool(figures[objective.limit(1.0).figure] > 1)
    return not objective.condition.holds(figures)


def _broken(rows: Sequence[Row], question: Question) -> list[str]:
    """Objectives that some seed misses; or that requests were not served, or waited ever longer."""
    labels = [
        objective.label
        for objective in question.objectives
        if any(_is_missed(row.result.figures, objective) for row in rows)
    ]
    if labels:
        return labels
    is_over = any(row.result.figures.get("load.verdict") in _OVER for row in rows)
    return ["load (waiting grows)"] if is_over else ["requests served"]
