"""`lightllm`: admission by the peak of memory to come; prompts every few decodes.

A prompt batch is tried when nothing runs, and again after every max_waiting_iters decodes. A
request is admitted if the peak of tokens held, should every request run to its declared limit,
stays below the pool. Memory is counted in tokens; with blocks larger than one token each request
is charged up to block_size - 1 tokens more.

Where the peer stops with an error because the next decode finds too few free blocks (a KV
reservation came in between), the latest arrivals pause as in LightLLM itself: their KV is
dropped, and they go back to the head of the queue.

Like the peer's, the test over-counts by one token per request. A restarted request longer than
max_tokens_in_batch is admitted alone (faithful name `oversized_restart_blocks`: it fails).
"""

from __future__ import annotations

from collections.abc import Iterable

from emu.config.schema import (
    LightLlmTable,
)
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.simple import UNLIMITED, Plan, SimpleScheduler

HeldLeft = tuple[int, int]
"""Tokens that a request holds, and tokens that it may still take."""


class LightLlmScheduler(SimpleScheduler):
    """Token-level admission that looks ahead to every request's declared end."""

    orders_idle = True

    def __init__(self, table: LightLlmTable, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self.micro_batch_max = max(1, table.batch_size_cap // limits.pipeline_stages)
        self.batch_size_cap = table.batch_size_cap
        self.max_tokens_in_batch = table.max_tokens_in_batch
        self.max_waiting_iters = table.max_waiting_iters
        self._waiting_iters = 0
        self._restart_alone = "oversized_restart_blocks" not in table.faithful

    def never(self, request: Request) -> str:
        """The whole request must fit into an empty pool, its prompt into one batch."""
        if self._longer_than_batch(request):
            return f"prompt longer than max_tokens_in_batch {self.max_tokens_in_batch}"
        capacity = self.blocks_total * self.block_size
        if peak_tokens([_held_left_waiting(request)], self.block_size - 1) >= capacity:
            return f"could hold more than the replica's {capacity} tokens"
        return ""

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Prompts if nothing runs or it is their turn, else one token for each running request."""
        if not self.idle:
            self._admit(plan)
            if plan.chunks:
                self._waiting_iters = 0
            return
        if self._waiting_iters >= self.max_waiting_iters:
            self._waiting_iters = 0
            self._admit(plan)
            if plan.chunks:
                return
        self._decode(plan)

    def leap_limit(self, plan: Plan) -> int:
        """Steps until the queue's next turn; no limit if it is empty or the cap is reached."""
        if not self.waiting_count or self.running_count >= self.batch_size_cap:
            return UNLIMITED
        # This decode has been counted; it and those up to the limit form no prompt batch.
        return 1 + self.max_waiting_iters - self._waiting_iters

    def would_admit(self, batch: Batch) -> bool:
        """The queue's next turn may fall into the leap, unless the cap keeps all requests out."""
        return self.waiting_count > 0 and self.running_count < self.batch_size_cap

    def on_steps(self, steps: int) -> None:
        """The counter as if every step had been formed: 1..max_waiting_iters, then 1 again."""
        self._waiting_iters = (self._waiting_iters - 1 + steps) % self.max_waiting_iters + 1

    def evacuate(self) -> list[Request]:
        """See `Scheduler.evacuate`."""
        self._waiting_iters = 0
        return super().evacuate()

    def _admit(self, plan: Plan) -> None:
        if not self.waiting_count:
            return
        held_left = [self._held_left(request) for request in self._residents.values()]
        in_transit = self.ledger.blocks_in_transit
        capacity = (self.blocks_total - in_transit) * self.block_size
        read = 0
        for request in self.candidates():
            if self.running_count >= self.batch_size_cap:
                return
            if len(plan.chunks) >= self.micro_batch_max:
                return
            tokens = request.reached_tokens
            alone = not plan.chunks and not self._longer_than_batch(request)
            if read + tokens > self.max_tokens_in_batch and not alone:
                continue
            candidate = _held_left_waiting(request)
            if peak_tokens([*held_left, candidate], self.block_size - 1) >= capacity:
                continue
            if self.blocks_for(request) > self.free_blocks:
                continue
            held_left.append(candidate)
            self.admit(request, self.blocks_for(request))
            plan.read(request, tokens)
            read += tokens

    def _decode(self, plan: Plan) -> None:
        """All idle requests, less the latest arrivals if the pool cannot take all."""
        block_size = self.block_size
        needy = [r for r in self.idle if r.reached_tokens > r.kv_blocks * block_size]
        if len(needy) > self.free_blocks:
            self._pause_latest()
            needy = [r for r in self.idle if r.reached_tokens > r.kv_blocks * block_size]
        for request in needy:
            request.kv_blocks += 1
        self.pool.take(len(needy))
        for request in self.idle:
            if request.request_id in self._prefilling:
                plan.read(request, request.reached_tokens - request.computed_tokens)
            else:
                plan.decodes.append(request)
        self.idle = []
        self._waiting_iters += 1

    def _pause_latest(self) -> None:
        """Evict from the latest arrival on until every idle request gets its next block."""
        block_size = self.block_size
        lacking = sum(r.reached_tokens > r.kv_blocks * block_size for r in self.idle)
        for victim in sorted(self.idle, key=self.order_key, reverse=True):
            if lacking <= self.free_blocks:
                return
            lacking -= victim.reached_tokens > victim.kv_blocks * block_size
            self.preempt(victim)

    def _held_left(self, request: Request) -> HeldLeft:
        if request.request_id in self._prefilling:
            return _held_left_waiting(request)
        left = request.max_output_tokens - request.generated_tokens - 1
        return request.reached_tokens, max(0, left)

    def _longer_than_batch(self, request: Request) -> bool:
        tokens = request.prompt_tokens if self._restart_alone else request.reached_tokens
        return tokens > self.max_tokens_in_batch


def _held_left_waiting(request: Request) -> HeldLeft:
    """Tokens left after its prompt, which brings one token with it."""
    left = request.max_output_tokens - request.generated_tokens - 2
    return request.reached_tokens + 1, max(0, left)


def peak_tokens(held_left: Iterable[HeldLeft], rounding: int = 0) -> int:
    """Most tokens ever held at once, if each request takes all it may and then frees everything.

    The request with most left ends last. When the i-th from the end ends, the i that are still
    there have each taken as much as it had left. `rounding` tokens are added per request.
    """
    peak = held_sum = 0
    ordered = sorted(held_left, key=lambda pair: -pair[1])
    for count, (held, left) in enumerate(ordered, start=1):
        held_sum += held + rounding
        peak = max(peak, left * count + held_sum)
    return peak
