"""A failing world made small: fewer requests, fewer faults, and the same failure.

Delta debugging: drop halves, then quarters, and so on. What counts as the same failure is the
first words of the first problem, so that one bug is not exchanged for another on the way.

It ends after `TRIALS_MAX` trials, or when the trials have done `WORK_MAX` (`Verdict.work`), at
least `WORLDS_MIN` times the failing world. Both are counts: the world that is written down depends
on no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from emu.apps.chaos.trial import REFUSED, run_world, world_config
from emu.apps.chaos.worlds.world import World
from emu.cluster.prepare import prepare
from emu.process.interrupts import scratch

T = TypeVar("T")
TRIALS_MAX: Final = 400
WORK_MAX: Final = 1_500_000
"""A minute of CPU time, about."""
WORLDS_MIN: Final = 4


class Shrinking(msgspec.Struct):
    """How far it is."""

    trials: int = 0
    work: int = 0
    """Events and records of all trials, counted instead of time; at most `work_max`."""
    work_max: int = WORK_MAX
    faults: int = 0
    lines: int = 0
    """Of the workload; 0 = not known yet."""
    smallest: World | None = None
    """The smallest world so far that fails in the same way."""

    @property
    def is_over(self) -> bool:
        """No trial is left."""
        return self.trials >= TRIALS_MAX or self.work >= self.work_max

    def told(self) -> str:
        """How far it is, in words."""
        lines = f", lines of the workload left: {self.lines:,}" if self.lines else ""
        return f"trials: {self.trials}, faults left: {self.faults}{lines}"


def signature(problem: str) -> str:
    """What kind of failure it is, without its figures."""
    words = "".join(" " if c.isdigit() else c for c in problem).split()
    return " ".join(words[:6])


def shrink(
    world: World, seed: int, *, every: int = 40, shrinking: Shrinking | None = None
) -> World:
    """A smaller world that fails in the same way (or the same world, if it does not fail).

    The books are checked after `every` events. `shrinking` says meanwhile how far it is.
    """
    so_far = shrinking or Shrinking()
    so_far.faults = len(world.tables.get("faults", []))
    so_far.lines = len(world.lines)
    so_far.smallest = world
    verdict = run_world(world, seed, every=every)
    if not verdict.problems:
        return world
    wanted = signature(verdict.problems[0])
    so_far.work_max = max(WORK_MAX, WORLDS_MIN * verdict.work)

    def fails(candidate: World) -> bool:
        if so_far.is_over or (world.lines and not candidate.lines):
            return False
        so_far.trials += 1
        found = run_world(candidate, seed, every=every)
        so_far.work += found.work
        is_same = bool(found.problems) and signature(found.problems[0]) == wanted
        if is_same:
            so_far.smallest = candidate
            so_far.faults = len(candidate.tables.get("faults", []))
            so_far.lines = len(candidate.lines) or so_far.lines
        return is_same

    if not world.lines and not wanted.startswith(REFUSED):
        world = _first_lines(world, so_far, fails)
    faults = minimize(
        list(world.tables.get("faults", [])), lambda kept: fails(_with_faults(world, kept))
    )
    world = _with_faults(world, faults)
    lines = minimize(world.lines, lambda kept: fails(msgspec.structs.replace(world, lines=kept)))
    return msgspec.structs.replace(world, lines=lines)


def _first_lines(world: World, so_far: Shrinking, fails: Callable[[World], bool]) -> World:
    """The fewest first lines of a workload of the user's own that still fail, by halves."""
    with scratch("emu-chaos-") as directory:
        _, workload = prepare(world_config(world, directory), "chaos")
    low, high = 0, workload.facts.lines
    so_far.lines = high
    while high - low > 1 and not so_far.is_over:
        middle = (low + high) // 2
        if fails(_with_limit(world, middle)):
            high = so_far.lines = middle
        else:
            low = middle
    return world if high == workload.facts.lines else _with_limit(world, high)


def _with_limit(world: World, lines: int) -> World:
    workload = {**world.tables.get("workload", {}), "limit": lines}
    return msgspec.structs.replace(world, tables={**world.tables, "workload": workload})


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
