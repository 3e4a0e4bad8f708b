"""Taking KV blocks out of a replica's pool while it runs, and giving them back (a fault).

Only free blocks can be taken; who wants more frees some first. The lost blocks count neither as
used nor as free: `blocks_total` is what is left. A crash gives them all back (`restore`).
"""

from __future__ import annotations

from emu.scheduling.base import Scheduler
from emu.scheduling.books import ReplicaBooks
from emu.scheduling.steps import CohortScheduler


def can_shrink(scheduler: Scheduler) -> bool:
    """False for a plug-in scheduler with a pool of its own."""
    return isinstance(scheduler, (CohortScheduler, ReplicaBooks))


def take_away(scheduler: Scheduler, blocks: int) -> int:
    """Take so many free blocks out of the pool, or as many as are free; how many."""
    taken = min(blocks, scheduler.blocks_total - scheduler.blocks_used)
    if taken <= 0:
        return 0
    if isinstance(scheduler, CohortScheduler):
        scheduler._handoff.lost.append((taken, scheduler.pool.take(taken)))
    scheduler.blocks_total -= taken
    return taken


def restore(scheduler: Scheduler) -> None:
    """All lost blocks are free again."""
    if isinstance(scheduler, CohortScheduler):
        for blocks, ids in scheduler._handoff.lost:
            scheduler.pool.put_back(blocks, ids)
        scheduler._handoff.lost.clear()
        scheduler.blocks_total = scheduler.limits.num_blocks
    elif isinstance(scheduler, ReplicaBooks):
        scheduler.blocks_total = scheduler.limits.num_blocks
