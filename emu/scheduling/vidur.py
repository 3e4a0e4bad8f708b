"""Schedulers of Vidur's: vllm_v0, sarathi, orca, lightllm, faster_transformer.

Each is one policy on top of `simple.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from emu.config.schema import (
    FasterTransformerTable,
    LightLlmTable,
    PagedTable,
    ReservedTable,
    SarathiTable,
    VllmV0Table,
)
from emu.errors import InputError
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.simple import UNLIMITED, Plan, SimpleScheduler
from emu.units import ceil_div

# --------------------------------------------------------------------------------------------------
# Reservation of the longest sequence at admission, and `orca` on top of it.
#
# `MaxReservation` holds max_tokens // block_size blocks for each request from its admission to its
# end, so that memory can never run out later. `orca` mixes whole prompts and decodes freely in
# every iteration: running requests first, in the order in which batches returned them, then
# arrivals. No token limit, no eviction. batch_size_cap holds per micro-batch, so S pipeline stages
# can hold S times as many requests.


class MaxReservation(SimpleScheduler):
    """Every admitted request holds the blocks of `max_tokens` tokens."""

    orders_idle = True
    grows = False

    def __init__(
        self, table: ReservedTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
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


# --------------------------------------------------------------------------------------------------
# `faster_transformer`: static batches.
#
# Requests are admitted together, with their longest length reserved, and stay together: the next
# admission comes when every member has ended. Members that end early drop out of the iterations
# (no padding is charged), but their reservation is given back only when the batch ends. With S
# pipeline stages up to S static batches take turns.
#
# Faithful name `ft_leak`: the reservations of early finishers are never given back.


class StaticBatch(msgspec.Struct, eq=False):
    """Requests that were admitted together."""

    members: list[Request]
    """Those that have not ended."""
    blocks_held: int = 0
    """Reservations of those that have."""


class FasterTransformerScheduler(MaxReservation):
    """Request-level batching: no request joins a batch under way."""

    def __init__(
        self, table: FasterTransformerTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
        self._leaks = "ft_leak" in table.faithful
        self._blocks_leaked = 0
        self._ready: deque[StaticBatch] = deque()
        self._static: dict[int, StaticBatch] = {}
        """Every unfinished static batch by the id of each of its members."""

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """The next iteration of a static batch that waits for one, or a new static batch."""
        if self._ready:
            group = self._ready.popleft()
            for request in group.members:
                if request.request_id in self._prefilling:
                    plan.read(request, request.reached_tokens - request.computed_tokens)
                else:
                    plan.decodes.append(request)
            return
        self.admit_whole_prompts(plan)
        group = StaticBatch([chunk.request for chunk in plan.chunks])
        for request in group.members:
            self._static[request.request_id] = group

    def leap_limit(self, plan: Plan) -> int:
        """The static batch goes on alone until a member ends, unless others take turns."""
        return 1 if self._ready else super().leap_limit(plan)

    def would_admit(self, batch: Batch) -> bool:
        """No request joins a static batch under way."""
        return False

    def evacuate(self) -> list[Request]:
        """See `Scheduler.evacuate`."""
        self._ready.clear()
        self._static.clear()
        self._blocks_leaked = 0
        return super().evacuate()

    # --- hooks -----------------------------------------------------------------
    def _return(self, members: list[Request]) -> None:
        # All members of a batch belong to one static batch.
        self._ready.append(self._static[members[0].request_id])

    def _retire(self, finished: list[Request]) -> None:
        group = self._static[finished[0].request_id]
        for request in finished:
            self._leave(group, request)
            group.blocks_held += request.kv_blocks
            request.kv_blocks = 0
        if group.members and self._leaks:
            self._blocks_leaked += group.blocks_held
            group.blocks_held = 0
        self._dissolve_if_over(group)

    def _welcome(self, requests: Sequence[Request]) -> None:
        group = StaticBatch(list(requests))
        for request in requests:
            self._static[request.request_id] = group
        self._ready.append(group)

    def _drop_idle(self, request: Request) -> bool:
        group = self._static[request.request_id]
        idle = group in self._ready
        self._leave(group, request)
        self._dissolve_if_over(group)
        return idle

    def _idle_ids(self) -> list[int]:
        return [request.request_id for group in self._ready for request in group.members]

    def _other_blocks(self) -> int:
        groups = dict.fromkeys(self._static.values())
        return sum(group.blocks_held for group in groups) + self._blocks_leaked

    def _leave(self, group: StaticBatch, request: Request) -> None:
        del self._static[request.request_id]
        group.members.remove(request)

    def _dissolve_if_over(self, group: StaticBatch) -> None:
        if group.members:
            return
        self.pool.put_back(group.blocks_held, [])
        group.blocks_held = 0
        if group in self._ready:
            self._ready.remove(group)


# --------------------------------------------------------------------------------------------------
# `lightllm`: admission by the peak of memory to come; prompts every few decodes.
#
# A prompt batch is tried when nothing runs, and again after every max_waiting_iters decodes. A
# request is admitted if the peak of tokens held, should every request run to its declared limit,
# stays below the pool. Memory is counted in tokens; with blocks larger than one token each request
# is charged up to block_size - 1 tokens more.
#
# Where the peer stops with an error because the next decode finds too few free blocks (a KV
# reservation came in between), the latest arrivals pause as in LightLLM itself: their KV is
# dropped, and they go back to the head of the queue.
#
# Like the peer's, the test over-counts by one token per request. A restarted request longer than
# max_tokens_in_batch is admitted alone (faithful name `oversized_restart_blocks`: it fails).

HeldLeft = tuple[int, int]
"""Tokens that a request holds, and tokens that it may still take."""


class LightLlmScheduler(SimpleScheduler):
    """Token-level admission that looks ahead to every request's declared end."""

    orders_idle = True

    def __init__(
        self, table: LightLlmTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
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

    # --- inside -----------------------------------------------------------------------------
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


# --------------------------------------------------------------------------------------------------
# Blocks on demand with a watermark, and eviction: what vllm_v0 and sarathi share.
#
# Admission takes the blocks of the whole prompt and must leave the watermark free. A running
# request takes one more block when the token that it is about to write does not fit; if none is
# free, the last of the idle requests is evicted and starts over from the head of the queue. A
# request with no other behind it evicts itself.
#
# Faithful names: `evict_without_need`, `restart_rewrites_lengths`, `sarathi_partial_restart`.


class PagedScheduler(SimpleScheduler):
    """Incremental allocation with a watermark; no admission policy of its own."""

    orders_idle = True

    def __init__(
        self, table: PagedTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
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


# --------------------------------------------------------------------------------------------------
# `sarathi`: one token budget per iteration, shared by decodes and pieces of prompt.
#
# After Sarathi-Serve as Vidur models it. Decodes come first and are never stalled by a prompt;
# prompts under way continue with what the budget leaves; then new requests are admitted. A decode
# is added even when the budget is used up.
#
# Order inside a batch: decodes, continued prompts, new prompts. Faithful name
# `sarathi_unsorted_victims`: the running list is not sorted before the victims are chosen.


class SarathiScheduler(PagedScheduler):
    """Chunked prefill with stall-free decodes."""

    def __init__(
        self, table: SarathiTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
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


# --------------------------------------------------------------------------------------------------
# `vllm_v0`: prompts first, in batches of their own; decodes when no request can be admitted.
#
# After Vidur's vLLM policy (the first generation of vLLM). A prompt runs whole. The cost of a
# prompt batch is padded: members x longest prompt <= max_tokens_in_batch.
#
# Repaired: a restarted request that has grown past max_tokens_in_batch is admitted alone (faithful
# name `oversized_restart_blocks`: it fails); a new prompt beyond it is refused with a reason.


class VllmV0Scheduler(PagedScheduler):
    """Prefill-first batching with paged KV blocks."""

    def __init__(
        self, table: VllmV0Table, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
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
