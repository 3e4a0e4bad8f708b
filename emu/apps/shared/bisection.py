"""Bisection in rounds: the end of the values that meet a condition. Pure.

    search = Bisection(low=1, high=100, goal="highest", ...)
    while values := search.ask():
        search.tell({value: meets(value) for value in values})
    search.answer, search.bracket, search.is_monotone

Every round tries a fixed set of values, so the answer does not depend on how many of them are
tried at the same time. The condition is taken to change once over the range; a value that meets
it beyond one that does not is noted (`is_monotone`), and the first change counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def rounded(value: float) -> float:
    """Six significant digits: a value that can be read, typed and found again."""
    return float(f"{value:.6g}")


# Bisection in rounds: the end of the values that meet a condition. Pure.
#
#     search = Bisection(low=1, high=100, goal="highest", ...)
#     while values := search.ask():
#         search.tell({value: meets(value) for value in values})
#     search.answer, search.bracket, search.is_monotone
#
# Every round tries a fixed set of values, so the answer does not depend on how many of them are
# tried at the same time. The condition is taken to change once over the range; a value that meets
# it beyond one that does not is noted (`is_monotone`), and the first change counts.

GEOMETRIC_FROM = 4.0
"""Brackets whose ends differ by more than this factor are divided in the logarithm."""


class Bisection:
    """State of one search.

    It ends at a bracket of `tolerance` of its upper end, and tries `points_per_round` values at
    once.
    """

    def __init__(
        self,
        *,
        low: float,
        high: float,
        goal: str,
        integer: bool,
        tolerance: float,
        points_per_round: int,
    ) -> None:
        if integer:
            low, high = math.ceil(low), math.floor(high)
        self._good, self._bad = (low, high) if goal == "highest" else (high, low)
        self._integer = integer
        self._tolerance = tolerance
        self._points = points_per_round
        self._met: dict[float, bool] = {}
        self._is_done = False
        self.answer: float | None = None
        """The value searched for; None if not even the easy end of the range meets."""
        self.is_end_of_range = False
        """True if the whole range meets: the true answer may lie beyond."""
        self.rounds = 0
        """Rounds of which it has been told what came out."""

    @property
    def bracket(self) -> tuple[float, float] | None:
        """(meets, does not meet), neighbors as far as tried; None without a change."""
        if self.answer is None or self.is_end_of_range:
            return None
        return self._good, self._bad

    @property
    def is_monotone(self) -> bool:
        """Whether the condition changed once over all values tried."""
        ordered = sorted(self._met, reverse=self._good > self._bad)
        flags = [self._met[value] for value in ordered]
        return flags == sorted(flags, reverse=True)

    def ask(self) -> list[float]:
        """The values of the next round, ascending; empty when the search is over."""
        if self._is_done:
            return []
        inner = self._between(*sorted((self._good, self._bad)))
        if not self._met:
            return sorted({self._good, self._bad, *inner})
        return [] if self._is_narrow() else inner

    def tell(self, met: Mapping[float, bool]) -> None:
        """What came out of a round."""
        is_first = not self._met
        self.rounds += 1
        self._met.update(met)
        low, high = sorted((self._good, self._bad))
        inside = sorted(v for v in self._met if low <= v <= high)
        if self._good > self._bad:
            inside.reverse()
        if is_first and not self._met[inside[0]]:
            self._is_done = True
            return
        self._good = self.answer = inside[0]
        for value in inside[1:]:
            if not self._met[value]:
                self._bad = value
                return
            self._good = self.answer = value
        self._is_done = self.is_end_of_range = True

    def _is_narrow(self) -> bool:
        gap = abs(self._good - self._bad)
        if self._integer:
            return gap <= 1
        return gap <= self._tolerance * max(abs(self._good), abs(self._bad))

    def _between(self, low: float, high: float) -> list[float]:
        count = self._points
        if self._integer:
            count = min(count, int(high - low) - 1)
        parts = [(index + 1) / (count + 1) for index in range(count)]
        if low > 0 and high / low > GEOMETRIC_FROM:
            values = [low * (high / low) ** part for part in parts]
        else:
            values = [low + (high - low) * part for part in parts]
        chosen = {float(round(v)) if self._integer else rounded(v) for v in values}
        return sorted(v for v in chosen if low < v < high and v not in self._met)
