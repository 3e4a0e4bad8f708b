"""A batch whose cost a backend outside simulated time is asked for: time stands still meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from emu.kernel.clock import PARK
from emu.replica.books import Books
from emu.replica.flight.base import Flight, Sort
from emu.scheduling.base import Batch


@final
class Measured(Flight):
    """The answer is awaited, and with it a flight begins."""

    books: Books
    then: Callable[[int], Flight]
    """What begins with the answer."""
    beside: Flight
    """What is in flight beside the batch, or `Idle`: batches on stages, layers of others."""
    start_ns: int
    """When the batch was formed; -1 = it belongs to `beside`."""
    waited_ns: int
    """Of the time since then, what it waited for its prerequisites."""
    cost_ns: int
    """The answer; -1 = it is not here yet."""
    is_paused: bool

    __slots__ = ("beside", "books", "cost_ns", "is_paused", "start_ns", "then", "waited_ns")

    def __init__(
        self,
        books: Books,
        then: Callable[[int], Flight],
        beside: Flight,
        start_ns: int = -1,
        waited_ns: int = 0,
    ) -> None:
        self.is_open = self.is_joint = self.is_cut = self.is_paused = False
        self.is_leap = beside.is_leap
        self.due_ns = PARK
        self.books = books
        self.then = then
        self.beside = beside
        self.start_ns = start_ns
        self.waited_ns = waited_ns
        self.cost_ns = -1

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.MEASURED

    def learn(self, cost_ns: int) -> bool:
        """The answer is here."""
        self.cost_ns = cost_ns
        return True

    def end(self) -> Flight:
        """What was to begin with the answer begins, if it is here and the process runs."""
        if self.cost_ns < 0 or self.is_paused:
            return self
        return self.then(self.cost_ns)

    def tells(self, now_ns: int) -> str:
        """What is asked, and what is in flight beside it."""
        what = "a batch waits for its cost" if self.cost_ns < 0 else "a batch has its cost"
        paused = ", and its process stands still" if self.is_paused else ""
        beside = f"; {self.beside.tells(now_ns)}" if self.beside.holds_batch() else ""
        return what + paused + beside

    def settle(self) -> int:
        """What is beside it is settled."""
        return self.beside.settle()

    def boundary_ns(self, done: int) -> int:
        """It is not known when an iteration ends that has not begun: now."""
        return self.start_ns if self.start_ns >= 0 else self.beside.boundary_ns(done)

    def holds_batch(self) -> bool:
        """Its own, or one beside it."""
        return self.start_ns >= 0 or self.beside.holds_batch()

    def batches(self) -> list[Batch]:
        """Those beside it."""
        return self.beside.batches()

    def pause(self) -> Flight:
        """The answer may come, nothing begins with it."""
        self.is_paused = True
        self.beside = self.beside.pause()
        return self

    def resume(self, since_ns: int) -> None:
        """What was to begin may begin."""
        self.is_paused = False
        self.beside.resume(since_ns)

    def lose(self) -> Flight:
        """The answer is not wanted any more; the time since the batch was formed is lost."""
        if self.start_ns >= 0 and not self.is_paused:
            books = self.books
            books.counters.busy_ns += books.clock.now_ns - self.start_ns - self.waited_ns
        return self.beside.lose()
