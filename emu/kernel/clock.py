"""The kernel: simulated time, actors, and the only things that an actor may wait for.

Owns time. Actors are coroutines that run as asyncio tasks and await nothing but the primitives
below (`sleep_until`, `Mailbox.wait`/`get`, `Lock.acquire`, `Event.wait`). An actor that awaits
anything else (a real process) simply counts as runnable, so simulated time stands still.

How time moves. The kernel counts runnable actors. A primitive that must wait lowers the count;
when it reaches zero nothing can happen any more at this instant, and the earliest timer is
popped: the clock jumps to it and its owner becomes runnable. Nothing polls.

Order. Timers are ordered by (due time, rank, order of scheduling). The rank belongs to the
actor that waits: arrivals before transfers before replicas (by id) before control loops. So the
order of things that are due at one instant never depends on *when* they were scheduled, which
is what makes a decode leap equal to stepping. Exactly one timer is popped at a time; what it
sets off runs to quiescence before the next is popped. Messages wake their receiver through the
event loop's own FIFO queue, never inside the sender.

`Kernel` runs on simulated time, `WallKernel` (`emu/kernel/wallclock.py`) puts the same primitives
on the wall clock. Mailboxes, locks and events are in `emu/kernel/mailbox.py`, ranks in
`emu/kernel/priorities.py`.
Cancellation ends a run; it never models a fault (the order of cancelled tasks is not defined).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from emu.errors import Deadlock, LimitReached, Zeno
from emu.kernel.digest import Digest
from emu.kernel.mailbox import PARK, WAKE, Event, Lock, Mailbox, Target, Waiter
from emu.kernel.priorities import (
    RANK_CONTROL,
    RANK_NETWORK,
    RANK_PLANNER,
    RANK_REBALANCER,
    RANK_REJECTER,
    RANK_REPLICA,
    RANK_WATCHER,
    RANK_WORLD,
)

__all__ = [
    "PARK",
    "RANK_CONTROL",
    "RANK_NETWORK",
    "RANK_PLANNER",
    "RANK_REBALANCER",
    "RANK_REJECTER",
    "RANK_REPLICA",
    "RANK_WATCHER",
    "RANK_WORLD",
    "WAKE",
    "Event",
    "Kernel",
    "Lock",
    "Mailbox",
]

Row = Iterator[Mailbox[Any]]
"""Inboxes of actors, asked for one by one."""
_Future: Final = asyncio.Future
_YIELD_EVERY: Final = 2048
_NEVER: Final = 1 << 63


class Kernel:
    """Simulated time. One instance is one run; nothing is shared between instances."""

    def __init__(self, *, events_per_instant_max: int = 100_000, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self.rank_reached = -1
        """Highest rank popped at this instant: what is due now with a lower rank has happened."""
        self.events = 0
        self._digest = Digest()
        """Of time + rank of every timer popped: a cheap check of determinism."""
        self._note_instant = self._digest.waiting.append
        self._heap: list[tuple[int, int, int, Target]] = []
        self._ready: deque[Mailbox[Any] | tuple[Waiter, bool] | Row] = deque()
        """What runs when the actors that run now have come to rest: turns of parked actors, rows of
        actors that are woken one after the other, and whoever was woken after them."""
        self._is_advancing = False
        self._sequence = 0
        self._runnable = 0
        self._is_stopping = False
        self._instant_events = 0
        self._events_per_instant_max = events_per_instant_max
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._is_over = False
        """`_done` has its result, or nobody waits for it any more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._primitives: list[Mailbox[Any] | Lock | Event] = []
        self._limit_ns: int | None = None
        self._sample_ns: int | None = None
        self._sample_period_ns = 0
        self._sample: Callable[[int], None] | None = None
        self._notice_ns = _NEVER
        """The clock passes this instant only after a look at the limit and the samples."""
        self.story: Callable[[], list[str]] = list
        """Asked for more lines when the run ends in a deadlock; set by whoever builds the world."""
        self.last_resort: Callable[[], bool] | None = None
        """Asked when nothing is scheduled any more: True if it ended something after all."""

    # --- running ----------------------------------------------------------------------------
    def spawn(self, actor: Coroutine[Any, Any, None], *, name: str) -> None:
        """Start an actor. An exception in it ends the run."""
        self._runnable += 1
        task = self._loop.create_task(actor, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._on_task_done)

    async def run(self, *, limit_ns: int | None = None) -> None:
        """Let the actors run until `stop` is called.

        Raises what an actor raised, `Deadlock`, `Zeno`, or `LimitReached` past `limit_ns`.
        """
        self._limit_ns = limit_ns
        self._set_notice()
        try:
            await self._done
        finally:
            self._is_over = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """The run is over as soon as what this set off at this instant has come to rest."""
        self._is_stopping = True
        self._loop.call_soon(self._stop_at_rest)

    def _stop_at_rest(self) -> None:
        if self._runnable == 0 and not self._ready and not self._done.done():
            self._is_over = True
            self._done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        if not self._done.done():
            self._is_over = True
            self._done.set_exception(error)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)
            return
        if not self._done.done():
            self._block()

    # --- primitives ---------------------------------------------------------------------------
    def sleep_until(self, at_ns: int, rank: int = RANK_CONTROL) -> Waiter:
        """Await the result to continue at `at_ns` (at once if that is not in the future)."""
        waiter: Waiter = self._loop.create_future()
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_ns, self.now_ns), rank, self._sequence, waiter))
        self._block()
        return waiter

    def sleep_ns(self, delay_ns: int, rank: int = RANK_CONTROL) -> Waiter:
        """Await the result to continue `delay_ns` later."""
        return self.sleep_until(self.now_ns + delay_ns, rank)

    def call_at(self, at_ns: int, rank: int, call: Callable[[], None]) -> None:
        """Run a plain function at an instant. It may post, notify and schedule, not wait."""
        self._sequence += 1
        if at_ns < self.now_ns:
            at_ns = self.now_ns
        heapq.heappush(self._heap, (at_ns, rank, self._sequence, call))

    def sample_every(self, period_ns: int, sample: Callable[[int], None]) -> None:
        """Call `sample(at_ns)` at each multiple of the period that the clock passes.

        It sees the world after everything that happened at that instant, changes nothing, and
        does not keep a run alive: an observer is no event.
        """
        self._sample_period_ns = period_ns
        self._sample_ns = self.now_ns + period_ns
        self._sample = sample
        self._set_notice()

    def mailbox(self, name: str, rank: int) -> Mailbox[Any]:
        """A queue of messages with one receiver, the actor of this rank."""
        box: Mailbox[Any] = Mailbox(self, name, rank)
        self._primitives.append(box)
        return box

    def lock(self, name: str) -> Lock:
        """A lock whose waiters are served first come, first served."""
        lock = Lock(self, name)
        self._primitives.append(lock)
        return lock

    def event(self, name: str) -> Event:
        """Something that happens once or again, for any number of waiters."""
        event = Event(self, name)
        self._primitives.append(event)
        return event

    # --- inside -------------------------------------------------------------------------------
    def _new_waiter(self) -> Waiter:
        return self._loop.create_future()

    def _push(self, at_ns: int, rank: int, target: Target) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_ns, rank, self._sequence, target))

    def _wake(self, waiter: Waiter, result: bool) -> None:
        """Make a waiting actor runnable. False = its deadline came."""
        self._count_event()
        if self._ready:  # behind those who came before
            self._ready.append((waiter, result))
            return
        self._runnable += 1
        waiter.set_result(result)

    def _wake_turn(self, box: Mailbox[Any]) -> None:
        """The turn of a parked actor comes at this instant."""
        self._count_event()
        self._ready.append(box)
        if self._runnable == 0 and not self._is_advancing:
            self._loop.call_soon(self._advance)

    def poke_in_turn(self, row: Row) -> None:
        """Poke these in their order, each when those before it have come to rest.

        The order is that of poking all of them now, but the row may end early, when those before
        have left nothing to look at.
        """
        if self._runnable or not self._is_advancing:
            for box in row:
                box.poke()
        else:
            self._ready.append(row)

    def _count_event(self) -> None:
        self.events += 1
        self._instant_events += 1
        if self._instant_events > self._events_per_instant_max:
            raise self._zeno()

    def _block(self) -> None:
        """The running actor is about to wait."""
        self._runnable -= 1
        if self._runnable == 0:
            # Not from here: this actor must be suspended first. Otherwise, woken again by what
            # happens next, it would go on before others that were woken earlier.
            self._loop.call_soon(self._advance)

    @property
    def digest(self) -> int:
        """Of all that has happened so far."""
        return self._digest.fold()

    def _advance(self) -> None:
        """Nothing can run: move to the next timer that somebody still waits for."""
        self._is_advancing = True
        if len(self._digest.waiting) >= _YIELD_EVERY:
            self._digest.fold()
        try:
            self._move_on()
        except BaseException as error:
            self.fail(error)
        finally:
            self._is_advancing = False

    def _move_on(self) -> None:
        heap, ready, pop = self._heap, self._ready, heapq.heappop
        for _ in range(_YIELD_EVERY):
            if self._runnable or self._is_over:
                return
            if ready:
                self._fire_ready()
                continue
            if self._is_stopping:
                self._stop_at_rest()
                return
            if not heap:
                if self.last_resort is not None and self.last_resort():
                    continue
                self.fail(self._deadlock())
                return
            due_ns, rank, _, target = pop(heap)
            if target.__class__ is Mailbox:
                if target._turn_ns != due_ns:
                    continue  # put off or cut
                if not self._move_to(due_ns, rank):
                    return
                self.events += 1
                target._take_turn()
            elif not isinstance(target, _Future):
                if not self._move_to(due_ns, rank):
                    return
                self.events += 1
                target()  # type: ignore[operator]
            elif not target.done():  # else woken by a message in the meantime
                if not self._move_to(due_ns, rank):
                    return
                self._wake(target, False)
        self._loop.call_soon(self._advance)  # signals, progress and other tasks have the loop

    def _fire_ready(self) -> None:
        """Whoever has waited longest to run."""
        entry = self._ready.popleft()
        if entry.__class__ is Mailbox:
            if entry._is_called:
                self._fire(entry)
            return
        if entry.__class__ is not tuple:
            self._poke_next(entry)  # type: ignore[arg-type]
            return
        waiter, result = entry
        if not waiter.done():
            self._runnable += 1
            waiter.set_result(result)

    def _poke_next(self, row: Row) -> None:
        """Who comes next in a row goes before everybody else, and so does the rest of it."""
        box = next(row, None)
        if box is None:
            return
        ready = self._ready
        others = len(ready)
        box.poke()
        woken = len(ready) - others
        ready.rotate(woken)
        ready.insert(woken, row)

    def _fire(self, target: Target) -> None:
        """The instant of a timer has come."""
        if isinstance(target, _Future):
            self._wake(target, False)
            return
        self.events += 1
        if target.__class__ is Mailbox:
            target._take_turn()
        else:
            target()  # type: ignore[operator]

    def _move_to(self, due_ns: int, rank: int) -> bool:
        if due_ns > self.now_ns:
            if due_ns > self._notice_ns and not self._notice(due_ns):
                return False
            self.now_ns = due_ns
            self.rank_reached = rank
            self._instant_events = 0
        else:
            self._instant_events += 1
            if self._instant_events > self._events_per_instant_max:
                self.fail(self._zeno())
                return False
            if rank > self.rank_reached:
                self.rank_reached = rank
        self._note_instant(due_ns + rank + 1)
        return True

    def _notice(self, due_ns: int) -> bool:
        """The clock passes the limit, or an instant at which a sample is taken."""
        if self._limit_ns is not None and due_ns > self._limit_ns:
            self.now_ns = self._limit_ns
            self.fail(LimitReached(f"simulated time reached {self._limit_ns / 1e9:g} s"))
            return False
        if self._sample_ns is not None and due_ns > self._sample_ns:
            self._take_samples(due_ns)
        self._set_notice()
        return True

    def _set_notice(self) -> None:
        instants = (self._limit_ns, self._sample_ns)
        self._notice_ns = min((at_ns for at_ns in instants if at_ns is not None), default=_NEVER)

    def _take_samples(self, due_ns: int) -> None:
        assert self._sample is not None
        assert self._sample_ns is not None
        while self._sample_ns < due_ns:
            if self._sample_ns > self.now_ns:
                self.now_ns = self._sample_ns
            self.rank_reached = RANK_CONTROL << 1
            self._sample(self._sample_ns)
            self._sample_ns += self._sample_period_ns

    # --- errors that tell a story -------------------------------------------------------------
    def _deadlock(self) -> Deadlock:
        lines = [f"deadlock at {self.now_ns} ns: nothing is scheduled, and the run is not over"]
        lines += [p.describe() for p in self._primitives if p.is_waited_for()][:50]
        return Deadlock("\n  ".join(lines + self.story()))

    def _zeno(self) -> Zeno:
        lines = [
            f"more than {self._events_per_instant_max} events at {self.now_ns} ns "
            "(simulated time does not move)"
        ]
        lines += [f"actor {task.get_name()}: {_where(task)}" for task in self._tasks][:50]
        return Zeno("\n  ".join(lines + self.story()))


def _where(task: asyncio.Task[None]) -> str:
    """File and line at which an actor stands."""
    if task.done():
        return "ended"
    frames = task.get_stack(limit=1)
    if not frames:
        return "running"
    frame = frames[-1]
    return f"{frame.f_code.co_qualname} line {frame.f_lineno}"
