"""The kernel: simulated time, actors, and the order in which they take their steps.

How time moves. Steps that are to be taken at this instant wait in one queue, first come, first
served. When it is empty, nothing can happen any more at this instant, and the earliest timer is
popped: the clock jumps to it and its owner takes a step. Nothing polls.

Order. Timers are ordered by (due time, priority, order of scheduling). The priority belongs to the
actor that waits: arrivals before transfers before replicas (by id) before control loops. So the
order of things that are due at one instant never depends on *when* they were scheduled, which
is what makes a decode leap equal to stepping. Exactly one timer is popped at a time; what it sets
off runs to rest, first come, first served, before the next is popped.

Life. An actor is a coroutine (`emu/kernel/life.py`): it takes a step, and awaits its next turn.
This kernel is the event loop of these coroutines: it resumes the one whose turn it is, and no
future, socket or thread stands between them. Where actors wait for the real world too, the same
coroutines are asyncio tasks (`emu/kernel/tasks.py`), resumed by the same queue and the same heap,
so results are the same (`tests/kernel/test_delivery.py`); `WallKernel` (`emu/kernel/wallclock.py`)
puts those on the wall clock. Cancellation ends a run; it never models a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Final

from mypy_extensions import mypyc_attr

from emu.errors import Deadlock, EmuError, LimitReached, Zeno
from emu.kernel.digest import Digest
from emu.kernel.life import TURN, live
from emu.kernel.lock import Lock
from emu.kernel.natives import heappop, heappush
from emu.kernel.priorities import PRIORITY_CONTROL
from emu.plugins.blame import guarded

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
    """A mailbox, one timer, and a life: a coroutine that steps when either has something.

    An actor owns its object; no other code writes to it. What reaches it are messages and its
    timer. A message comes in one of two ways, and the sender chooses:

    - `tell` is carried out now, before the sender's next line (depth first). For what the receiver
      must know before anything else happens: a reservation, a request routed to it, a crash.
    - `post` is put into the mailbox, and the actor is called for a step at the end of the queue of
      this instant (first come, first served), or later if it is in the middle of something:
      `align` says when.

    `live` is its life, and `tick` the step at each of its turns: it takes what is in the mailbox
    and what has become due, begins the next thing and returns when that ends.
    """

    def __init__(self, kernel: Kernel, name: str, priority: int) -> None:
        """`priority` orders what is due at one instant (`emu/kernel/priorities.py`)."""
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
        self.turn: Awaitable[None] = TURN
        """What its life awaits between two steps."""
        self.life: Coroutine[object, None, None] | None = None
        self.resume: Callable[[None], object] = _not_started
        """Gives it its turn."""

    def live(self) -> Coroutine[object, None, None]:
        """Its life, which never ends by itself."""
        return live(self, self.kernel.ends)

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


def _not_started(_: None) -> object:
    raise AssertionError("the actor's kernel has not started it")


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
        "_actors", "_between", "_check", "_check_every", "_check_left", "_digest", "_error",
        "_events_per_instant_max", "_from_outside", "_heap", "_instant_events", "_instants",
        "_is_advancing", "_is_over", "_is_running", "_is_stopping", "_limit_ns", "_locks",
        "_notice_ns", "_ready", "_running", "_sample", "_sample_ns", "_sample_period_ns",
        "_sequence", "_trace", "_watch", "_watch_ns", "_watch_period_ns", "events", "last_resort",
        "now_ns", "priority_reached", "story",
    )
    # fmt: on

    def __init__(self, *, events_per_instant_max: int = 100_000, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self.priority_reached = -1
        """Highest priority popped at this instant: what is due now with a lower one is over."""
        self.events = 0
        self._digest = Digest()
        """Of time + priority of every timer popped: a cheap check of determinism."""
        self._instants = self._digest.waiting
        self._heap: list[Entry] = []
        self._ready: deque[Actor | Call | Row] = deque()
        """Steps of this instant: of actors, plain functions, and rows of actors."""
        self._is_advancing = False
        self._sequence = 0
        self._running = 0
        """Actors whose turn goes on when `resume` has returned: those that are tasks."""
        self._is_running = False
        self._is_stopping = False
        self._instant_events = 0
        self._events_per_instant_max = events_per_instant_max
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        """What ended the run, and where it came from."""
        self._is_over = False
        self._between: Callable[[], None] | None = None
        self._from_outside: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        """Calls of signal handlers and other threads, made between two slices of the run."""
        self._actors: list[Actor] = []
        self._locks: list[Lock] = []
        self._limit_ns: int | None = None
        self._sample_ns: int | None = None
        self._sample_period_ns = 0
        self._sample: Callable[[int], None] | None = None
        self._watch_ns: int | None = None
        self._watch_period_ns = 0
        self._watch: Callable[[int], EmuError | None] | None = None
        self._check: Callable[[bool], EmuError | None] | None = None
        self._check_every = self._check_left = 0
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

    # Running.
    def start(self, actor: Actor) -> None:
        """The actor begins to live: its first step is in the queue."""
        self._actors.append(actor)
        if self._is_running:
            self._bring_to_life(actor)
        actor.is_ready = True
        self._ready.append(actor)

    async def run(self, *, limit_ns: int | None = None) -> None:
        """Let the actors live until `stop` is called.

        Raises what a step raised, `Deadlock`, `Zeno`, or `LimitReached` past `limit_ns`. It waits
        for nothing: `completed` runs it, or a coroutine around it, without an event loop.
        """
        self._begin(limit_ns)
        while not self._is_over:
            self._advance()
            self._look_outside()
        self._end()

    def _begin(self, limit_ns: int | None) -> None:
        self._limit_ns = limit_ns
        self._set_notice()
        self._is_running = True
        for actor in self._actors:
            self._bring_to_life(actor)

    def _bring_to_life(self, actor: Actor) -> None:
        life = actor.life = actor.live()
        actor.resume = life.send

    def _look_outside(self) -> None:
        """Signals, other threads and the progress of the run have their turn."""
        while self._from_outside:
            call, arguments = self._from_outside.popleft()
            call(*arguments)
        if self._between is not None and not self._is_over:
            self._between()

    def _end(self) -> None:
        """All lives are over; raise what ended the run."""
        self._is_over = True
        self._is_running = False
        for actor in self._actors:
            if actor.life is not None:
                actor.life.close()
        if self._error is not None:
            raise self._error.with_traceback(self._trace)

    def call_soon_threadsafe(self, call: Callable[..., object], *arguments: object) -> None:
        """Make this call between two timers, soon: for signal handlers and other threads."""
        self._from_outside.append((call, arguments))

    def call_between(self, call: Callable[[], None]) -> None:
        """Call this every few milliseconds of the run, between two timers: to show where it is."""
        self._between = call

    def stop(self) -> None:
        """The run is over as soon as what this set off at this instant has come to rest."""
        self._is_stopping = True

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        if not self._is_over:
            self._is_over = True
            self._error, self._trace = error, error.__traceback__

    # What actors do with it.
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
        heappush(self._heap, (at_ns, priority, self._sequence, actor, None))

    def soon(self, call: Call) -> None:
        """Run a plain function at the end of the queue of this instant."""
        self._count_event()
        self._ready.append(call)

    def wake_in_turn(self, actors: Iterator[Actor]) -> None:
        """Wake these in their order, each when those before it have come to rest.

        The order is that of waking all of them now, but the row may end early, when those before
        have left nothing to look at.
        """
        self._ready.append(Row(actors))

    def call_at(self, at_ns: int, priority: int, call: Call) -> None:
        """Run a plain function at an instant."""
        self._sequence += 1
        if at_ns < self.now_ns:
            at_ns = self.now_ns
        heappush(self._heap, (at_ns, priority, self._sequence, None, call))

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

    def check_every(self, timers: int, check: Callable[[bool], EmuError | None]) -> None:
        """Call `check` before every so-many-th timer; the error that it gives ends the run.

        It is told whether this instant is over: the next timer is later than now.
        """
        self._check = check
        self._check_every = self._check_left = timers
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

    def has_due(self, at_ns: int) -> bool:
        """Whether a timer that counts is due at this instant."""
        return any(
            due_ns == at_ns and (actor is None or actor.armed == number)
            for due_ns, _, number, actor, _ in self._heap
        )

    # Turns.
    def _step(self, actor: Actor) -> None:
        """The actor has its turn."""
        actor.is_ready = False
        actor.armed = 0
        actor.due_ns = NEVER
        actor.is_stepping = True
        actor.resume(None)

    def ends(self, actor: Actor, due_ns: int) -> None:
        """Its step has ended, and the next is due then, or `PARK` or `AGAIN`."""
        actor.is_stepping = False
        if due_ns >= 0:
            sequence = self._sequence = actor.armed = self._sequence + 1
            actor.due_ns = due_ns
            heappush(self._heap, (due_ns, actor.priority, sequence, actor, None))
        elif due_ns == AGAIN:
            self._make_ready(actor)

    def goes_out(self, actor: Actor) -> None:
        """Its step has ended, and it awaits something outside simulated time."""
        actor.is_away = True

    def comes_back(self, actor: Actor) -> None:
        """What it has awaited outside is there."""
        actor.is_away = False

    # Inside.
    def _make_ready(self, actor: Actor) -> None:
        self.events += 1
        self._instant_events += 1
        if self._instant_events > self._events_per_instant_max:
            raise self._zeno()
        actor.is_ready = True
        self._ready.append(actor)

    def _count_event(self) -> None:
        self.events += 1
        self._instant_events += 1
        if self._instant_events > self._events_per_instant_max:
            raise self._zeno()

    def _advance(self) -> None:
        """Take steps and pop timers for a slice of the run."""
        if self._is_advancing:
            return
        self._is_advancing = True
        if len(self._digest.waiting) >= _YIELD_EVERY:
            self._digest.fold()
        guarded(self._move_on, self.fail)
        self._is_advancing = False

    def _move_on(self) -> None:
        heap, ready, instants = self._heap, self._ready, self._instants
        for _ in range(_YIELD_EVERY):
            if self._running or self._is_over:
                return
            if ready:
                self._take_ready()
                continue
            if self._is_stopping:
                self._is_over = True
                return
            if not heap:
                if self.last_resort is not None and self.last_resort():
                    continue
                self.fail(self._deadlock())
                return
            due_ns, priority, number, actor, call = heappop(heap)
            if actor is not None and actor.armed != number:
                continue
            if self.now_ns < due_ns <= self._notice_ns:  # as `_move_to`, without its call
                self.now_ns = due_ns
                self.priority_reached = priority
                self._instant_events = 0
                instants.append(due_ns + priority + 1)
            elif not self._move_to(due_ns, priority):
                heappush(heap, (due_ns, priority, number, actor, call))  # still to come
                return
            self.events += 1
            if actor is None:
                call()  # type: ignore[misc]
            else:
                self._step(actor)

    def _take_ready(self) -> None:
        """Run the oldest entry of the queue."""
        entry = self._ready.popleft()
        if isinstance(entry, Actor):
            self._step(entry)
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
        if self._check is not None and not self._has_passed(due_ns > self.now_ns):
            return False
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
        self._instants.append(due_ns + priority + 1)
        return True

    def _has_passed(self, is_quiet: bool) -> bool:
        """The check before this timer, if it is its turn, has found nothing."""
        self._check_left -= 1
        if self._check_left > 0:
            return True
        self._check_left = self._check_every
        assert self._check is not None
        error = self._check(is_quiet)
        if error is None:
            return True
        self.fail(error)
        return False

    def _notice(self, due_ns: int) -> bool:
        """The clock passes the limit, or an instant at which a sample is taken."""
        if self._limit_ns is not None and due_ns > self._limit_ns:
            self.now_ns = self._limit_ns
            self.priority_reached = PRIORITY_CONTROL << 1  # all that is due by then has happened
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
        if self._check is not None:
            self._notice_ns = -1  # every timer goes through `_move_to`
            return
        notice_ns = NEVER
        for at_ns in (self._limit_ns, self._sample_ns, self._watch_ns):
            if at_ns is not None and at_ns < notice_ns:
                notice_ns = at_ns
        self._notice_ns = notice_ns

    def _take_samples(self, due_ns: int) -> None:
        assert self._sample is not None
        assert self._sample_ns is not None
        while self._sample_ns < due_ns:
            if self._sample_ns > self.now_ns:
                self.now_ns = self._sample_ns
            self.priority_reached = PRIORITY_CONTROL << 1
            self._sample(self._sample_ns)
            self._sample_ns += self._sample_period_ns

    # Errors that tell a story.
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
