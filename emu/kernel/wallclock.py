"""The kernel on the wall clock, for live mode: real time, scaled, moves the same actors."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_WORLD


class WallKernel(Kernel):
    """The same actors on the wall clock, `speed` simulated seconds per real second.

    Timers keep their own due times (logical time), so lateness of the machine never adds up;
    `lag_ns` says how late the last timer was. What comes from outside enters through `enter`,
    which stamps it with the present wall time and puts it in order with the timers.
    """

    def __init__(
        self,
        *,
        speed: float = 1.0,
        events_per_instant_max: int = 100_000,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(events_per_instant_max=events_per_instant_max)
        self.speed = speed
        self.lag_ns = 0
        self.lag_max_ns = 0
        self._clock_ns = clock_ns  # a loop's own clock may count milliseconds only
        self._origin_ns = clock_ns()
        self._entered_ns = -1
        self._alarm: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """The run is over, at once: an actor may wait for the real world for ever."""
        if not self._done.done():
            self._is_over = True
            self._done.set_result(None)

    def wall_ns(self) -> int:
        """Simulated time that the wall clock shows."""
        return int((self._clock_ns() - self._origin_ns) * self.speed)

    def enter(self, call: Callable[[], None]) -> int:
        """Something happens in the real world now: run `call` in its place in time.

        Returns its time: later than every earlier entry's, and never an instant at which something
        of a higher priority has already happened, so that a replay at these times gives the same
        order.
        """
        at_ns = max(self.wall_ns(), self.now_ns, self._entered_ns + 1)
        if at_ns == self.now_ns and self.priority_reached > PRIORITY_WORLD:
            at_ns += 1
        self._entered_ns = at_ns
        self.call_at(at_ns, PRIORITY_WORLD, call)
        if self._running == 0:
            self._advance()
        return at_ns

    def _move_on(self) -> None:
        heap, ready = self._heap, self._ready
        while self._running == 0 and not self._is_over:
            if ready:
                self._take_ready()
                continue
            if self._is_stopping:
                self._stop_at_rest()
                return
            while heap and heap[0][3] is not None and heap[0][3].armed != heap[0][2]:
                heapq.heappop(heap)  # void: put off or cut
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            if not heap:
                return  # idle until something enters
            wall_ns = self.wall_ns()
            due_ns, priority, _, actor, call = heap[0]
            if due_ns > wall_ns:
                delay_s = (due_ns - wall_ns) / (self.speed * 1e9)
                self._alarm = self._loop.call_later(delay_s, self._advance)
                return
            self.lag_ns = wall_ns - due_ns
            self.lag_max_ns = max(self.lag_max_ns, self.lag_ns)
            heapq.heappop(heap)
            if not self._move_to(due_ns, priority):
                return
            self.events += 1
            if actor is not None:
                self._deliver(actor)
            elif call is not None:
                call()
