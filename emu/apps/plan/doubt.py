"""How sure an answer is, and what makes it unsure: seeds beside the engine. Pure.

The draws have an engine and a seed of their own each; the same seeds are run with the engine as it
is. The part of the variance that is left with the engine fixed is that of arrivals and sampling,
the rest is the engine's; its error is that of leaving out one draw at a time (jackknife).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

LOW, HIGH = 5, 95
"""Percentiles of the interval of the draws: 90 %."""


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """Where the uncertainty of the objective that is nearest to its limit comes from."""

    objective: str
    engine_part: float
    """Of the variance of its logarithm."""
    engine_part_error: float
    """Standard error."""
    draws: int
    seeds: int
    constants: dict[str, float]
    """Constant of the engine -> its part of what the engine makes unsure, by arithmetic."""
    measure: str
    """What would narrow it most."""


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of draws: 90 %."""
    low, median, high = np.percentile(values, (LOW, 50, HIGH))
    return float(median), float(low), float(high)


def engine_part(drawn: Sequence[float], fixed: Sequence[float]) -> tuple[float, float]:
    """(part of the variance of the logarithm that the engine makes, its standard error).

    `drawn`: values with engine and seed drawn; `fixed`: with the seed alone. Not a number where
    nothing can be said (fewer than three of either).
    """
    if min(len(drawn), len(fixed)) < 3:
        return math.nan, math.nan
    a, b = np.log(np.maximum(drawn, 1e-9)), np.log(np.maximum(fixed, 1e-9))

    def part(a: np.ndarray, b: np.ndarray) -> float:
        whole = float(a.var(ddof=1))
        return min(1.0, max(0.0, 1 - float(b.var(ddof=1)) / whole)) if whole > 0 else 0.0

    error = 0.0
    for column, is_drawn in ((a, True), (b, False)):
        left = np.array(
            [
                part(np.delete(a, i), b) if is_drawn else part(a, np.delete(b, i))
                for i in range(len(column))
            ]
        )
        error += (len(column) - 1) / len(column) * float(((left - left.mean()) ** 2).sum())
    return part(a, b), math.sqrt(error)


MEASUREMENTS = {
    "weights_time": "TPOT at a known number of requests at once",
    "context_time": "TPOT with long histories",
    "added_step_ns": "TPOT at a known number of requests at once",
    "added_sequence_ns": "TPOT at a known number of requests at once",
    "prompt_time": "TTFT of single prompts of several lengths",
    "added_prompt_ns": "TTFT of single prompts of several lengths",
    "intake_ns": "TTFT of many short requests at once",
    "output_event_ns": "TTFT of many short requests at once",
}
"""Constant of the engine -> what tells it."""


def measure_of(constants: dict[str, float]) -> str:
    """The measurement that tells most of what is not known."""
    parts: dict[str, float] = {}
    for name, part in constants.items():
        if name in MEASUREMENTS:
            parts[MEASUREMENTS[name]] = parts.get(MEASUREMENTS[name], 0.0) + part
    if not parts:
        return ""
    best = max(parts, key=lambda one: parts[one])
    return f"{best} (emu learn URL measures it)"


def doubt_told(doubt: Doubt) -> str:
    """In words."""
    words = f"{doubt.objective} is unsure"
    if math.isfinite(doubt.engine_part):
        error = 100 * doubt.engine_part_error
        words += f" {100 * doubt.engine_part:.0f} % by the engine (± {error:.0f} points)"
    largest = sorted(doubt.constants.items(), key=lambda item: -item[1])[:2]
    words += ": " + ", ".join(f"{name} {100 * part:.0f} %" for name, part in largest)
    return f"{words}; most would be learned from {doubt.measure}"
