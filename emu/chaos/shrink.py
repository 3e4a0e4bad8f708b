"""Makes a failing world small: fewer faults, then fewer requests, as long as it still fails.

Delta debugging: drop halves, then quarters, and so on. What counts as the same failure is the first
words of the first problem, so that one bug is not exchanged for another on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from emu.chaos.trial import run_world
from emu.chaos.worlds import World

T = TypeVar("T")
TRIALS_MAX = 400


def signature(problem: str) -> str:
    """What kind of failure it is, without its figures."""
    words = "".join(" " if c.isdigit() else c for c in problem).split()
    return " ".join(words[:6])


def shrink(world: World, seed: int, *, every: int = 40) -> World:
    """A smaller world that fails in the same way (or the same world, if it does not fail).

    The books are checked after `every` events.
    """
    verdict = run_world(world, seed, every=every)
    if not verdict.problems:
        return world
    wanted = signature(verdict.problems[0])
    budget = [TRIALS_MAX]

    def fails(candidate: World) -> bool:
        if budget[0] <= 0 or (world.lines and not candidate.lines):
            return False
        budget[0] -= 1
        problems = run_world(candidate, seed, every=every).problems
        return bool(problems) and signature(problems[0]) == wanted

    faults = minimize(
        list(world.tables.get("faults", [])), lambda kept: fails(_with_faults(world, kept))
    )
    world = _with_faults(world, faults)
    lines = minimize(world.lines, lambda kept: fails(msgspec.structs.replace(world, lines=kept)))
    return msgspec.structs.replace(world, lines=lines)


def _with_faults(world: World, faults: list[dict[str, object]]) -> World:
    tables = {key: value for key, value in world.tables.items() if key != "faults"}
    if faults:
        tables["faults"] = faults
    return msgspec.structs.replace(world, tables=tables)


def minimize(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A sublist that still fails and loses that when any one chunk tried is dropped."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            kept = items[:at] + items[at + size :]
            if fails(kept):
                items = kept
            else:
                at += size
        if size == 1:
            break
        size = max(1, size // 2)
    return items
