"""vLLM's rule: which batch is formed of what waits and runs.

Restates docs/lab/schedulers.md: one budget of tokens; first all that runs, in order of admission,
where blocks lack the one admitted last starts over; then, if none did, the queue, whose head blocks
the rest.
"""

from __future__ import annotations

from emu.apps.chaos.truth.book import Ask, Book, Due, blocks_of
from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import keys_of


def due_of_vllm(seat: Seat, book: Book, ask: Ask) -> Due:
    """The batch that is formed now."""
    table, due = seat.scheduler, Due()
    computed = dict(book.running)
    held = [*book.leaving.values(), *computed.values()]
    free = seat.blocks - sum(blocks_of(seat, tokens) for tokens in held)
    left = table.tokens_max
    threshold = keys_of(table).get("long_prefill_token_threshold") or left
    for row in list(computed):
        if row not in computed:
            continue
        new = min(ask.reached(row) - computed[row], threshold, left)
        if not new:
            break
        lacks = blocks_of(seat, computed[row] + new) - blocks_of(seat, computed[row])
        while lacks > free and row in computed:
            last = next(reversed(computed))
            free += blocks_of(seat, computed.pop(last))
            due.preempted.append(last)
        if row not in computed:
            break
        due.members[row] = computed[row], new
        computed[row] += new
        free -= lacks
        left -= new
    if due.preempted and (computed or due.members):
        return due
    waiting = [*reversed(due.preempted), *book.queue]
    places = table.requests_max - len(computed) - len(book.leaving)
    for row in waiting[: max(0, places)]:
        reached = ask.reached(row)
        new = min(reached, threshold, left)
        is_cut = new < min(reached, threshold)
        wanted = blocks_of(seat, reached if table.reserve_full_sequence else new)
        if not left or wanted > free or (is_cut and not table.chunked_prefill):
            break
        due.members[row] = 0, new
        free -= blocks_of(seat, new)
        left -= new
    return due
