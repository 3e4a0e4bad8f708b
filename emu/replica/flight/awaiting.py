"""A batch that is formed, and waits for KV from a lower tier before it runs."""

from __future__ import annotations

from typing import Protocol, final

from emu.kernel.clock import PARK
from emu.replica.books import Books
from emu.replica.events import INTERRUPT
from emu.replica.flight.base import IDLE, Flight, Sort, words_of
from emu.replica.prerequisites import Prerequisites
from emu.scheduling.base import Batch


class Launcher(Protocol):
    """What puts a batch into flight."""

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """The batch, formed at `start_ns`, begins now, after it has waited so long."""
        ...


@final
class Awaiting(Flight):
    """What a batch needs is on its way."""

    books: Books
    batch: Batch
    start_ns: int
    prerequisites: Prerequisites
    then: Launcher
    """What begins the batch."""
    is_paused: bool

    __slots__ = ("batch", "books", "is_paused", "prerequisites", "start_ns", "then")

    def __init__(
        self,
        books: Books,
        batch: Batch,
        start_ns: int,
        prerequisites: Prerequisites,
        then: Launcher,
    ) -> None:
        self.is_open = self.is_joint = self.is_cut = self.is_paused = False
        self.is_leap = False
        self.due_ns = PARK
        self.books = books
        self.batch = batch
        self.start_ns = start_ns
        self.prerequisites = prerequisites
        self.then = then

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.AWAITING

    def end(self) -> Flight:
        """The batch begins, if it has all that it needs and its process runs."""
        if self.prerequisites.left or self.is_paused:
            return self
        self.books.watch.began(self.batch, 0)
        waited_ns = self.books.clock.now_ns - self.start_ns
        return self.then.launch(self.batch, self.start_ns, waited_ns)

    def tells(self, now_ns: int) -> str:
        """Its batch, and how much is missing."""
        paused = ", and its process stands still" if self.is_paused else ""
        return f"{words_of(self.batch)} waits for KV, {self.prerequisites.left} to come{paused}"

    def boundary_ns(self, done: int) -> int:
        """It is not known when an iteration ends that has not begun: now."""
        return self.start_ns

    def met(self, wait_ns: int) -> int:
        """With the last thing awaited the batch begins at once."""
        self.prerequisites.left -= 1
        return INTERRUPT if self.prerequisites.left == 0 else 0

    def lose_recalls(self, tier: int) -> tuple[int, int]:
        """The batch computes what it has waited for in vain."""
        tokens = self.prerequisites.lose_recalls(tier)
        return tokens, INTERRUPT if tokens and self.prerequisites.left == 0 else 0

    def stale_tiers(self) -> list[int]:
        """Tiers that have lost what is still read from them."""
        return self.prerequisites.stale_recalls()

    def pause(self) -> Flight:
        """KV goes on arriving, the batch does not begin."""
        self.is_paused = True
        return self

    def resume(self, since_ns: int) -> None:
        """The batch may begin."""
        self.is_paused = False

    def lose(self) -> Flight:
        """What is on its way is not wanted any more."""
        self.prerequisites.drop()
        return IDLE
