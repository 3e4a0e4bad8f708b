"""How much more traffic a cluster takes: runs as long as those of the answer, at growing rates.

Percentiles grow about as powers of the traffic do, until a queue does: between a rate that is met
and one that is not, the next to try lies where a line between the logarithms of their figures
crosses the limit. Where that moves the same end twice, the middle is next.
"""

from __future__ import annotations

import math
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

STEPS: Final = (1.4, 2.0)
"""Factors that are tried first, up to one that misses."""
TOLERANCE: Final = 0.03
_NEAR: Final = 0.98 * TOLERANCE
"""Of the last rate, so that a rounded factor is within the tolerance."""
_OVER: Final = ("overloaded", "unknown")


def headroom(
    driver: Driver,
    question: Question,
    worlds: Worlds,
    best: Candidate,
    plain: Document,
    ratio: float,
) -> Headroom:
    """The largest factor at which the cluster meets with every seed. `ratio`: its largest figure /
    limit as the traffic is.

    The first seed finds it, all confirm it; where they do not, less is promised.
    """
    rate = worlds.rate_per_s
    rows: dict[float, list[Row]] = {}

    def rows_at(factor: float, seeds: Sequence[World]) -> list[Row]:
        more = traffic_at(factor, plain, rate)
        met = tuple(one.limit(1.0) for one in question.objectives)
        points = [
            msgspec.structs.replace(worlds.point(best, world, more), limits=met) for world in seeds
        ]
        rows[factor] = driver.rows(points)
        return rows[factor]

    low, high = last_met(lambda at: _ratio(rows_at(at, worlds.plain[:1])[0], question), ratio)
    while low > 1 and not all(_is_met(row, question) for row in rows_at(low, worlds.plain)):
        low, high = max(1.0, round(low - TOLERANCE * low, 3)), low
    return Headroom(low, high, [] if high is None else _broken(rows[high], question))


def last_met(ratio_at: Callable[[float], float], at_one: float) -> tuple[float, float | None]:
    """A factor that is met and one within TOLERANCE of it that is not; None: all STEPS are met.

    `ratio_at` runs a factor: its largest figure / limit, above 1 where it misses.
    """
    low, ratio_low = 1.0, at_one
    high, ratio_high = None, math.inf
    for step in STEPS:
        ratio = ratio_at(step)
        if ratio > 1:
            high, ratio_high = step, ratio
            break
        low, ratio_low = step, ratio
    was_met: bool | None = None
    is_halved = False
    while high is not None and high - low > TOLERANCE * high:
        middle = _between(low, high, ratio_low, ratio_high, is_halved=is_halved)
        ratio = ratio_at(middle)
        is_met = ratio <= 1
        is_halved = is_met == was_met
        if is_met:
            low, ratio_low = middle, ratio
        else:
            high, ratio_high = middle, ratio
        was_met = is_met
    return low, high


def _between(
    low: float, high: float, ratio_low: float, ratio_high: float, *, is_halved: bool
) -> float:
    """The factor to try next: never so near an end that the other answer would not end it all, or
    in a narrow bracket so far from both ends that either answer does."""
    guess = (low + high) / 2
    if not is_halved and 0 < ratio_low < 1 < ratio_high < math.inf:
        guess = low - (high - low) * math.log(ratio_low) / math.log(ratio_high / ratio_low)
    near = sorted((low / (1 - _NEAR), high * (1 - _NEAR)))
    return round(min(max(guess, near[0]), near[1]), 3)


def _ratio(row: Row, question: Question) -> float:
    """The largest figure / limit; infinite where requests were not served or wait ever longer."""
    figures = row.result.figures
    if RATIO in figures:
        return float(figures[RATIO])
    ratio = max(float(figures.get(one.figure, 0.0)) / one.limit_ms for one in question.objectives)
    return ratio if ratio > 1 or _is_met(row, question) else math.inf


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
