"""`vllm_v0`: prompts first, in batches of their own; decodes when no request can be admitted.

After Vidur's vLLM policy (the first generation of vLLM). A prompt runs whole. The cost of a
prompt batch is padded: members x longest prompt <= max_tokens_in_batch.

Repaired: a restarted request that has grown past max_tokens_in_batch is admitted alone (faithful
name `oversized_restart_blocks`: it fails); a new prompt beyond it is refused with a reason.
"""

from __future__ import annotations

from emu.config.schema import (
    VllmV0Table,
)
from emu.request import Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.simple import Plan
from emu.scheduling.vidur.paged import PagedScheduler


class VllmV0Scheduler(PagedScheduler):
    """Prefill-first batching with paged KV blocks."""

    def __init__(self, table: VllmV0Table, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self.max_tokens_in_batch = table.max_tokens_in_batch
        self._restart_alone = "oversized_restart_blocks" not in table.faithful

    def never(self, request: Request) -> str:
        """A prompt that no batch can take never fits."""
        if too_long := self._longer_than_batch(request):
            return too_long
        return super().never(request)

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Admit what fits; if nothing does, decode in order of arrival."""
        self._admit(plan)
        if not plan.chunks:
            self.idle.sort(key=self.order_key)
            self.place_decodes(plan)

    def _admit(self, plan: Plan) -> None:
        longest = 0
        for request in self.candidates():
            if self.running_count >= self.batch_size_cap:
                return
            if len(plan.chunks) >= self.micro_batch_max:
                return
            tokens = request.reached_tokens
            padded = (len(plan.chunks) + 1) * max(longest, tokens)
            fits = padded <= self.max_tokens_in_batch or (
                not plan.chunks and not self._longer_than_batch(request)
            )
            if fits and self.admissible(request):
                self.admit(request, self.blocks_for(request))
                plan.read(request, tokens)
                longest = max(longest, tokens)

    def _longer_than_batch(self, request: Request) -> str:
        """Empty, or why `max_tokens_in_batch` keeps the request out forever."""
        limit = self.max_tokens_in_batch
        tokens = request.prompt_tokens if self._restart_alone else request.reached_tokens
        return "" if tokens <= limit else f"prompt longer than max_tokens_in_batch {limit}"
