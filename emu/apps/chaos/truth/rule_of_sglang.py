"""SGLang's rules: which batch is formed; where not all is known, what no batch may be.

Restates docs/lab/schedulers.md: the queue is in the order in which requests came here (those that
were taken back stand at its end), or longest output first; a batch takes the first ones of it.
An engine that looks for new requests now and then only has a queue that is not known here. Where
pages lack, those with the fewest outputs are taken back. Decodes of a mixed batch count in
its chunk.

Without overlap, prefix cache and mixed batches the batch follows whole (`due_of_sglang`). Prompts
go first, as far as budgets of tokens and the pool allow: a request must fit beside what the batch
has taken with all of its output, and beside a part of what running ones may still make. The part
begins at 0.7 of the conservativeness, falls with each decode to 0.14 of that in 600, and begins
anew when nothing runs. After a refusal for want of room no prompt is tried until a request has
left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from emu.apps.chaos.truth.book import Ask, Book, Due, Members, blocks_of
from emu.apps.chaos.truth.seats import Seat

_COUNTED: Final = 4096
"""Tokens of a request's output that count at most."""
_EVER: Final = 1 << 62


def is_followed(seat: Seat) -> bool:
    """Its batches follow whole."""
    table = seat.scheduler
    is_late = seat.is_ahead or table.scheduler_recv_interval > 1
    is_odd = table.enable_mixed_chunk or table.ignore_eos or table.caches_prefixes
    return not (is_late or is_odd) and table.schedule_policy in ("fcfs", "lof", "lpm", "dfs-weight")


class _Prompts:
    """A batch of prompts while it is formed."""

    def __init__(self, seat: Seat, book: Book, ask: Ask, ratio: float) -> None:
        self.seat, self.book, self.ask, self.table = seat, book, ask, seat.scheduler
        self.page = int(seat.scheduler.block_size)
        held = sum(blocks_of(seat, had) for had in book.running.values())
        self.pool = (seat.blocks - held) * self.page
        owed = sum(min(ask.longest(r) - ask.reached(r), _COUNTED) for r in book.round.decoding)
        self.total = self.pool - owed * ratio
        self.now = float(self.pool)
        self.input = int(self.table.max_prefill_tokens)
        self.chunk = int(self.table.chunk_tokens) or _EVER
        self.more = self.page if self.table.page_overhead == "on" else 0
        self.charged = 0 if self.table.page_overhead == "off" else self.page
        self.members: Members = {}
        self.cut = -1

    def whole(self, tokens: int) -> int:
        """In whole pages."""
        return -(-tokens // self.page) * self.page

    def take(self, row: int, had: int, new: int) -> None:
        """So much of a prompt; if that is all, its whole output counts besides."""
        self.members[row] = had, new
        is_cut = had + new < self.ask.reached(row)
        self.cut = row if is_cut else self.cut
        output = 0 if is_cut else min(self.ask.longest(row) - self.ask.prompt(row), _COUNTED)
        taken = self.whole(new)
        self.total -= taken + output + self.charged
        self.now -= taken + self.charged
        self.input -= taken
        self.chunk -= taken

    def go_on(self, row: int) -> None:
        """The next piece, whatever is left."""
        had = self.book.running[row]
        most = min(self.chunk, int(self.total))
        room = self.pool + -had % self.page
        new = min(self.ask.reached(row) - had, most if most > 0 else self.chunk, room)
        if new > 0:
            self.take(row, had, new)

    def begin(self, row: int) -> str:
        """Take a request that waits; empty if another may be tried."""
        new = self.ask.reached(row)
        left = max(0, self.ask.longest(row) - new)
        if new + min(left, _COUNTED) + self.more >= self.total:
            return "full"
        has_input = not self.table.chunk_tokens or not self.more
        if has_input and self.whole(new) >= self.input and self.members:
            return "large"
        if self.whole(new) > self.chunk:
            new = self.chunk // self.page * self.page
        if new <= 0:
            return "large"
        self.take(row, 0, new)
        if self.total <= 0 or self.now <= 0:
            return "full"
        return "large" if self.input <= 0 or self.chunk <= 0 else ""


class _Choice:
    """The batch that is formed now."""

    def __init__(self, seat: Seat, book: Book, ask: Ask) -> None:
        self.seat, self.book, self.ask, self.table = seat, book, ask, seat.scheduler
        self.round = book.round
        self.first = min(0.7 * self.table.schedule_conservativeness, 1.0)
        if self.round.ratio < 0:
            self.round.ratio = self.first

    def merge(self) -> None:
        """The last prompts join those that decode."""
        turn, running = self.round, self.book.running
        if turn.prompts:
            joined = [row for row in turn.prompts if row in running and row != turn.cut]
            if len(joined) < len(turn.prompts) or not turn.decoding:
                turn.is_full = False
            turn.decoding = [*turn.decoding, *joined]
        turn.prompts = []

    def rest(self) -> None:
        """Nothing has run since the last batch."""
        self.round.ratio = self.first
        self.round.decoding = [row for row in self.round.decoding if row in self.book.running]
        self.round.is_full = self.round.is_full and bool(self.round.decoding)

    def due(self) -> Due:
        """Prompts, or a token for each that decodes."""
        turn, running = self.round, self.book.running
        if turn.cut >= 0 and turn.cut not in running:
            turn.cut, turn.is_full = -1, False
        elif turn.cut < 0 and not turn.decoding:
            turn.is_full = False
        if turn.cut >= 0 or (self.book.queue and not turn.is_full):
            members = self.prompts()
            if members:
                return Due(members)
        return self.decodes()

    def prompts(self) -> Members:
        """A batch of prompts, if any is taken."""
        turn, table = self.round, self.table
        places = table.requests_max - len(turn.decoding)
        if places <= 0 and (turn.cut >= 0) is (table.full_stops_chunks == "on"):
            turn.is_full = True
            return {}
        batch = _Prompts(self.seat, self.book, self.ask, turn.ratio)
        if turn.cut >= 0:
            batch.go_on(turn.cut)
            if not batch.members:
                return {}
        queue = list(self.book.queue)
        if table.schedule_policy == "lof":
            queue.sort(key=lambda row: self.ask.prompt(row) - self.ask.longest(row))
        for row in queue:
            if len(batch.members) >= places:
                turn.is_full = True
            if turn.is_full:
                break
            why = batch.begin(row)
            if why:
                turn.is_full = why == "full"
                break
        if batch.members:
            turn.prompts, turn.cut = list(batch.members), batch.cut
        return batch.members

    def decodes(self) -> Due:
        """All of the running batch; those with the fewest outputs go where pages lack."""
        turn, running, ask = self.round, self.book.running, self.ask
        alive = [row for row in turn.decoding if row in running]
        has_fallen = len(alive) < len(turn.decoding)
        gone: list[int] = []
        if alive and self.fits(alive, gone):
            least = 0.14 * self.first
            turn.ratio = max(turn.ratio - (self.first - least) / 600, least)
        elif alive:
            has_fallen = True
            made = {row: ask.reached(row) - ask.prompt(row) for row in alive}
            alive.sort(key=lambda row: (-made[row], ask.prompt(row)))
            while len(alive) > 1 and not (gone and self.fits(alive, gone)):
                gone.append(alive.pop())
            if not self.fits(alive, gone):
                gone.append(alive.pop())
            outputs = sum(made[row] for row in alive) + 20 * len(alive)
            most = sum(ask.longest(row) - ask.prompt(row) for row in alive)
            turn.ratio = min(1.0, outputs / (most + 1))
        turn.decoding = alive
        turn.is_full = turn.is_full and bool(alive) and not has_fallen
        return Due({row: (running[row], ask.reached(row) - running[row]) for row in alive}, gone)

    def fits(self, rows: Sequence[int], gone: Sequence[int]) -> bool:
        """A page more for each that has none left."""
        running, seat = self.book.running, self.seat
        held = sum(blocks_of(seat, had) for row, had in running.items() if row not in gone)
        page = int(seat.scheduler.block_size)
        return sum(running[row] % page == 0 for row in rows) <= seat.blocks - held


def due_of_sglang(seat: Seat, book: Book, ask: Ask, *, has_rested: bool) -> Due:
    """The batch that is formed now. `has_rested`: nothing ran just before."""
    choice = _Choice(seat, book, ask)
    choice.merge()
    if has_rested:
        choice.rest()
    due = choice.due()
    if not due.members:
        choice.rest()
        due = choice.due()
    return due


def wrong_in_sglang(
    seat: Seat, book: Book, ask: Ask, members: Members, preempted: Sequence[int], unseen: bool
) -> Iterator[str]:
    """What a batch should not be. `unseen`: what the engine may not have seen counts as well."""
    table = seat.scheduler
    begun = [row for row in members if row not in book.running]
    queue = [*book.queue, *book.unseen] if unseen else list(book.queue)
    if table.schedule_policy == "lof":
        queue.sort(key=lambda row: -(ask.longest(row) - ask.prompt(row)))
    looks_always = table.scheduler_recv_interval == 1
    is_known = table.schedule_policy in ("fcfs", "lof") and looks_always
    if is_known and sorted(begun) != sorted(queue[: len(begun)]):
        yield f"begins {begun}, first in the queue are {queue[: len(begun)]}"
    made = {row: ask.reached(row) - ask.prompt(row) for row in (*members, *preempted)}
    least = min((made[row] for row in members if row in book.running), default=0)
    for row in preempted:
        if made[row] > least + 1:  # one more or less than the engine knows of
            yield f"takes back row {row} with {made[row]} outputs, and keeps one with {least}"
    new = sum(tokens for _, tokens in members.values())
    is_prompt = any(tokens > 1 for _, tokens in members.values())
    if table.enable_mixed_chunk and table.chunk_tokens and is_prompt and new > table.chunk_tokens:
        yield f"has {new} tokens, chunked_prefill_size is {table.chunk_tokens}"
