"""The search over one layout: a generator that is told how its candidates do. Pure.

    search = search_of(layout, limit)
    asked = next(search)
    asked = search.send([worst(candidate) for candidate in asked])     # until StopIteration

`worst` is the largest figure / limit of a run: up to 1 it meets. The search takes the objectives
to be monotone: a cluster that meets them still does with a replica more of either role. Then a
number of colocated replicas is found by bisection; and what fails with as many replicas of one
role as the limit allows gives the least number of the other. `limit()` is the largest number of
replicas that could still be as cheap as the best cluster known; it may fall between two steps.
Clusters at the limit itself are tried, so that ties are found.

More prefill replicas send requests to decode in denser bursts, so that TPOT may rise a little with
them: a bound on a role counts only where its run misses by SLACK.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from emu.apps.plan.layouts import Candidate, Layout

Search = Generator[list[Candidate], list[float], None]
Limit = Callable[[], int]
SLACK: Final = 1.1
"""A split is ruled out by a run that misses a limit by more than this factor."""


def search_of(layout: Layout, limit: Limit, *, is_bounded: bool) -> Search:
    """The search over a layout; `is_bounded`: some cluster is known, the limit is near."""
    if layout.mode == "colocated":
        return _colocated(layout, limit, is_bounded=is_bounded)
    return _splits(layout, limit)


def _colocated(layout: Layout, limit: Limit, *, is_bounded: bool) -> Search:
    """Doubling until the objectives are met, then bisection."""
    low = layout.replicas_min - 1
    """No number up to this meets."""
    high = 0
    """Meets; 0 = none known."""
    tried = limit() if is_bounded else layout.replicas_min
    while not high:
        tried = min(tried, limit())
        if tried <= low:
            return
        if (yield [Candidate(layout, tried, 0)])[0] <= 1:
            high = tried
        else:
            low, tried = tried, 2 * tried
    while high - low > 1:
        middle = (low + high) // 2
        if (yield [Candidate(layout, middle, 0)])[0] <= 1:
            high = middle
        else:
            low = middle


def _splits(layout: Layout, limit: Limit) -> Search:
    """Least number of each role, then totals from their sum upwards until one split meets."""
    most = limit() - 1
    """Of one role."""
    least_prefill = layout.replicas_min
    if most < least_prefill:
        return
    if (yield [Candidate(layout, most, most)])[0] > SLACK:
        return
    prefill, decode = [least_prefill - 1, most], [0, most]
    while prefill[1] - prefill[0] > 1 or decode[1] - decode[0] > 1:
        brackets = [b for b in (prefill, decode) if b[1] - b[0] > 1]
        middles = [sum(bracket) // 2 for bracket in brackets]
        asked = [
            Candidate(layout, *((middle, most) if bracket is prefill else (most, middle)))
            for bracket, middle in zip(brackets, middles, strict=True)
        ]
        told = yield asked
        for bracket, middle, worst in zip(brackets, middles, told, strict=True):
            bracket[1 if worst <= SLACK else 0] = middle
    total = prefill[1] + decode[1]
    while total <= limit():
        splits = range(prefill[1], total - decode[1] + 1)
        told = yield [Candidate(layout, count, total - count) for count in splits]
        if min(told, default=SLACK) <= 1:
            return
        total += 1
