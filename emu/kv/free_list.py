"""The free list of a pool: first in, first out, with removal from the middle, in whole runs.

A run is taken from its last block on, so that the head of a sequence survives longest. Runs that
follow each other in the list and in content become one.

Blocks may be kept back for a time, and are then taken last. They are kept by the priority of
their request (a smaller number is more urgent), and taken when no other is left: the least urgent
first, within a priority those kept longest ago. One whose time is over goes to the tail of the
others, as in TensorRT-LLM. All of them are free: keeping one refuses no request a block.
"""

from __future__ import annotations

from collections import deque
from typing import final

from emu.kv.radix import UNNAMED, Run


def _ring() -> Run:
    """An empty list: what stands before its first and after its last run."""
    ring = Run(0, 0, 0)
    ring.before = ring.after = ring
    return ring


@final
class FreeList:
    """Runs in the order in which they will be taken."""

    def __init__(self, ttl_ns: int = 0) -> None:
        """`ttl_ns`: for how long blocks are kept back."""
        self._ttl_ns = ttl_ns
        self._now_ns = 0
        self._plain = _ring()
        self._kept: dict[int, Run] = {}
        """By priority."""
        self._order: list[int] = []
        """Priorities, the least urgent first."""
        self._serial = 0
        self._expiries: deque[tuple[int, int, int]] = deque()
        """(until, serial number, priority) of each keeping, in order of time."""

    def append(self, run: Run) -> None:
        """Put a run at the tail. It may become a part of the one before it."""
        run.serial = 0
        _append(self._plain, run)

    def keep(self, runs: list[Run], priority: int) -> None:
        """Put runs at the tail of those that are kept for requests of this priority."""
        if not runs:
            return
        ring = self._kept.get(priority)
        if ring is None:
            ring = self._kept[priority] = _ring()
            self._order = sorted(self._kept, reverse=True)
        self._serial += 1
        for run in runs:
            run.serial = self._serial
            _append(ring, run)
        self._expiries.append((self._now_ns + self._ttl_ns, self._serial, priority))

    def expire(self, now_ns: int) -> None:
        """It is now so late: blocks whose time is over are like any other."""
        self._now_ns = now_ns
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, serial, priority = self._expiries.popleft()
            ring = self._kept[priority]
            while True:
                run = ring.after  # those kept first stand first
                if run is None or run is ring or run.serial != serial:
                    break
                self.remove(run)
                self.append(run)

    def remove(self, run: Run) -> None:
        """Take a run, wherever it stands."""
        before, after = run.before, run.after
        assert before is not None
        assert after is not None
        before.after = after
        after.before = before
        run.before = run.after = None

    def head(self) -> Run:
        """The run whose last block will be taken next; there must be one."""
        run = self._plain.after
        if run is self._plain:
            for priority in self._order:
                ring = self._kept[priority]
                run = ring.after
                if run is not ring:
                    break
        assert run is not None
        return run

    def clear(self) -> None:
        """Nothing is free."""
        for ring in (self._plain, *self._kept.values()):
            while (run := ring.after) is not None and run is not ring:
                self.remove(run)
        self._kept.clear()
        self._order = []
        self._expiries.clear()

    def order(self) -> list[Run]:
        """All of it, from the head."""
        found: list[Run] = []
        for ring in (self._plain, *[self._kept[priority] for priority in self._order]):
            run = ring.after
            while run is not None and run is not ring:
                found.append(run)
                run = run.after
        return found


def _append(ring: Run, run: Run) -> None:
    last = ring.before
    assert last is not None
    node = run.node
    if last is not ring and last.node is node and last.serial == run.serial:
        if node is None:
            if last.base == run.base == UNNAMED:  # nothing tells these blocks apart
                last.end += run.end - run.start
                return
        elif last.start == run.end and last.base == run.base:
            last.start = run.start
            node.runs.remove(run)
            return
    last.after = run
    run.before = last
    run.after = ring
    ring.before = run
