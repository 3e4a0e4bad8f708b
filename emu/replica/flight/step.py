"""A single iteration: from when its batch began to when it ends."""

from __future__ import annotations

from typing import Final, final

from emu.kernel.clock import PARK
from emu.replica.books import Books
from emu.replica.flight.base import IDLE, Flight, Sort, until, words_of
from emu.scheduling.base import Batch

FLIES: Final = 0
PAUSED: Final = 1
RESUMED: Final = 2


@final
class Step(Flight):
    """One iteration of one batch."""

    books: Books
    batch: Batch
    start_ns: int
    """When its batch was formed."""
    waited_ns: int
    """Of the time since then, what it waited for its prerequisites."""
    then: Flight
    """What is in flight when it is complete."""
    _process: int
    """Whether its process runs, stands still, or has just gone on."""
    _end_ns: int
    """While its process stands still: when it would have ended."""

    __slots__ = ("_end_ns", "_process", "batch", "books", "start_ns", "then", "waited_ns")

    def __init__(
        self,
        books: Books,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        then: Flight = IDLE,
        waited_ns: int = 0,
    ) -> None:
        self.is_open = self.is_joint = self.is_leap = self.is_cut = False
        self.due_ns = end_ns
        self.books = books
        self.batch = batch
        self.start_ns = start_ns
        self.then = then
        self.waited_ns = waited_ns
        self._process = FLIES

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.STEP

    def end(self) -> Flight:
        """It is complete, unless a pause has stopped it or has just ended."""
        if self._process:
            if self._process == RESUMED:  # the rest of it is to be waited for
                self._process = FLIES
            return self
        books, start_ns = self.books, self.start_ns
        books.counters.busy_ns -= self.waited_ns
        books.complete(self.batch, 1, start_ns, None, books.clock.now_ns - start_ns)
        return self.then

    def boundary_ns(self, done: int) -> int:
        """When it ends, as far as is known."""
        return self._end_ns if self._process == PAUSED else self.due_ns

    def tells(self, now_ns: int) -> str:
        """Its batch, and when it ends."""
        if self._process == PAUSED:
            return f"{words_of(self.batch)}: one iteration, which stands still"
        return f"{words_of(self.batch)}: one iteration, {until(self.due_ns, now_ns)}"

    def pause(self) -> Flight:
        """What is left of it runs when the process goes on."""
        self._process, self._end_ns, self.due_ns = PAUSED, self.due_ns, PARK
        self.then = IDLE
        return self

    def resume(self, since_ns: int) -> None:
        """It ends so much later."""
        self._process = RESUMED
        self.due_ns = self._end_ns + self.books.clock.now_ns - since_ns

    def lose(self) -> Flight:
        """It ran for nothing."""
        if self._process != PAUSED:
            books = self.books
            books.counters.busy_ns += books.clock.now_ns - self.start_ns - self.waited_ns
        return IDLE
