"""The rest of a batch whose first layers another replica has run (live scaling, the old side)."""

from __future__ import annotations

from typing import Final, final

from emu.kernel.clock import PARK
from emu.replica.books import Books
from emu.replica.flight.base import APPLY, IDLE, Flight, Sort, until, words_of
from emu.replica.relay_board import RelayBoard, Relayed

_RUNS: Final = 0
_PAUSED: Final = 1
_RESUMED: Final = 2


@final
class Relay(Flight):
    """The layers that are left, and the head; first tokens come from here."""

    books: Books
    board: RelayBoard
    relayed: Relayed
    start_ns: int
    cost_ns: int
    is_over: bool
    """All layers have run; posted events come first, then the first tokens."""
    _process: int
    """Whether its process runs, stands still, or has just gone on."""
    _end_ns: int
    """While its process stands still: when it would have ended."""

    __slots__ = (
        "_end_ns",
        "_process",
        "board",
        "books",
        "cost_ns",
        "is_over",
        "relayed",
        "start_ns",
    )

    def __init__(self, books: Books, board: RelayBoard, relayed: Relayed, cost_ns: int) -> None:
        self.is_open = self.is_joint = self.is_leap = self.is_cut = self.is_over = False
        self.books = books
        self.board = board
        self.relayed = relayed
        self.start_ns = books.clock.now_ns
        self.due_ns = self._end_ns = self.start_ns + cost_ns
        self.cost_ns = cost_ns
        self._process = _RUNS

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.RELAYED

    def end(self) -> Flight:
        """Its layers have run, then its tokens are there; or a pause stops it, or has ended."""
        if self._process:
            if self._process == _RESUMED:  # the rest of it is to be waited for
                self._process = _RUNS
            return self
        books = self.books
        if not self.is_over:
            self.is_over = True
            self.due_ns = APPLY
            books.counters.busy_ns += self.cost_ns
            self.board.finished(books.replica_id)
            return self
        books.end_part(self.relayed.batch, self.start_ns, self.cost_ns, self.relayed.split)
        return IDLE

    def boundary_ns(self, done: int) -> int:
        """When its layers have run."""
        return -1 if self.is_over else self._end_ns

    def holds_batch(self) -> bool:
        """It does until its layers have run."""
        return not self.is_over

    def tells(self, now_ns: int) -> str:
        """Which layers of which batch run."""
        relayed = self.relayed
        words = f"{words_of(relayed.batch)} of replica {relayed.source_id}"
        if self.is_over:
            return f"{words}: all layers have run"
        end = "stands still" if self._process == _PAUSED else until(self.due_ns, now_ns)
        return f"{words}: from layer {relayed.start_layer + 1}, {end}"

    def pause(self) -> Flight:
        """What is left of it runs when the process goes on."""
        self._process, self.due_ns = _PAUSED, PARK
        return self

    def resume(self, since_ns: int) -> None:
        """It ends so much later."""
        if self.is_over:
            self._process, self.due_ns = _RUNS, APPLY
            return
        self._process = _RESUMED
        self._end_ns += self.books.clock.now_ns - since_ns
        self.due_ns = self._end_ns

    def lose(self) -> Flight:
        """It ran for nothing."""
        if self._process != _PAUSED and not self.is_over:
            books = self.books
            books.counters.busy_ns += books.clock.now_ns - self.start_ns
        return IDLE
