"""`orca`: the longest sequence is reserved at admission.

`MaxReservation` holds max_tokens // block_size blocks for each request from its admission to its
end, so that memory can never run out later. `orca` mixes whole prompts and decodes freely in
every iteration: running requests first, in the order in which batches returned them, then
arrivals. No token limit, no eviction. batch_size_cap holds per micro-batch, so S pipeline stages
can hold S times as many requests.
"""

from __future__ import annotations

from emu.config.schema import (
    ReservedTable,
)
from emu.errors import InputError
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.simple import UNLIMITED, Plan, SimpleScheduler
from emu.units import ceil_div


class MaxReservation(SimpleScheduler):
    """Every admitted request holds the blocks of `max_tokens` tokens."""

    orders_idle = True
    grows = False

    def __init__(self, table: ReservedTable, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self.batch_size_cap = table.batch_size_cap
        self.blocks_per_sequence = table.max_tokens // limits.block_size
        if self.blocks_per_sequence < 1:
            problem = f"{table.max_tokens} tokens are less than one block of {limits.block_size}"
            raise InputError("[scheduler]", None, "max_tokens", problem)

    def blocks_for(self, request: Request) -> int:
        """The same for all, but for KV that comes from elsewhere and is longer."""
        written = request.prompt_tokens + request.max_output_tokens - 1
        return max(self.blocks_per_sequence, ceil_div(written, self.block_size))

    def never(self, request: Request) -> str:
        """The declared limit must fit into the reservation, and one reservation into the pool."""
        if self.blocks_per_sequence > self.blocks_total:
            return (
                f"one reservation takes {self.blocks_per_sequence} KV blocks, "
                f"the replica has {self.blocks_total}"
            )
        return self._exceeds_reservation(request)

    def _exceeds_reservation(self, request: Request) -> str:
        # The last output token is never written to the cache.
        written = request.prompt_tokens + request.max_output_tokens - 1
        held = self.blocks_per_sequence * self.block_size
        if written > held:
            return f"longer than the {held} tokens reserved per request (max_tokens)"
        return ""

    def admit_whole_prompts(self, plan: Plan) -> None:
        """Head of the queue first, while the batch and the pool have room."""
        for request in self.candidates():
            if len(plan) >= self.batch_size_cap:
                return
            if self.free_blocks < self.blocks_per_sequence:
                return
            if not self._exceeds_reservation(request):
                self.admit(request, self.blocks_per_sequence)
                plan.read(request, request.reached_tokens)

    def leap_limit(self, plan: Plan) -> int:
        """Nothing is taken while no request leaves, so admission stays as it is."""
        return UNLIMITED

    def would_admit(self, batch: Batch) -> bool:
        """True if the batch and the pool have room for one more."""
        if not self.waiting_count or self.free_blocks < self.blocks_per_sequence:
            return False
        return batch.shape.sequences < self.batch_size_cap


class OrcaScheduler(MaxReservation):
    """Iteration-level scheduling with reserved memory."""

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Running requests, then new ones."""
        cap = self.batch_size_cap
        for request in self.idle[:cap]:
            if request.request_id in self._prefilling:
                plan.read(request, request.reached_tokens - request.computed_tokens)
            else:
                plan.decodes.append(request)
        self.idle = self.idle[cap:]
        self.admit_whole_prompts(plan)
