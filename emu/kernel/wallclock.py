"""The kernel on the wall clock, for live mode: real time, scaled, moves the same actors."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Final

from emu.kernel.priorities import PRIORITY_WORLD
from emu.kernel.tasks import TaskKernel

_FREE_NS: Final = 2**62
_TURN_NS: Final = 2_000_000
"""Wall time after which timers that are due let the event loop look at its sockets."""
_TURN_EVENTS: Final = 16
"""Timers after which they do as well: an emulation that is behind hears of clients that leave."""
_TURN_SAMPLES: Final = 100
"""Samples of the time series after which they do too: a cluster that was idle at a high speed has
as many to take as seconds went by."""
_NAP_S: Final = 0.0005
"""A wait that is shorter is slept through: uvloop's timers count milliseconds, and one that is
rounded down would be asked for again and again until its instant has come."""
_IDLE_TURN_NS: Final = 50_000
"""A turn of the event loop that was shorter had nothing to do."""


class WallKernel(TaskKernel):
    """The same actors on the wall clock, `speed` simulated seconds per real second.

    Timers keep their own due times (logical time), so lateness of the machine never adds up;
    `lag_ns` says how late the last timer was. What comes from outside enters through `enter`,
    at the instant at which it reached the machine, and in order with the timers.

    `hold(at_ns)` keeps emulated time before an instant: something that came then is still being
    read. A machine that is too slow so delays the emulation, and never the arrivals in it.
    """

    def __init__(
        self,
        *,
        speed: float = 1.0,
        events_per_instant_max: int = 100_000,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`unix_s`: what the calendar's clock shows, for stamps that programs outside compare."""
        super().__init__(events_per_instant_max=events_per_instant_max)
        self.speed = speed
        self.lag_ns = 0
        self.lag_max_ns = 0
        self.has_real_clock = clock_ns is time.monotonic_ns
        self.unix_s = unix_s
        self._clock_ns = clock_ns  # a loop's own clock may count milliseconds only
        self._origin_ns = clock_ns()
        self._offset_ns = 0
        """Simulated time at the origin."""
        self._held_ns = _FREE_NS
        self._entries: set[int] = set()
        """Instants at which something from outside is going to happen."""
        self._alarm: asyncio.TimerHandle | None = None
        self._gives_way = self._comes_back = False
        self._turn_ns = 0
        """When the event loop was given a turn before a short wait."""

    def stop(self) -> None:
        """The run is over, at once: an actor may wait for the real world forever."""
        self._is_over = True
        self._done.set()

    def wall_ns(self, ago_ns: int = 0) -> int:
        """Simulated time that the wall clock shows, or showed so much wall time ago."""
        return self._shown_ns(self._clock_ns() - ago_ns)

    def _shown_ns(self, at_ns: int) -> int:
        """Simulated time that the wall clock shows at an instant of its own."""
        shown_ns = int((at_ns - self._origin_ns) * self.speed) + self._offset_ns
        return shown_ns if shown_ns > 0 else 0  # asked several times for each event

    def set_speed(self, speed: float) -> None:
        """From now on, so many simulated seconds per real second. Time does not jump."""
        self._offset_ns = self.wall_ns()
        self._origin_ns = self._clock_ns()
        self.speed = speed
        if self._running == 0:
            self._advance()

    @property
    def behind_ns(self) -> int:
        """How far the emulation is behind the wall clock: the age of what happens, or is due."""
        if self._running or self._ready:
            return max(0, self.wall_ns() - self.now_ns)
        heap = self._heap
        return max(0, self.wall_ns() - heap[0][0]) if heap else 0

    @property
    def soonest_ns(self) -> int:
        """The first instant at which something can still happen.

        Now, on the wall clock; of an emulation that is behind, the oldest timer that is due.
        """
        return self.wall_ns() - self.behind_ns

    def give_way(self) -> None:
        """What was woken just now has its turn in the event loop before the next timer."""
        self._gives_way = True

    def hold(self, at_ns: int | None) -> None:
        """Let nothing happen at this instant or later; None lets time go on."""
        before, self._held_ns = self._held_ns, _FREE_NS if at_ns is None else at_ns
        if self._held_ns > before and self._running == 0 and not self._is_advancing:
            self._loop.call_soon(self._advance)

    def enter(self, call: Callable[[], None], at_ns: int | None = None) -> int:
        """Something has happened in the real world: run `call` in its place in time.

        `at_ns` says when; None means now. Returns the time that it got: one that no other entry
        has, and never an instant at which something of a higher priority has already happened, so
        that a replay at these times gives the same order.
        """
        at_ns = max(self.wall_ns() if at_ns is None else at_ns, self.now_ns)
        if at_ns == self.now_ns and self.priority_reached >= PRIORITY_WORLD:
            at_ns += 1
        entries = self._entries
        while at_ns in entries:
            at_ns += 1
        entries.add(at_ns)

        def happen() -> None:
            entries.discard(at_ns)
            call()

        self.call_at(at_ns, PRIORITY_WORLD, happen)
        if self._running == 0 and not self._is_advancing:
            self._advance()
        return at_ns

    def _wait(self, delay_s: float, *, may_sleep: bool) -> bool:
        """Wait for the next timer: whether the event loop has its turn meanwhile."""
        if delay_s > _NAP_S or not self.has_real_clock:
            self._alarm = self._loop.call_later(delay_s, self._advance)
        elif may_sleep and self._clock_ns() < self._turn_ns + _IDLE_TURN_NS:
            time.sleep(delay_s)
            return False
        else:
            self._turn_ns = self._clock_ns()
            self._loop.call_soon(self._advance)  # others look at what has happened first
        return True

    def _takes_samples(self, due_ns: int) -> bool:
        """The samples before an instant can be taken in one turn; else a part of them is taken."""
        if self._sample_ns is None:
            return True
        many_ns = self._sample_ns + _TURN_SAMPLES * self._sample_period_ns
        if due_ns <= many_ns or (self._limit_ns is not None and self._limit_ns < many_ns):
            return True
        self._take_samples(many_ns)
        return False

    def _come_back(self) -> None:
        """What was woken has had its turn."""
        self._gives_way = self._comes_back = False
        self._advance()

    def _move_on(self) -> None:
        heap, ready, clock_ns = self._heap, self._ready, self._clock_ns
        now_ns = begin_ns = clock_ns()
        moved = 0
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._running == 0 and not self._is_over:
            if ready:
                self._take_ready()
                continue
            if not heap:
                return  # idle until something enters
            due_ns, priority, number, actor, target = heap[0]
            if actor is not None and actor.armed != number:
                heapq.heappop(heap)  # void: put off or cut
                continue
            now_ns = clock_ns()
            wall_ns = self._shown_ns(now_ns)
            if due_ns >= self._held_ns:
                return  # until the hold is lifted
            if due_ns > wall_ns:
                delay_s = (due_ns - wall_ns) / (self.speed * 1e9)
                if self._wait(delay_s, may_sleep=not moved):
                    return
                continue
            if self._gives_way:
                if not self._comes_back:
                    self._comes_back = True
                    self._loop.call_soon(self._come_back)
                return
            is_long = moved == _TURN_EVENTS or now_ns - begin_ns > _TURN_NS
            if is_long or not self._takes_samples(due_ns):
                self._loop.call_soon(self._advance)
                return
            moved += 1
            self.lag_ns = wall_ns - due_ns
            self.lag_max_ns = max(self.lag_max_ns, self.lag_ns)
            heapq.heappop(heap)
            if not self._move_to(due_ns, priority):
                return
            self.events += 1
            if actor is not None:
                self._step(actor)
            elif target is not None:
                target()
