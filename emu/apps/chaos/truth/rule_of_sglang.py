"""SGLang's rules: which request begins first, which is taken back, how large a mixed batch may be.

Restates docs/lab/schedulers.md: the queue is in the order in which requests came here (those that
were taken back stand at its end), or longest output first; a batch takes the first ones of it.
An engine that looks for new requests now and then only has a queue that is not known here. Where
pages lack, those with the fewest outputs are taken back. Decodes of a mixed batch count in
its chunk. How many may begin is held against other sources (tests/scheduling).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emu.apps.chaos.truth.book import Ask, Book, Members
from emu.apps.chaos.truth.seats import Seat


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
