"""Counting a replica's KV blocks from scratch, to compare with the books.

Owns nothing; reads what it is given. Used by `recount` of the schedulers in tests and chaos runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.kv.blocks import BlockPool
from emu.kv.pool import CountingPool
from emu.request import Request
from emu.scheduling.handoff import Handoff
from emu.units import ceil_div


def check_blocks(
    pool: BlockPool | CountingPool,
    residents: Sequence[Request],
    handoff: Handoff,
    block_size: int,
) -> list[str]:
    """One line for each thing that is wrong. `residents` have exact counts and include the
    requests that arrived with their KV."""
    problems = [
        f"request {r.request_id}: {r.computed_tokens} tokens in {r.kv_blocks} blocks"
        for r in residents
        if r.kv_blocks < ceil_div(r.computed_tokens, block_size)
    ]
    if isinstance(pool, BlockPool):
        ids = [r.block_ids or [] for r in residents]
        problems += pool.recount(ids + handoff.block_lists())
        problems += [
            f"request {r.request_id}: {r.kv_blocks} blocks, {len(r.block_ids or [])} ids"
            for r in residents
            if r.kv_blocks != len(r.block_ids or [])
        ]
        return problems
    held = sum(r.kv_blocks for r in residents) + handoff.blocks_held()
    used = pool.blocks_total - pool.blocks_free
    if held != used:
        problems.append(f"{used} blocks used, counted {held}")
    return problems
