"""The kernel: simulated time, actors, and the order in which they take their steps.

How time moves. Steps that are to be taken at this instant wait in one queue, first come, first
served. When it is empty, nothing can happen any more at this instant, and the earliest timer is
popped: the clock jumps to it and its owner takes a step. Nothing polls.

Order. Timers are ordered by (due time, priority, order of scheduling). The priority belongs to the
actor that waits: arrivals before transfers before replicas (by id) before control loops. So the
order of things that are due at one instant never depends on *when* they were scheduled, which
is what makes a decode leap equal to stepping. Exactly one timer is popped at a time; what it sets
off runs to rest, first come, first served, before the next is popped.

Delivery. The kernel runs an actor's step in line, without a turn of the event loop. Without
`is_inline` each actor is an asyncio task, which the kernel wakes and which runs the same step: the
queue and the heap decide the order in both cases, so results are the same
(`tests/kernel/test_delivery.py`). A coroutine that awaits the real world (`spawn`, for a backend in
another process) counts as running: simulated time stands still until it has ended.

`Kernel` runs on simulated time, `WallKernel` (`emu/kernel/wallclock.py`) puts the same actors
on the wall clock. Cancellation ends a run; it never models a fault.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import mypyc_attr

from emu.errors import Deadlock, EmuError, LimitReached, Zeno
from emu.plugins import guarded

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# Priorities: they take the order of *scheduling* out of results.


PRIORITY_WORLD: Final = 0
"""Arrivals, client cancellations, commands, faults."""
PRIORITY_NETWORK: Final = 1 << 20
"""Transfers."""
PRIORITY_REPLICA: Final = 2 << 20
"""Replicas: add the replica id."""
PRIORITY_WATCHER: Final = 3 << 20
"""Migration watchers: add the replica id."""
PRIORITY_CONTROL: Final = 4 << 20
"""Control loops. They read the same instants, so each has a priority of its own:"""
PRIORITY_REJECTER: Final = PRIORITY_CONTROL + 1
PRIORITY_REBALANCER: Final = PRIORITY_CONTROL + 2
PRIORITY_PLANNER: Final = PRIORITY_CONTROL + 3


# --------------------------------------------------------------------------------------------------
# A running digest of integers: h <- h * K + v, modulo 2^64, for each v in turn.
#
# Python computes one step of it with long integers, at the price of ten bytecodes; numpy, where it
# is loaded, adds hundreds of values for little more.


_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_BLOCK: Final = 1024


class Digest:
    """A digest of non-negative integers below 2^64."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Values are appended here; `fold` from time to time, so that it does not grow."""
        self._folded = 0
        self._powers: NDArray[np.uint64] | None = None
        """_FACTOR ** (_BLOCK - 1), ..., _FACTOR, 1, modulo 2^64."""

    def fold(self) -> int:
        """Add what waits; the digest of all values so far."""
        if "numpy" in sys.modules:
            self._fold_blocks()
        else:
            folded = self._folded
            for value in self.waiting:
                folded = (folded * _FACTOR + value) & _MASK
            self._folded = folded
        self.waiting.clear()
        return self._folded

    def _fold_blocks(self) -> None:
        """Folded by numpy, whose unsigned arithmetic is modulo 2^64."""
        import numpy as np

        powers = self._powers
        if powers is None:
            powers = np.full(_BLOCK, _FACTOR, dtype=np.uint64)
            powers[-1] = 1
            powers[:] = np.multiply.accumulate(powers[::-1])[::-1]
            self._powers = powers
        values = np.array(self.waiting, dtype=np.uint64)
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK]
            count = len(block)
            added = int(np.dot(block, powers[-count:]))
            self._folded = (self._folded * pow(_FACTOR, count, _MASK + 1) + added) & _MASK


# --------------------------------------------------------------------------------------------------
# Mutual exclusion in simulated time, first come, first served.
#
# A holder can turn its hold into a *pin*: others may take the lock, but an actor that waits for it
# (to close what it guards) has it only when no pin is left.


class Lock:
    """`holder` says which actor has it (for stories and checks); empty = none."""

    def __init__(self, soon: Callable[[Callable[[], None]], None], name: str) -> None:
        """`soon` runs a function at the end of the queue of this instant."""
        self.name = name
        self.holder = ""
        self.pins = 0
        self._soon = soon
        self._waiters: deque[tuple[str, Callable[[], None]]] = deque()

    @property
    def is_held(self) -> bool:
        """Some actor has it."""
        return bool(self.holder)

    @property
    def is_free(self) -> bool:
        """No actor has it or has pinned it."""
        return not self.holder and not self.pins

    def try_acquire(self, holder: str) -> bool:
        """Take it, pinned or not, if no actor has it or waits for it."""
        if self.holder or self._waiters:
            return False
        self.holder = holder
        return True

    def request(self, holder: str, granted: Callable[[], None]) -> bool:
        """Take it now (True), or later: then `granted` is called in the queue of that instant."""
        if not self.pins and self.try_acquire(holder):
            return True
        self._waiters.append((holder, granted))
        return False

    def release(self, holder: str) -> None:
        """Give it back; the actor that has waited longest has it then."""
        assert self.holder == holder, f"{self.name}: {holder} releases, {self.holder} holds"
        self.holder = ""
        self._grant()

    def pin(self, holder: str) -> None:
        """Give it back to others that take it at once, not to those that wait for it."""
        self.pins += 1
        self.release(holder)

    def unpin(self) -> None:
        """Remove one pin; without any, the actor that has waited longest has it."""
        assert self.pins > 0, f"{self.name} has no pin"
        self.pins -= 1
        self._grant()

    def _grant(self) -> None:
        if self._waiters and self.is_free:
            self.holder, granted = self._waiters.popleft()
            self._soon(granted)

    def is_waited_for(self) -> bool:
        """Some actor waits for it."""
        return bool(self._waiters)

    def describe(self) -> str:
        """One line for a story."""
        names = ", ".join(name for name, _ in self._waiters)
        return f"{names} wait for lock {self.name}, which {self.holder} holds"


# --------------------------------------------------------------------------------------------------
# A loop of plain calls, for runs that wait for nothing but emulated time: what a kernel asks of
# asyncio's loop, without sockets, threads and the 30 modules that they need. A queue of calls, and
# one coroutine that waits for a mark. Calls from signal handlers are safe.


class Mark:
    """Something that one coroutine waits for."""

    def __init__(self) -> None:
        self._is_set = False

    def done(self) -> bool:
        """It has happened."""
        return self._is_set

    def set_result(self, result: None) -> None:
        """It happens now."""
        self._is_set = True

    def __await__(self) -> Generator[Mark, None, None]:
        while not self._is_set:
            yield self


class Turns:
    """The loop."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make this call after those that wait already."""
        self._calls.append((call, arguments))

    def call_soon_threadsafe(self, call: Callable[..., object], *arguments: Any) -> None:
        """The same from a signal handler."""
        self._calls.append((call, arguments))

    def create_future(self) -> Mark:
        """What a coroutine can wait for."""
        return Mark()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, which waits for marks only, to its end; its result."""
        calls = self._calls
        try:
            while True:
                try:
                    waited = main.send(None)
                except StopIteration as end:
                    return end.value
                while not waited.done():
                    call, arguments = calls.popleft()
                    call(*arguments)
        finally:
            main.close()


# --------------------------------------------------------------------------------------------------
# The kernel


PARK: Final = -1
"""A step returns this: there is nothing to do before the next message."""
AGAIN: Final = -2
"""A step returns this: go on, when those that wait to run have had their turn."""
NOW: Final = -3
"""`align` answers this: at the end of the queue of this instant."""
AT_DUE: Final = -4
"""`align` answers this: when the timer that is set comes, not earlier."""
NEVER: Final = 1 << 63
"""The due time of a timer that is not set."""
Call = Callable[[], None]
_YIELD_EVERY: Final = 2048


@mypyc_attr(allow_interpreted_subclasses=True)
class Actor:
    """A mailbox, one timer, and a step that the kernel runs when either has something.

    An actor owns its object; no other code writes to it. What reaches it are messages and its
    timer. A message comes in one of two ways, and the sender chooses:

    - `tell` is carried out now, before the sender's next line (depth first). For what the receiver
      must know before anything else happens: a reservation, a request routed to it, a crash.
    - `post` is put into the mailbox, and the actor is called for a step at the end of the queue of
      this instant (first come, first served), or later if it is in the middle of something:
      `align` says when.

    `tick` is the step. It takes what is in the mailbox and what has become due, begins the next
    thing and returns when that ends.
    """

    def __init__(self, kernel: Kernel, name: str, priority: int) -> None:
        """`priority` orders what is due at one instant (`emu/kernel/clock.py`)."""
        self.kernel = kernel
        self.name = name
        self.priority = priority
        self.inbox: deque[Any] = deque()
        # What follows belongs to the kernel.
        self.due_ns = NEVER
        """When the timer comes that counts."""
        self.armed = 0
        """Its number; a timer with another number is void: it was put off or cut."""
        self.is_ready = False
        """It waits in the queue of this instant."""
        self.is_stepping = False
        """Its step is under way, which looks at everything before it ends."""
        self.is_away = False
        """It waits for an answer from outside simulated time."""
        self.call: asyncio.Future[None] | None = None
        """What its task waits for."""

    def tick(self) -> int:
        """Take one step: when the next is due, `PARK` or `AGAIN`."""
        raise NotImplementedError

    def align(self, now_ns: int) -> int:
        """When a message that comes now is to be looked at: an instant, `NOW` or `AT_DUE`."""
        return NOW

    def post(self, message: object) -> None:
        """Put a message into the mailbox."""
        self.inbox.append(message)
        self.kernel.wake(self)

    def describe(self) -> str:
        """One line for the story of a run that cannot go on."""
        if self.is_away:
            return f"{self.name} waits for an answer from outside"
        waiting = f", {len(self.inbox)} messages" if self.inbox else ""
        return f"{self.name} waits for a message{waiting}"


Entry = tuple[int, int, int, Actor | None, Call | None]
"""A timer: due time, priority, number, and an actor or a plain function."""


class Row:
    """Actors that are woken one after the other, asked for one by one."""

    __slots__ = ("actors",)

    def __init__(self, actors: Iterator[Actor]) -> None:
        self.actors = actors


@mypyc_attr(allow_interpreted_subclasses=True)
class Kernel:
    """Simulated time. One instance is one run; nothing is shared between instances."""

    # As `Replica` has them, and for the same reason.
    # fmt: off
    __slots__ = (
        "_actors", "_digest", "_done", "_error", "_events_per_instant_max", "_heap",
        "_instant_events", "_is_advancing", "_is_over", "_is_stopping", "_limit_ns", "_locks",
        "_loop", "_note_instant", "_notice_ns", "_ready", "_running", "_sample", "_sample_ns",
        "_sample_period_ns", "_sequence", "_tasks", "_trace", "_watch", "_watch_ns",
        "_watch_period_ns", "events", "is_inline", "last_resort", "now_ns", "priority_reached",
        "story",
    )
    # fmt: on

    def __init__(
        self,
        *,
        events_per_instant_max: int = 100_000,
        start_ns: int = 0,
        is_inline: bool = True,
        loop: Turns | None = None,
    ) -> None:
        """`loop`: None = that of asyncio which is running; only there can `spawn` be used."""
        self.now_ns = start_ns
        self.priority_reached = -1
        """Highest priority popped at this instant: what is due now with a lower one is over."""
        self.events = 0
        self.is_inline = is_inline
        self._digest = Digest()
        """Of time + priority of every timer popped: a cheap check of determinism."""
        self._note_instant = self._digest.waiting.append
        self._heap: list[Entry] = []
        self._ready: deque[Actor | Call | Row] = deque()
        """Steps of this instant: of actors, plain functions, and rows of actors."""
        self._is_advancing = False
        self._sequence = 0
        self._running = 0
        """Tasks that run, or wait for something outside simulated time."""
        self._is_stopping = False
        self._instant_events = 0
        self._events_per_instant_max = events_per_instant_max
        if loop is None:
            import asyncio  # 30 modules, which a plain run does not need

            self._loop: asyncio.AbstractEventLoop | Turns = asyncio.get_running_loop()
        else:
            self._loop = loop
        self._done: asyncio.Future[None] | Mark = self._loop.create_future()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        """What ended the run, and where it came from. Not in `_done`: an error that is thrown into
        a compiled coroutine loses its frames, and those tell whose code is at fault."""
        self._is_over = False
        """`_done` has its result, or nothing waits for it any more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._actors: list[Actor] = []
        self._locks: list[Lock] = []
        self._limit_ns: int | None = None
        self._sample_ns: int | None = None
        self._sample_period_ns = 0
        self._sample: Callable[[int], None] | None = None
        self._watch_ns: int | None = None
        self._watch_period_ns = 0
        self._watch: Callable[[int], EmuError | None] | None = None
        self._notice_ns = NEVER
        """The clock passes this instant only after a look at the limit and the samples."""
        self.story: Callable[[], list[str]] = list
        """Asked for more lines when the run ends in a deadlock; set by the owner of the world."""
        self.last_resort: Callable[[], bool] | None = None
        """Asked when nothing is scheduled any more: True if it ended something after all."""

    def ask_at_rest(self, story: Callable[[], list[str]], last_resort: Callable[[], bool]) -> None:
        """What to ask when nothing is scheduled any more: to end something, or to tell."""
        self.story = story
        self.last_resort = last_resort

    # --- running ----------------------------------------------------------------------------
    def start(self, actor: Actor) -> None:
        """The actor begins to live: its first step is in the queue; not in line, its task waits."""
        self._actors.append(actor)
        if not self.is_inline:
            assert not isinstance(self._loop, Turns)
            self._tasks.append(self._loop.create_task(self._live(actor), name=actor.name))
            self._tasks[-1].add_done_callback(self._on_actor_over)
        actor.is_ready = True
        self._ready.append(actor)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Start a coroutine that awaits the real world: until it ends, simulated time stands still.

        An exception in it ends the run.
        """
        assert not isinstance(self._loop, Turns), "this loop waits for nothing outside"
        self._running += 1
        task = self._loop.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._on_work_done)

    async def run(self, *, limit_ns: int | None = None) -> None:
        """Let the actors live until `stop` is called.

        Raises what a step raised, `Deadlock`, `Zeno`, or `LimitReached` past `limit_ns`.
        """
        self._limit_ns = limit_ns
        self._set_notice()
        self._loop.call_soon(self._advance)
        error: BaseException | None = None
        try:
            await self._done
        except BaseException as raised:
            error = raised
        if error is None and self._error is not None:
            error = self._error.with_traceback(self._trace)
        # Not in a handler: a compiled coroutine that waits in one leaves the error behind it as
        # the one that is being handled, for all that runs meanwhile and after it.
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            import asyncio

            await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is not None:
            raise error

    def stop(self) -> None:
        """The run is over as soon as what this set off at this instant has come to rest."""
        self._is_stopping = True
        self._loop.call_soon(self._stop_at_rest)

    def _stop_at_rest(self) -> None:
        if self._running == 0 and not self._ready and not self._done.done():
            self._is_over = True
            self._done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        if not self._done.done():
            self._is_over = True
            self._error, self._trace = error, error.__traceback__
            self._done.set_result(None)

    # --- what actors do with it -----------------------------------------------------------------
    def wake(self, actor: Actor) -> None:
        """There is something to look at: a step at the end of the queue, or when `align` says."""
        if actor.is_ready or actor.is_stepping or actor.is_away:
            return
        at_ns = actor.align(self.now_ns)
        if at_ns == NOW:
            self._make_ready(actor)
        elif at_ns != AT_DUE and at_ns < actor.due_ns:
            self.arm(actor, at_ns)

    def interrupt(self, actor: Actor) -> None:
        """A step at the end of the queue, whatever the actor is in the middle of."""
        if not (actor.is_ready or actor.is_stepping or actor.is_away):
            self._make_ready(actor)

    def arm(self, actor: Actor, at_ns: int, priority: int = -1) -> None:
        """Set the actor's timer; the one before is void."""
        self._sequence = actor.armed = self._sequence + 1
        actor.due_ns = at_ns
        if at_ns < self.now_ns:
            at_ns = self.now_ns
        if priority < 0:
            priority = actor.priority
        heapq.heappush(self._heap, (at_ns, priority, self._sequence, actor, None))

    def soon(self, call: Call) -> None:
        """Run a plain function at the end of the queue of this instant."""
        self._count_event()
        self._ready.append(call)
        self._go_on()

    def wake_in_turn(self, actors: Iterator[Actor]) -> None:
        """Wake these in their order, each when those before it have come to rest.

        The order is that of waking all of them now, but the row may end early, when those before
        have left nothing to look at.
        """
        self._ready.append(Row(actors))
        self._go_on()

    def call_at(self, at_ns: int, priority: int, call: Call) -> None:
        """Run a plain function at an instant."""
        self._sequence += 1
        if at_ns < self.now_ns:
            at_ns = self.now_ns
        heapq.heappush(self._heap, (at_ns, priority, self._sequence, None, call))

    def sample_every(self, period_ns: int, sample: Callable[[int], None]) -> None:
        """Call `sample(at_ns)` at each multiple of the period that the clock passes.

        It sees the world after everything that happened at that instant, changes nothing, and
        does not keep a run alive: an observer is no event.
        """
        self._sample_period_ns = period_ns
        self._sample_ns = self.now_ns + period_ns
        self._sample = sample
        self._set_notice()

    def watch_every(self, period_ns: int, watch: Callable[[int], EmuError | None]) -> None:
        """Call `watch(at_ns)` when the clock passes a period; the error that it gives ends the run.

        An observer like a sample: no event, and it does not keep a run alive.
        """
        self._watch_period_ns = period_ns
        self._watch_ns = self.now_ns + period_ns
        self._watch = watch
        self._set_notice()

    def lock(self, name: str) -> Lock:
        """A lock whose waiters are served first come, first served."""
        lock = Lock(self.soon, name)
        self._locks.append(lock)
        return lock

    @property
    def digest(self) -> int:
        """Digest of all instants popped so far."""
        return self._digest.fold()

    # --- tasks --------------------------------------------------------------------------------
    async def _live(self, actor: Actor) -> None:
        """The life of an actor: wait for a step, take it."""
        loop = self._loop
        assert not isinstance(loop, Turns)
        while True:
            actor.call = loop.create_future()
            await actor.call
            self._step(actor)
            self._running -= 1
            if self._running == 0:
                # Not from here: this task must be waiting first.
                loop.call_soon(self._advance)

    def _on_actor_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            assert error is not None
            self.fail(error)

    def _on_work_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)
            return
        self._running -= 1
        if self._running == 0 and not self._done.done():
            self._loop.call_soon(self._advance)

    def _deliver(self, actor: Actor) -> None:
        """The actor takes a step, in line or by its task."""
        if self.is_inline:
            self._step(actor)
            return
        self._running += 1
        if actor.call is None:  # its task has not begun to wait yet
            self._loop.call_soon(self._call, actor)
        else:
            actor.call.set_result(None)

    def _call(self, actor: Actor) -> None:
        assert actor.call is not None
        actor.call.set_result(None)

    def _step(self, actor: Actor) -> None:
        actor.is_ready = False
        actor.armed = 0
        actor.due_ns = NEVER
        actor.is_stepping = True
        due_ns = actor.tick()
        actor.is_stepping = False
        if due_ns >= 0:
            sequence = self._sequence = actor.armed = self._sequence + 1
            actor.due_ns = due_ns
            heapq.heappush(self._heap, (due_ns, actor.priority, sequence, actor, None))
        elif due_ns == AGAIN:
            self._make_ready(actor)

    # --- inside -------------------------------------------------------------------------------
    def _make_ready(self, actor: Actor) -> None:
        self.events += 1
        self._instant_events += 1
        if self._instant_events > self._events_per_instant_max:
            raise self._zeno()
        actor.is_ready = True
        self._ready.append(actor)
        if self._running == 0 and not self._is_advancing:
            self._loop.call_soon(self._advance)

    def _go_on(self) -> None:
        """See to it that the queue is looked at, if this comes from outside a step."""
        if self._running == 0 and not self._is_advancing:
            self._loop.call_soon(self._advance)

    def _count_event(self) -> None:
        self.events += 1
        self._instant_events += 1
        if self._instant_events > self._events_per_instant_max:
            raise self._zeno()

    def _advance(self) -> None:
        """Take steps and pop timers until a task runs."""
        if self._is_advancing:
            return
        self._is_advancing = True
        if len(self._digest.waiting) >= _YIELD_EVERY:
            self._digest.fold()
        guarded(self._move_on, self.fail)
        self._is_advancing = False

    def _move_on(self) -> None:
        heap, ready, pop, note = self._heap, self._ready, heapq.heappop, self._note_instant
        step = self._step if self.is_inline else self._deliver
        for _ in range(_YIELD_EVERY):
            if self._running or self._is_over:
                return
            if ready:
                self._take_ready()
                continue
            if self._is_stopping:
                self._stop_at_rest()
                return
            if not heap:
                if self.last_resort is not None and self.last_resort():
                    continue
                self.fail(self._deadlock())
                return
            due_ns, priority, number, actor, call = pop(heap)
            if actor is not None and actor.armed != number:
                continue
            if self.now_ns < due_ns <= self._notice_ns:  # as `_move_to`, without its call
                self.now_ns = due_ns
                self.priority_reached = priority
                self._instant_events = 0
                note(due_ns + priority + 1)
            elif not self._move_to(due_ns, priority):
                return
            self.events += 1
            if actor is None:
                call()  # type: ignore[misc]
            else:
                step(actor)
        self._loop.call_soon(self._advance)  # signals, progress and other tasks have the loop

    def _take_ready(self) -> None:
        """Run the oldest entry of the queue."""
        entry = self._ready.popleft()
        if isinstance(entry, Actor):
            if self.is_inline:
                self._step(entry)
            else:
                self._deliver(entry)
        elif isinstance(entry, Row):
            self._wake_next(entry)
        else:
            entry()

    def _wake_next(self, row: Row) -> None:
        """The next of a row goes before all others, and so does the rest of the row."""
        actor = next(row.actors, None)
        if actor is None:
            return
        ready = self._ready
        others = len(ready)
        self.wake(actor)
        woken = len(ready) - others
        ready.rotate(woken)
        ready.insert(woken, row)

    def _move_to(self, due_ns: int, priority: int) -> bool:
        if due_ns > self.now_ns:
            if due_ns > self._notice_ns and not self._notice(due_ns):
                return False
            self.now_ns = due_ns
            self.priority_reached = priority
            self._instant_events = 0
        else:
            self._instant_events += 1
            if self._instant_events > self._events_per_instant_max:
                self.fail(self._zeno())
                return False
            if priority > self.priority_reached:
                self.priority_reached = priority
        self._note_instant(due_ns + priority + 1)
        return True

    def _notice(self, due_ns: int) -> bool:
        """The clock passes the limit, or an instant at which a sample is taken."""
        if self._limit_ns is not None and due_ns > self._limit_ns:
            self.now_ns = self._limit_ns
            self.fail(LimitReached(f"simulated time reached {self._limit_ns / 1e9:g} s"))
            return False
        if self._sample_ns is not None and due_ns > self._sample_ns:
            self._take_samples(due_ns)
        if self._watch_ns is not None and due_ns > self._watch_ns:
            assert self._watch is not None
            self._watch_ns = due_ns + self._watch_period_ns
            error = self._watch(self.now_ns)
            if error is not None:
                self.fail(error)
                return False
        self._set_notice()
        return True

    def _set_notice(self) -> None:
        instants = (self._limit_ns, self._sample_ns, self._watch_ns)
        self._notice_ns = min((at_ns for at_ns in instants if at_ns is not None), default=NEVER)

    def _take_samples(self, due_ns: int) -> None:
        assert self._sample is not None
        assert self._sample_ns is not None
        while self._sample_ns < due_ns:
            if self._sample_ns > self.now_ns:
                self.now_ns = self._sample_ns
            self.priority_reached = PRIORITY_CONTROL << 1
            self._sample(self._sample_ns)
            self._sample_ns += self._sample_period_ns

    # --- errors that tell a story -------------------------------------------------------------
    def _deadlock(self) -> Deadlock:
        lines = [f"deadlock at {self.now_ns} ns: nothing is scheduled, and the run is not over"]
        lines += [actor.describe() for actor in self._actors][:50]
        lines += [lock.describe() for lock in self._locks if lock.is_waited_for()][:50]
        return Deadlock("\n  ".join(lines + self.story()))

    def _zeno(self) -> Zeno:
        lines = [
            f"more than {self._events_per_instant_max} events at {self.now_ns} ns "
            "(simulated time does not move)"
        ]
        lines += [f"{actor.name} is to run now" for actor in self._actors if actor.is_ready][:50]
        lines += [actor.describe() for actor in self._actors if not actor.is_ready][:50]
        return Zeno("\n  ".join(lines + self.story()))
