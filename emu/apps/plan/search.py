"""The search over one layout: a generator that is told how its candidates do. Pure.

    search = search_of(layout, start, limit)
    asked = next(search)
    asked = search.send([holds(candidate) for candidate in asked.candidates])  # until StopIteration

What is asked is whether enough worlds have a largest figure / limit up to `asked.slack`: at 1 a
cluster meets the objectives. The search takes the objectives to be monotone: a cluster that meets
them still does with a replica more of either role. So what fails with plenty of one role gives the
least number of the other, and from these least numbers clusters are tried in the order of their
cost. Only failures are used as bounds, and those that are near (`is_probe`) may be judged by a few
worlds: a failure in so many that the rest could not mend it is one.

Runs that miss end early, and runs of plenty that meet are the dearest of all. So a split is first
looked for from `start` upwards, each time with more of what `lacking()` says that the last one was
short of. Where it is as cheap as can be, what is left to be run are the two failures that say so.

`limit()` is the largest cost that could still be as good as the best cluster known; it may fall
between two steps. Clusters at the limit itself are tried, so that ties are found.

More prefill replicas send requests to decode in denser bursts, so that TPOT may rise a little with
them: a bound on a role counts only where its runs miss by SLACK.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Final

import msgspec

from emu.apps.plan.layouts import Candidate, Layout

SLACK: Final = 1.1
"""A number of a role is ruled out by runs that miss a limit by more than this factor."""
_EPSILON: Final = 1e-9


class Asked(msgspec.Struct, frozen=True):
    """Clusters whose runs the search wants."""

    candidates: tuple[Candidate, ...]
    slack: float = 1.0
    """Figure / limit up to which a world counts as met."""
    is_probe: bool = False
    """A cluster holds unless so many worlds fail that it cannot; no more of them are run."""


Search = Generator[Asked, list[bool], None]
Limit = Callable[[], float]
Lacking = Callable[[Candidate], tuple[bool, bool]]


def both_roles(candidate: Candidate) -> tuple[bool, bool]:
    """What a cluster that fails is short of, where nothing is known of its runs."""
    return True, True


def search_of(
    layout: Layout,
    start: tuple[int, int],
    limit: Limit,
    replicas_max: int,
    lacking: Lacking = both_roles,
) -> Search:
    """The search over a layout from so many replicas of each role (decode 0 where colocated).

    `lacking`: whether a cluster that failed has too little prefill, and too little decode.
    """
    if layout.mode == "colocated":
        yield from _colocated(layout, start[0], limit, replicas_max)
        return
    yield from _splits(layout, start, limit, replicas_max, lacking)


def _colocated(layout: Layout, start: int, limit: Limit, replicas_max: int) -> Search:
    price = layout.prices[0]

    def most() -> int:
        return affordable(limit(), price, replicas_max)

    def asked(count: int) -> Asked:
        return Asked((Candidate(layout, count, 0),), is_probe=True)

    least = yield from _least(layout.replicas_min, start, most, asked)
    while least <= most():
        if (yield Asked((Candidate(layout, least, 0),)))[0]:
            return
        least += 1


def affordable(cost: float, price: float, most: int) -> int:
    """How many replicas a cost buys, up to `most`."""
    return most if math.isinf(cost) else min(most, int(cost / price * (1 + _EPSILON)))


def _grown(failed: int) -> int:
    """The step upwards after so many that failed: it doubles every second time, as a run of too
    small a cluster ends early and one of too large a cluster does not."""
    return 1 << failed // 2


def _least(
    least: int,
    start: int,
    most: Callable[[], int],
    asked: Callable[[int], Asked],
    is_enough: bool = False,
) -> Generator[Asked, list[bool], int]:
    """The smallest count that does not fail, from `least` on; beyond `most()` if all do.

    Steps from `start` grow until a change is found (upwards more slowly than downwards); then
    bisection. `is_enough`: `start` does not fail.
    """
    low, high, step, failed = least - 1, start if is_enough else 0, 1, 0
    tried = max(least, start - is_enough)
    while not high or high - low > 1:
        tried = min(tried, most()) if not high else tried
        if tried <= low:
            return low + 1
        if (yield asked(tried))[0]:
            high = tried
            is_low_tried = low >= least
            tried = (low + high) // 2 if is_low_tried else max(low + 1, high - step)
        else:
            low = tried
            tried = (low + high) // 2 if high else low + _grown(failed)
            failed += 1
        step *= 2
    return high


def _splits(
    layout: Layout,
    start: tuple[int, int],
    limit: Limit,
    replicas_max: int,
    lacking: Lacking,
) -> Search:
    """A split that meets, the least number of each role, then splits in the order of their cost
    until one meets."""
    first, second = layout.prices
    near, is_enough = yield from _climbed(layout, start, limit, replicas_max, lacking)

    def most(price: float, other: float) -> int:
        return affordable(limit() - other, price, replicas_max - 1)

    def plenty(role: int) -> int:
        return max(1, min(2 * max(start[role], near[role]) + 2, replicas_max))

    def many_prefill(decode: int) -> Asked:
        return Asked((Candidate(layout, plenty(0), decode),), SLACK, is_probe=True)

    def many_decode(prefill: int) -> Asked:
        return Asked((Candidate(layout, prefill, plenty(1)),), SLACK, is_probe=True)

    least = layout.replicas_min
    prefill = yield from _least(least, near[0], lambda: most(first, second), many_decode, is_enough)
    decode = yield from _least(
        1, near[1], lambda: most(second, prefill * first), many_prefill, is_enough
    )
    waiting = {(prefill, decode)}
    done: set[tuple[int, int]] = set()
    while waiting:
        cheapest = min(p * first + d * second for p, d in waiting)
        if cheapest > limit() * (1 + _EPSILON):
            return
        now = sorted(
            pair
            for pair in waiting
            if pair[0] * first + pair[1] * second <= cheapest * (1 + _EPSILON)
        )
        asked = [pair for pair in now if sum(pair) <= replicas_max]
        if asked:
            told = yield Asked(tuple(Candidate(layout, *pair) for pair in asked))
            if any(told):
                return
        done |= set(now)
        waiting -= done
        for p, d in asked:
            waiting |= {(p + 1, d), (p, d + 1)} - done


def _climbed(
    layout: Layout,
    start: tuple[int, int],
    limit: Limit,
    replicas_max: int,
    lacking: Lacking,
) -> Generator[Asked, list[bool], tuple[tuple[int, int], bool]]:
    """The first split from `start` upwards that does not fail, and True; the first one beyond the
    limit, and False. What a split lacks grows by `_grown` steps."""
    first, second = layout.prices
    prefill, decode = max(start[0], layout.replicas_min), max(1, start[1])
    failed = 0
    while (
        prefill * first + decode * second <= limit() * (1 + _EPSILON)
        and prefill + decode <= replicas_max
    ):
        candidate = Candidate(layout, prefill, decode)
        if (yield Asked((candidate,), is_probe=True))[0]:
            return (prefill, decode), True
        more, step = lacking(candidate), _grown(failed)
        prefill, decode = prefill + step * more[0], decode + step * more[1]
        failed += 1
    return (prefill, decode), False
