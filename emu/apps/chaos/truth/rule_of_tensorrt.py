"""TensorRT-LLM's rule: which step is formed of what waits and runs.

Restates docs/lab/tensorrt-llm.md: requests are asked in order of arrival whether they fit, beside
what running ones keep (all of their output, or the blocks of their next token; then the one that
came last is paused where blocks lack). Each that generates has one token, contexts the rest: whole,
cut to blocks from the last, or a block each in turn. With `batch_wait_timeout_iters` they wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.apps.chaos.truth.book import Ask, Book, Due, blocks_of
from emu.apps.chaos.truth.seats import Seat


class _Step:
    """A step while it is formed."""

    def __init__(self, seat: Seat, book: Book, ask: Ask) -> None:
        self.seat, self.ask, self.table = seat, ask, seat.scheduler
        self.queue = list(book.queue)
        self.computed = dict(book.running)
        self.late = dict(book.leaving)
        """What ended with the last step, whose place and blocks are not free."""
        knows = self.table.length_ends_known == "on"
        self.turns_lost = 0 if knows else len(self.late)
        """Of these, those that take part in this step for nothing."""
        self.pauses = self.table.capacity_scheduler_policy == "MAX_UTILIZATION"
        self.taken = 0
        """Blocks of requests that begin."""
        self.paused: list[int] = []
        self.cut: tuple[int, int] | None = None
        """When the last came that was paused: none that came later is asked."""

    def blocks(self, tokens: int) -> int:
        return blocks_of(self.seat, tokens)

    def held(self, row: int) -> int:
        """A context has the blocks of all that it will read."""
        tokens = self.late[row] if row in self.late else self.computed[row]
        reached = self.ask.reached(row)
        reads = row in self.computed and tokens < reached - 1
        return self.blocks(reached if reads else tokens)

    @property
    def spare(self) -> int:
        """Blocks that running requests leave to others."""
        rows = [*self.computed, *self.late]
        free = self.seat.blocks - sum(map(self.held, rows)) - self.taken
        if self.pauses:
            rows = rows if self.turns_lost else list(self.computed)
            kept = [self.ask.reached(row) for row in rows]
        else:
            kept = [self.ask.longest(row) for row in rows]
        wanted = [self.blocks(tokens) for tokens in kept]
        return free - sum(
            max(0, all_ - self.held(row)) for all_, row in zip(wanted, rows, strict=True)
        )

    def pause(self, row: int) -> None:
        del self.computed[row]
        self.paused.append(row)
        self.cut = self.ask.came(row)

    def latest(self) -> int:
        return max(self.computed, key=self.ask.came)

    def fitting(self) -> list[int]:
        """Waiting requests that begin."""
        found: list[int] = []
        busy = len(self.computed) + len(self.late)
        if self.table.capacity_scheduler_policy == "STATIC_BATCH" and busy:
            return found
        for row in self.queue[: max(0, self.table.requests_max - busy)]:
            if self.cut is not None and self.ask.came(row) >= self.cut:
                break
            while not self.fits(row, len(found)):
                if not (self.pauses and self.computed):
                    return found
                victim = self.latest()
                if self.ask.came(victim) < self.ask.came(row):
                    return found
                self.pause(victim)
            found.append(row)
            self.taken += self.wanted(row)
        return found

    def wanted(self, row: int) -> int:
        return self.blocks(self.ask.reached(row) if self.pauses else self.ask.longest(row))

    def fits(self, row: int, begun: int) -> bool:
        places = self.table.requests_max - len(self.computed) - len(self.late) - begun
        return places > 0 and self.wanted(row) <= self.spare


def due_of_tensorrt(seat: Seat, book: Book, ask: Ask) -> Due:
    """The step that is formed now."""
    step = _Step(seat, book, ask)
    while step.pauses and step.computed and step.spare < 0:
        step.pause(step.latest())
    contexts = [row for row, had in step.computed.items() if had < ask.reached(row) - 1]
    decodes = [row for row in step.computed if row not in contexts]
    left = step.table.tokens_max - len(decodes) - step.turns_lost
    begun = step.fitting()
    contexts = [row for row in contexts if row in step.computed]
    decodes = [row for row in decodes if row in step.computed]
    rows = [*contexts, *begun]
    lengths = [ask.reached(row) - step.computed.get(row, 0) for row in rows]
    due = Due({row: (step.computed[row], 1) for row in decodes}, step.paused)
    shared = {row: new for row, new in zip(rows, _shares(seat, lengths, left), strict=True) if new}
    generations = len(decodes) + step.turns_lost
    whole = sum(ask.reached(row) for row in shared)
    if not (shared and generations and _holds_back(seat, book, generations + whole)):
        due.members |= {row: (step.computed.get(row, 0), new) for row, new in shared.items()}
    return due


def _holds_back(seat: Seat, book: Book, step_tokens: int) -> bool:
    """Contexts wait beside generations until a step is large enough, or for so many steps."""
    table = seat.scheduler
    is_enough = step_tokens >= table.batch_wait_max_tokens_ratio * table.tokens_max
    holds = not is_enough and book.held_back < table.batch_wait_timeout_iters
    book.held_back = book.held_back + 1 if holds else 0
    return holds


def _shares(seat: Seat, lengths: Sequence[int], left: int) -> list[int]:
    """Tokens of each context."""
    table, size = seat.scheduler, int(seat.scheduler.block_size)
    found = [0] * len(lengths)
    if table.enable_chunked_prefill and table.context_chunking_policy == "EQUAL_PROGRESS":
        if sum(lengths) <= left:
            return list(lengths)
        grows = True
        while grows:
            grows = False
            for at, length in enumerate(lengths):
                more = min(size, length - found[at])
                if 0 < more <= left:
                    found[at], left, grows = found[at] + more, left - more, True
        return found
    for at, length in enumerate(lengths):
        if length > left:
            if not table.enable_chunked_prefill:
                break
            length = left - left % size
        found[at] = length
        left -= length
    return found
