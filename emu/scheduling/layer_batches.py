"""Batches of whole prompts that are computed layer by layer, and handed from replica to replica.

Live scaling (BlitzScale section 4) runs several prefill batches of one replica layer by layer,
and lets another replica finish them. The scheduler that this works with is `fcfs` with the
global queue: it forms batches of whole prompts and reserves their blocks at once. These functions
are what it needs beyond its protocol: batches in flight whose order nothing depends on, and a
batch that changes its replica in the middle.

Blocks: a batch that leaves with layers done keeps its blocks here until its half of the KV has
left (`hold`); one that leaves with nothing done frees them. The taker reserves before anything
is handed over, so that its use can never exceed its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from emu.request import Request
from emu.scheduling.base import Batch, Scheduler
from emu.scheduling.fcfs import FcfsScheduler


def can_relay(scheduler: Scheduler) -> TypeGuard[FcfsScheduler]:
    """Whether live scaling works with this scheduler."""
    return isinstance(scheduler, FcfsScheduler) and scheduler.is_shared


def pull(scheduler: FcfsScheduler, now_ns: int) -> Batch | None:
    """Take a batch from the global queue and charge its blocks; None if nothing fits."""
    table = scheduler.settings
    prompts = scheduler.prompts.next_batch(
        table.max_batch_prefill_tokens,
        table.request_token_budget,
        scheduler.pool.blocks_free,
        scheduler.block_size,
    )
    return scheduler.form_prefill(prompts, now_ns) if prompts else None


def members(scheduler: FcfsScheduler, batch: Batch) -> list[Request]:
    """Requests of a batch in flight that have not been cancelled."""
    return [
        running.request
        for running, _, _ in scheduler.running.records[batch.batch_id]
        if running.is_alive
    ]


def in_flight(scheduler: FcfsScheduler, batch: Batch) -> list[Request]:
    """The same, or nothing if the batch is not in flight here any more (a crash)."""
    return members(scheduler, batch) if batch.batch_id in scheduler.running.records else []


def can_take_over(scheduler: FcfsScheduler, requests: Sequence[Request]) -> bool:
    """Whether the blocks of these requests are free here."""
    return sum(map(scheduler.blocks_for, requests)) <= scheduler.pool.blocks_free


def hand_out(scheduler: FcfsScheduler, batch: Batch, *, hold: bool) -> list[Request]:
    """A batch in flight leaves; its requests. `hold`: their blocks stay until `release`."""
    leaving = members(scheduler, batch)
    for request in leaving:
        if hold:
            scheduler.detach(request)
        else:
            scheduler.cancel(request)
            request.computed_tokens = 0
    del scheduler.running.records[batch.batch_id]
    return leaving


def take_over(scheduler: FcfsScheduler, requests: Sequence[Request], now_ns: int) -> Batch:
    """Requests of another replica are in flight here; `can_take_over` has been asked."""
    scheduled = [(r, r.prefill_scheduled_ns) for r in requests]
    batch = scheduler.form_prefill(requests, now_ns)
    for request, first_ns in scheduled:
        request.prefill_scheduled_ns = first_ns
    return batch


def drop(scheduler: FcfsScheduler, batch: Batch) -> None:
    """A batch in flight without members is no longer."""
    scheduler.running.records.pop(batch.batch_id, None)
