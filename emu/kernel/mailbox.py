"""What an actor may wait for beside the clock: a mailbox, a lock, an event.

Own their waiters and nothing else; time, timers and the count of runnable actors are the kernel's
(`emu/kernel/clock.py`), which makes them and which they tell when somebody waits or may go on.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from emu.kernel.priorities import RANK_CONTROL

if TYPE_CHECKING:
    from emu.kernel.clock import Kernel

M = TypeVar("M")

Waiter = asyncio.Future[bool]
Align = Callable[[int], int]
Turn = Callable[[], int]
"""What an actor would do now; when its next turn is due, or one of the following."""
WAKE: Final = -1
"""The actor itself must go on."""
PARK: Final = -2
"""There is nothing to do before the next poke."""
_push: Final = heapq.heappush


class Mailbox(Generic[M]):
    """An unbounded FIFO of messages for one receiver."""

    def __init__(self, kernel: Kernel, name: str, rank: int) -> None:
        self.name = name
        self.items: deque[M] = deque()
        self._kernel = kernel
        self._rank = rank
        self._waiter: Waiter | None = None
        self._armed: Waiter | None = None
        self._align: Align | None = None
        self._turn: Turn | None = None
        self._turn_ns = -1
        """When the turn is due. A timer for another instant is void: it was put off or cut."""
        self._is_parked = False
        """The next turn comes with the next poke."""
        self._is_called = False
        """That poke has come."""

    def put(self, message: M) -> None:
        """Append; wake the receiver now, or at the instant that it asked to be aligned to."""
        self.items.append(message)
        self.poke()

    def poke(self) -> None:
        """Wake the receiver without a message (something that it looks at has changed)."""
        waiter = self._waiter
        if waiter is None:
            return
        self._waiter = None
        if waiter.done():
            return
        kernel = self._kernel
        if self._is_parked:
            self._is_parked = False
            self._is_called = True
            kernel._wake_turn(self)
            return
        align = self._align
        if align is None:
            kernel._wake(waiter, True)
            return
        at_ns = align(kernel.now_ns)
        if at_ns < 0:
            self._waiter = waiter
        elif self._turn is None:
            kernel._push(at_ns, self._rank, waiter)
        else:
            self._turn_ns = at_ns
            kernel._push(at_ns, self._rank, self)

    def bring_forward(self, at_ns: int) -> None:
        """The deadline, or the next turn, comes sooner than planned. A poke may still be sooner."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # poked already: that is sooner
        target: Target = waiter
        if self._turn is not None:
            self._turn_ns = at_ns
            target = self
        self._kernel._push(at_ns, self._rank, target)

    def interrupt(self) -> None:
        """Wake the receiver now, whatever it asked to be aligned to (a crash does not wait)."""
        waiter = self._armed
        if waiter is not None and not waiter.done():
            self._waiter = None
            self._turn_ns = -1
            self._is_parked = self._is_called = False
            self._kernel._wake(waiter, True)

    def wait(self, deadline_ns: int | None = None, align: Align | None = None) -> Waiter:
        """Await the result: until a message or poke (True) or the deadline (False).

        `align` maps the instant of the first message to the instant of waking (a replica in the
        middle of an iteration wakes at its end); -1 means "at the deadline as planned". Returns
        at once if messages are there and no `align` is given.
        """
        kernel = self._kernel
        waiter = kernel._new_waiter()
        if self.items and align is None:
            waiter.set_result(True)
            return waiter
        self._waiter = self._armed = waiter
        self._align = align
        self._turn = None
        if deadline_ns is not None:
            kernel._push(max(deadline_ns, kernel.now_ns), self._rank, waiter)
        if self.items:
            self.poke()
        kernel._block()
        return waiter

    def take_turns(self, turn: Turn, due_ns: int, align: Align) -> Waiter:
        """Await the result: `turn` is called at `due_ns`, then when it says, until it says `WAKE`.

        For an actor that does the same thing again and again: the kernel does it in its place,
        at the same instants and in the same order, and saves the way through the event loop. A
        poke moves a turn to where `align` says, as in `wait`; an interrupt ends it at once. After
        `PARK` the next turn comes with the next poke, when whoever runs has come to rest.
        """
        kernel = self._kernel
        waiter = kernel._new_waiter()
        self._waiter = self._armed = waiter
        self._align = align
        self._turn = turn
        self._turn_ns = due_ns
        kernel._push(due_ns, self._rank, self)
        kernel._block()
        return waiter

    def _take_turn(self) -> None:
        turn, waiter, kernel = self._turn, self._armed, self._kernel
        assert turn is not None
        # Pokes during the turn say nothing new: it looks at everything before it ends.
        self._waiter = self._armed = None
        self._is_called = False
        due_ns = turn()
        if due_ns >= 0:
            self._waiter = self._armed = waiter
            self._turn_ns = due_ns
            sequence = kernel._sequence = kernel._sequence + 1
            _push(kernel._heap, (due_ns, self._rank, sequence, self))
            return
        self._turn_ns = -1
        if due_ns == PARK:
            self._waiter = self._armed = waiter
            self._is_parked = True
        else:
            assert due_ns == WAKE
            assert waiter is not None
            kernel._wake(waiter, False)

    async def get(self, deadline_ns: int | None = None) -> M | None:
        """The next message, or None at the deadline."""
        if not self.items:
            await self.wait(deadline_ns)
            self._waiter = None
            if not self.items:
                return None
        return self.items.popleft()

    def is_waited_for(self) -> bool:
        """Somebody waits here."""
        return self._waiter is not None and not self._waiter.done()

    def describe(self) -> str:
        """One line for a story."""
        return f"an actor waits for a message in {self.name}"


Target = Waiter | Callable[[], None] | Mailbox[Any]
"""What a timer sets off: an actor wakes, a function is called, a turn is taken."""


class Lock:
    """Mutual exclusion in simulated time. `holder` says who has it (for stories and checks)."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.name = name
        self.holder = ""
        self._kernel = kernel
        self._waiters: deque[tuple[Waiter, str]] = deque()

    @property
    def is_held(self) -> bool:
        """Somebody has it."""
        return bool(self.holder)

    def try_acquire(self, holder: str) -> bool:
        """Take it if it is free and nobody is in the queue."""
        if self.holder or self._waiters:
            return False
        self.holder = holder
        return True

    async def acquire(self, holder: str) -> None:
        """Wait for it, first come, first served."""
        if self.try_acquire(holder):
            return
        waiter = self._kernel._new_waiter()
        self._waiters.append((waiter, holder))
        self._kernel._block()
        await waiter

    def release(self, holder: str) -> None:
        """Give it back; the longest waiting actor has it then."""
        assert self.holder == holder, f"{self.name}: {holder} releases, {self.holder} holds"
        self.holder = ""
        if self._waiters:
            waiter, self.holder = self._waiters.popleft()
            self._kernel._wake(waiter, True)

    def is_waited_for(self) -> bool:
        """Somebody waits here."""
        return bool(self._waiters)

    def describe(self) -> str:
        """One line for a story."""
        names = ", ".join(name for _, name in self._waiters)
        return f"{names} wait for lock {self.name}, which {self.holder} holds"


class Event:
    """A condition that actors wait for: `notify` wakes all who wait now; `set` stays set."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.name = name
        self.is_set = False
        self._kernel = kernel
        self._waiters: list[Waiter] = []

    def set(self) -> None:
        """From now on nobody waits here."""
        self.is_set = True
        self.notify()

    def notify(self) -> None:
        """Wake all who wait now, in the order in which they came."""
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                self._kernel._wake(waiter, True)

    async def wait(self, deadline_ns: int | None = None, rank: int = RANK_CONTROL) -> bool:
        """True when it happened, False at the deadline."""
        if self.is_set:
            return True
        kernel = self._kernel
        waiter = kernel._new_waiter()
        self._waiters.append(waiter)
        if deadline_ns is not None:
            kernel._push(max(deadline_ns, kernel.now_ns), rank, waiter)
        kernel._block()
        happened = await waiter
        if not happened:
            self._waiters.remove(waiter)
        return happened

    def is_waited_for(self) -> bool:
        """Somebody waits here."""
        return any(not waiter.done() for waiter in self._waiters)

    def describe(self) -> str:
        """One line for a story."""
        return f"an actor waits for {self.name}"
