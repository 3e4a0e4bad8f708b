"""Blocks on demand with a watermark, and eviction: what vllm_v0 and sarathi share.

Admission takes the blocks of the whole prompt and must leave the watermark free. A running
request takes one more block when the token that it is about to write does not fit; if none is
free, the last of the idle requests is evicted and starts over from the head of the queue. A
request with no other behind it evicts itself.

Faithful names: `evict_without_need`, `restart_rewrites_lengths`, `sarathi_partial_restart`.
"""

from __future__ import annotations

from emu.config.schema import (
    PagedTable,
)
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.simple import UNLIMITED, Plan, SimpleScheduler


class PagedScheduler(SimpleScheduler):
    """Incremental allocation with a watermark; no admission policy of its own."""

    orders_idle = True

    def __init__(self, table: PagedTable, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self.watermark_blocks = int(table.watermark_blocks_fraction * limits.num_blocks)
        self.batch_size_cap = table.batch_size_cap
        self.micro_batch_max = max(1, table.batch_size_cap // limits.pipeline_stages)
        self._block_always = "evict_without_need" in table.faithful
        self._rewrite_all = "restart_rewrites_lengths" in table.faithful
        self._rewrite_partial = self._rewrite_all or "sarathi_partial_restart" in table.faithful
        self._self_evicted: Request | None = None

    def never(self, request: Request) -> str:
        """The watermark must stay free too, even when all else is."""
        if self.blocks_for(request) + self.watermark_blocks > self.blocks_total:
            mark = f" ({self.watermark_blocks} kept free)" if self.watermark_blocks else ""
            return f"needs more than the replica's {self.blocks_total} KV blocks{mark}"
        if request is self._self_evicted and not self.blocks_used:
            return f"outgrew the replica's {self.blocks_total} KV blocks and evicted itself"
        return ""

    def admissible(self, request: Request) -> bool:
        """The blocks of everything that it has reached are free above the watermark."""
        return self.free_blocks - self.blocks_for(request) >= self.watermark_blocks

    def leap_limit(self, plan: Plan) -> int:
        """Free blocks only shrink while no request leaves: one refused now is refused later."""
        return UNLIMITED

    def would_admit(self, batch: Batch) -> bool:
        """Only a place and blocks count, as at the end of an iteration."""
        if not self.waiting_count or self.running_count >= self.batch_size_cap:
            return False
        return self.table.skip_blocked or self.admissible(self.ledger.queue.head())

    def stalls(self) -> bool:
        """With `evict_without_need`, a request that has just evicted itself stays where it is."""
        return bool(self.ledger.queue.count) and self.ledger.queue.head() is self._self_evicted

    def spare_blocks(self) -> int:
        """With `evict_without_need` the last free block must stay free."""
        return self.free_blocks - self._block_always

    def place_decodes(self, plan: Plan) -> list[Request]:
        """Front to back, put idle requests into the plan as decodes, evicting from the back.

        Those whose prompt is unfinished are set aside (out of reach of eviction) and returned.
        What is left of `idle` are the requests that were not looked at.
        """
        idle, pool = self.idle, self.pool
        prefilling = self._prefilling
        block_size = self.block_size
        aside: list[Request] = []
        at, end = 0, len(idle)
        while at < end and len(plan.decodes) < self.micro_batch_max:
            request = idle[at]
            at += 1
            if prefilling and request.request_id in prefilling:
                aside.append(request)
                continue
            tokens = request.prompt_tokens + request.generated_tokens
            needs = tokens > request.kv_blocks * block_size
            if needs or self._block_always:
                while pool.blocks_free <= 0 and at < end:
                    end -= 1
                    self._restart(idle[end])
                if pool.blocks_free <= 0:
                    self._restart(request)
                    self._note_self_eviction(request)
                    break
            if needs:
                request.kv_blocks += 1
                pool.blocks_free -= 1
            plan.decodes.append(request)
        self.idle = idle[at:end]
        return aside

    def admit(self, request: Request, blocks: int) -> None:
        """See `SimpleScheduler.admit`."""
        if request is self._self_evicted:
            self._self_evicted = None
        super().admit(request, blocks)

    def _note_self_eviction(self, request: Request) -> None:
        # Repaired, a lone request evicts itself only when it is larger than the pool, which
        # `never` sees by itself. The peer's rule also evicts one that would fit again, and has
        # no event left to look at it: the stall becomes a failure.
        if self._block_always:
            self._self_evicted = request

    def _lose_progress(self, victim: Request) -> None:
        partial = victim.request_id in self._prefilling
        processed = victim.computed_tokens if partial else victim.reached_tokens
        super()._lose_progress(victim)
        if self._rewrite_all or (partial and self._rewrite_partial):
            moved = processed - victim.prompt_tokens
            victim.prompt_tokens += moved
            victim.output_tokens -= moved
            victim.max_output_tokens -= moved
            victim.generated_tokens = 0
