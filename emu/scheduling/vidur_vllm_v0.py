"""`vllm_v0`: prompts first, in batches of their own; decodes when nobody can be admitted.

After Vidur's vLLM policy (the first generation of vLLM). A prompt runs whole. The cost of a
prompt batch is padded: members x longest prompt <= max_tokens_in_batch.

Repaired: a restarted request that has grown past max_tokens_in_batch is admitted alone (faithful
name `oversized_restart_blocks`: it fails); a new prompt beyond it is refused with a reason.
"""

from __future__ import annotations

from emu.request import Request
from emu.scheduling.simple import Plan
from emu.scheduling.vidur_paged import PagedScheduler


class VllmV0Scheduler(PagedScheduler):
    """Prefill-first batching with paged KV blocks."""

    policy = "vllm_v0"

    def never(self, request: Request) -> str:
        """Also a prompt that no batch can take."""
        if too_long := longer_than_batch(self, request):
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
            if self.running_count >= self.table.batch_size_cap:
                return
            if len(plan.chunks) >= self.micro_batch_max:
                return
            tokens = request.reached_tokens
            padded = (len(plan.chunks) + 1) * max(longest, tokens)
            fits = padded <= self.table.max_tokens_in_batch or (
                not plan.chunks and not longer_than_batch(self, request)
            )
            if fits and self.admissible(request):
                self.admit(request, self.blocks_for(request))
                plan.read(request, tokens)
                longest = max(longest, tokens)


def longer_than_batch(scheduler: PagedScheduler, request: Request) -> str:
    """Empty, or why `max_tokens_in_batch` keeps the request out for ever."""
    limit = scheduler.table.max_tokens_in_batch
    restarted = "oversized_restart_blocks" not in scheduler.table.faithful
    tokens = request.prompt_tokens if restarted else request.reached_tokens
    if tokens <= limit:
        return ""
    return f"prompt longer than max_tokens_in_batch {limit}"
