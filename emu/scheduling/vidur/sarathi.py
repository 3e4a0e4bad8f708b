"""`sarathi`: one token budget per iteration, shared by decodes and pieces of prompt.

After Sarathi-Serve as Vidur models it. Decodes come first and are never stalled by a prompt;
prompts under way continue with what the budget leaves; then new requests are admitted. A decode
is added even when the budget is used up.

Order inside a batch: decodes, continued prompts, new prompts. Faithful name
`sarathi_unsorted_victims`: the running list is not sorted before the victims are chosen.
"""

from __future__ import annotations

from emu.config.schema import (
    SarathiTable,
)
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.simple import Plan
from emu.scheduling.vidur.paged import PagedScheduler


class SarathiScheduler(PagedScheduler):
    """Chunked prefill with stall-free decodes."""

    def __init__(self, table: SarathiTable, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self.chunk_size = table.chunk_size
        self._sorts_first = "sarathi_unsorted_victims" not in table.faithful

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Decodes, then the prompts under way, then new ones."""
        if self._sorts_first:
            self.idle.sort(key=self.order_key)
        aside = self.place_decodes(plan)
        budget = self.chunk_size - len(plan.decodes)
        skipped = []
        for request in aside:
            piece = min(request.reached_tokens - request.computed_tokens, budget)
            if piece <= 0:
                skipped.append(request)
                continue
            plan.read(request, piece)
            budget -= piece
        self.idle = skipped + self.idle
        self.idle.sort(key=self.order_key)
        self._admit(plan, budget)

    def _admit(self, plan: Plan, budget: int) -> None:
        for request in self.candidates():
            if budget <= 0 or len(plan) >= self.micro_batch_max:
                return
            if self.running_count >= self.batch_size_cap:
                return
            if self.admissible(request):
                self.admit(request, self.blocks_for(request))
                piece = min(request.reached_tokens, budget)
                plan.read(request, piece)
                budget -= piece
