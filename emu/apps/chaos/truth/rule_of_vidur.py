"""Vidur's rules: which batch each of its schedulers forms of what waits and runs, on one stage.

Restates docs/lab/schedulers.md. Blocks on demand above a watermark (vllm_v0: prompts by
themselves, whose padded size has a limit; sarathi: decodes, then pieces of prompts within a
budget), the longest length from the start (orca: all that fits; faster_transformer: none joins a
batch under way), or tokens, looking ahead to all ends (lightllm: prompts every so many decodes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from emu.apps.chaos.truth.book import Ask, Book, Due, blocks_of
from emu.apps.chaos.truth.seats import Seat
from emu.config.schema import (
    FasterTransformerTable,
    LightLlmTable,
    OrcaTable,
    SarathiTable,
    VllmV0Table,
)


class _Batch:
    """A batch while it is formed."""

    def __init__(self, seat: Seat, book: Book, ask: Ask) -> None:
        self.seat, self.book, self.ask, self.table = seat, book, ask, seat.scheduler
        self.running = dict(book.running)
        """Tokens that are computed."""
        self.held = {
            row: blocks_of(seat, had if self.is_read(row) else ask.reached(row))
            for row, had in self.running.items()
        }
        """Blocks: a prompt has those of all that it will read."""
        self.members: dict[int, tuple[int, int]] = {}
        self.preempted: list[int] = []

    def is_read(self, row: int) -> bool:
        """Its prompt is computed, and all outputs but the last."""
        return self.book.running[row] >= self.ask.reached(row) - 1

    @property
    def free(self) -> int:
        """Blocks that nothing holds."""
        return self.seat.blocks - sum(self.held.values())

    @property
    def has_place(self) -> bool:
        """Another request may run."""
        return len(self.held) < int(self.table.batch_size_cap)

    def queue(self) -> list[int]:
        """What waits, behind what has just been preempted."""
        if self.table.order == "arrival":
            return [*reversed(self.preempted), *self.book.queue]
        return sorted([*self.book.queue, *self.preempted], key=self.ask.place)

    def place(self, row: int) -> tuple[int, ...]:
        """The order of what runs: of equals those come first that were admitted first."""
        return self.ask.place(row)[:2]

    def begin(self, row: int, tokens: int, blocks: int) -> None:
        """A request that waited."""
        self.members[row] = 0, tokens
        self.held[row] = blocks

    def fits(self, row: int) -> bool:
        """Its blocks are free above the watermark."""
        kept = int(self.table.watermark_blocks_fraction * self.seat.blocks)
        return self.free - blocks_of(self.seat, self.ask.reached(row)) >= kept

    def drop(self, row: int) -> None:
        """It starts over."""
        del self.held[row]
        self.preempted.append(row)

    def decode(self) -> list[int]:
        """A token for each, in order; where blocks lack the last ones go. Prompts are returned."""
        left, prompts = sorted(self.running, key=self.place), list[int]()
        while left and len(self.members) < int(self.table.batch_size_cap):
            row = left.pop(0)
            if not self.is_read(row):
                prompts.append(row)
                continue
            had = self.running[row]
            if blocks_of(self.seat, had + 1) > self.held[row]:
                while left and self.free <= 0:
                    self.drop(left.pop())
                if self.free <= 0:
                    self.drop(row)
                    break
                self.held[row] += 1
            self.members[row] = had, 1
        return prompts


def _vllm_v0(batch: _Batch) -> None:
    longest, most = 0, batch.table.max_tokens_in_batch
    for row in batch.queue():
        tokens = batch.ask.reached(row)
        longest = max(longest, tokens)
        is_alone = not batch.members and batch.ask.prompt(row) <= most
        is_small = (len(batch.members) + 1) * longest <= most or is_alone
        if not (is_small and batch.has_place and batch.fits(row)):
            break
        batch.begin(row, tokens, blocks_of(batch.seat, tokens))
    if not batch.members:
        batch.decode()


def _sarathi(batch: _Batch) -> None:
    prompts = batch.decode()
    left = batch.table.chunk_size - len(batch.members)
    for row in prompts:
        had = batch.running[row]
        piece = min(batch.ask.reached(row) - had, left)
        if piece > 0:
            batch.members[row] = had, piece
            left -= piece
    for row in batch.queue():
        is_full = len(batch.members) >= batch.table.batch_size_cap
        if left <= 0 or is_full or not (batch.has_place and batch.fits(row)):
            break
        reached = batch.ask.reached(row)
        piece = min(reached, left)
        batch.begin(row, piece, blocks_of(batch.seat, reached))
        left -= piece


def _run_on(batch: _Batch) -> None:
    """All that runs, with the longest length reserved."""
    each = batch.table.max_tokens // batch.table.block_size
    for row, had in batch.running.items():
        batch.held[row] = each
        batch.members[row] = had, batch.ask.reached(row) - had


def _join(batch: _Batch) -> None:
    each = batch.table.max_tokens // batch.table.block_size
    for row in batch.queue():
        if batch.free < each or not batch.has_place:
            break
        batch.begin(row, batch.ask.reached(row), each)


def _orca(batch: _Batch) -> None:
    _run_on(batch)
    _join(batch)


def _faster_transformer(batch: _Batch) -> None:
    _run_on(batch)
    if not batch.members:
        _join(batch)


def _lightllm(batch: _Batch) -> None:
    book, table = batch.book, batch.table
    if not batch.running:
        _admit(batch)
        if batch.members:
            book.held_back = 0
        return
    if book.held_back >= table.max_waiting_iters:
        book.held_back = 0
        _admit(batch)
        if batch.members:
            return
    rows = list(batch.running)
    lacking = [r for r in rows if blocks_of(batch.seat, batch.ask.reached(r)) > batch.held[r]]
    for row in sorted(rows, key=batch.place, reverse=True):
        if len(lacking) <= batch.free:
            break
        if row in lacking:
            lacking.remove(row)
        rows.remove(row)
        batch.drop(row)
    for row in rows:
        had = batch.running[row]
        batch.members[row] = had, batch.ask.reached(row) - had
    book.held_back += 1


def _admit(batch: _Batch) -> None:
    """Those that fit even when all reach the longest length that they may have."""
    seat, ask, table = batch.seat, batch.ask, batch.table
    size, read = int(table.block_size), 0
    ends = [(ask.reached(r), max(0, ask.longest(r) - ask.reached(r) - 1)) for r in batch.running]
    for row in batch.queue():
        tokens = ask.reached(row)
        mine = tokens + 1, max(0, ask.longest(row) - tokens - 2)
        is_alone = not batch.members and ask.prompt(row) <= table.max_tokens_in_batch
        is_small = read + tokens <= table.max_tokens_in_batch or is_alone
        is_small = is_small and blocks_of(seat, tokens) <= batch.free and batch.has_place
        if not is_small or _peak([*ends, mine], size - 1) >= seat.blocks * size:
            break
        ends.append(mine)
        read += tokens
        batch.begin(row, tokens, blocks_of(seat, tokens))


def _peak(ends: list[tuple[int, int]], more: int) -> int:
    """Most tokens held at once, where each frees what it holds when it has taken what is left."""
    lefts = {left for _, left in ends}
    return max(sum(held + more + left for held, own in ends if own >= left) for left in lefts)


_RULES: Final[Mapping[type, Callable[[_Batch], None]]] = MappingProxyType(
    {
        VllmV0Table: _vllm_v0,
        SarathiTable: _sarathi,
        OrcaTable: _orca,
        FasterTransformerTable: _faster_transformer,
        LightLlmTable: _lightllm,
    }
)
VIDUR: Final = tuple(_RULES)
"""Tables of the schedulers that are restated."""


def due_of_vidur(seat: Seat, book: Book, ask: Ask) -> Due:
    """The batch that is formed now."""
    batch, rule = _Batch(seat, book, ask), _RULES[type(seat.scheduler)]
    rule(batch)
    while batch.preempted and not batch.members and len(batch.running) > len(batch.held):
        batch.running = {row: batch.running[row] for row in batch.held}
        rule(batch)  # the last one has started over, and another may fit
    return Due(batch.members, batch.preempted)
