"""How long vLLM's next batches are certain: the promises behind decode leaps.

Base of `VllmScheduler`, which forms the batches; decides nothing about the one in hand. A promise
is the number of steps, the one in flight included, in which nobody ends, nobody can be admitted
and no block can be lacking. Whoever changes the books asks whether it still holds (`leap_holds`).

Also here: whether a batch that ends prompts runs on. With nobody waiting, the batches after it
are a decode run of its members, and there is no need to come back for that when the prompts end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.config.schema import SchedulerTable
from emu.kv.blocks import BlockPool
from emu.kv.pool import NO_HIT, Hit
from emu.kv.tiers import LowerTier
from emu.latency.base import BatchShape
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits, RunOn
from emu.scheduling.shape import add_chunk
from emu.scheduling.steps import CohortScheduler
from emu.scheduling.waiting import arrival_order
from emu.units import ceil_div

FREE: Final = 0
"""Nobody waits, or the queue was served as far as the budget goes."""
BLOCKED_FOR_GOOD: Final = 1
"""The head waits for a seat or for budget: decoding alone cannot change that."""
BLOCKED_BY_KV: Final = 2
"""The head waits for blocks (or needs a shorter remainder): a longer prefix hit may help."""

UNLIMITED: Final = 1 << 62
NOBODY: Final = (UNLIMITED << 1, 0)
"""The arrival order of nobody: behind everybody's."""


class VllmLeaps(CohortScheduler):
    """What the next batches of one replica will certainly be."""

    def __init__(
        self,
        table: SchedulerTable,
        limits: ReplicaLimits,
        *,
        preemptions_max: int = 0,
        tiers: Sequence[LowerTier] = (),
    ) -> None:
        """As for `CohortScheduler`."""
        super().__init__(table, limits, preemptions_max=preemptions_max, tiers=tiers)
        self._budget = table.max_num_batched_tokens
        self._threshold = table.long_prefill_token_threshold or UNLIMITED
        self._seats_max = table.max_num_seqs
        # The KV of the last output token is never computed.
        tokens = min(limits.max_model_tokens, limits.num_blocks * limits.block_size + 1)
        self._holds_tokens = tokens if table.chunked_prefill else 0
        """Prompt and output of a request that can be held, whatever else is to be asked."""
        self._can_run_on = limits.leap and self.block_pool is None and self._stages == 1
        self._blocked = FREE
        self._unseen: dict[int, tuple[int, Request]] = {}
        """(arrival here, request) by id: here, and not in the queue yet (`vllm_async`)."""
        self._unseen_first = NOBODY
        """The least arrival order of the unseen ones."""
        self._leaving: list[Request] = []
        """Ended with the last batch; their seats and blocks are not free yet (`vllm_async`)."""

    def _is_full(self) -> bool:
        """No seat is free."""
        return len(self._seats) + len(self._leaving) >= self._seats_max

    def _fit(self, request: Request, hit: Hit, budget: int) -> int:
        """Tokens of a waiting request that can be computed now; 0 = it must wait."""
        had = hit.tokens
        reached = request.prompt_tokens + request.generated_tokens
        new = min(reached - had, self._threshold)
        if new > budget:
            if not self.table.chunked_prefill:
                return 0
            new = budget
        wanted = reached if self.table.reserve_full_sequence else had + new
        return new if self.pool.need(request, wanted, hit) <= self.pool.blocks_free else 0

    # --- leaps ------------------------------------------------------------------------------
    def _leap_steps(self, now_ns: int, has_freed: bool) -> int:
        """Iterations, this one included, that are certainly formed like this one."""
        cohort = self._cohort
        if not self.limits.leap or self._side or now_ns != self._cohort_end_ns:
            return 1
        if self._unseen and (not self._queue.count or self._may_pass()):
            return 1
        if has_freed and (
            self._handoff.arrived or (self._queue.count and not self._is_head_blocked())
        ):
            return 1  # this time nobody was asked; the next iteration may seat somebody
        steps = cohort.steps_to_first_end()
        if steps > 1:
            steps = 1 + cohort.steps_that_fit(self.pool.blocks_free, steps - 1)
        pool = self.block_pool
        if pool is None or steps == 1:
            return steps
        if self._blocked == BLOCKED_BY_KV:
            steps = self._steps_to_longer_hit(pool, steps)
        if pool.tiers:
            # Chunks are on their way, and seen by other replicas, from their own instant on.
            steps = 1 + cohort.steps_before_chunk(steps - 1)
        return steps

    def _is_head_blocked(self) -> bool:
        """Phase B, had it been run, would have admitted nobody."""
        if self.table.skip_blocked:
            return False
        if self._is_full():
            return True
        head = self._queue.head()
        self._blocked = BLOCKED_BY_KV
        return not self._fit(head, self.pool.lookup(head), self._budget - self._cohort.count)

    def _steps_to_longer_hit(self, pool: BlockPool, limit: int) -> int:
        """Iterations before the blocked head may find a longer prefix than now."""
        if not self.table.reserve_full_sequence:
            return 1  # here even a shorter hit could let the head in
        cohort = self._cohort
        if self.table.skip_blocked or pool.tiers:
            return 1 + cohort.steps_before_filled_block(limit - 1)
        wanted = pool.keys_wanted(self._queue.head()) if cohort.has_indexers else {}
        size = pool.block_size
        if not wanted or max(wanted) < cohort.least_computed() // size:
            return limit
        for ahead in range(limit - 1):
            for seat in cohort.fillers(ahead):
                position = (cohort.step + ahead + seat.offset) // size - 1
                keys = pool.keys_of(seat.request)
                if position < len(keys) and wanted.get(position) == keys[position]:
                    return ahead + 1
        return limit

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change.

        To be asked after `enqueue`, `reserve`, `unreserve`, `release` or the cancellation of a
        waiting request; any other change ends a leap at the end of the iteration in flight.
        """
        left = batch.max_steps - batch.steps_settled
        if self._unseen and left and (not self._queue.count or self._may_pass()):
            # The next batch does not see who comes now, the one after does; who came just before
            # the iteration in flight began is seen at its end already.
            first_ns, _ = next(iter(self._unseen.values()))
            left = 0 if first_ns <= batch.last_start_ns else 1
            batch.max_steps = batch.steps_settled + left
        if self._handoff.arrived or batch is not self._leaping or left == 0:
            return False
        if batch.run_on is not None and batch.steps_settled == 1:
            return not self._queue.count and self._surely_fits(
                batch.run_on.shape.decode_count, left
            )
        cohort, blocks_free = self._cohort, self.pool.blocks_free
        if cohort.count * left > blocks_free and cohort.steps_that_fit(blocks_free, left) < left:
            return False
        if not self._queue.count or self._is_full():
            return True
        budget = self._budget - self._cohort.count
        if budget == 0:
            return True
        if self.table.skip_blocked or self.block_pool is not None:
            return False
        return self._fit(self._queue.head(), NO_HIT, budget) == 0

    def _may_pass(self) -> bool:
        """Some unseen request could be admitted before the head of a queue that is not empty."""
        if self.table.skip_blocked or self.table.order != "arrival":
            return True
        return self._unseen_first < arrival_order(self._queue.head())

    def run_on(self, batch: Batch) -> RunOn | None:
        """The decode run that is certain to follow a batch just formed with prompts.

        Its steps are the batch's from now on (`max_steps`); `Batch.first_end_ns` must be set
        before any is settled. None: there is no such run, or nobody can say yet.
        """
        records = self._records[batch.batch_id]
        cohort = self._cohort
        if not self._can_run_on:
            return None
        if self._queue.count or self._unseen or self._handoff.arrived or batch.preempted:
            return None
        if len(records) != len(self._side):
            return None
        steps = UNLIMITED
        if cohort.count:
            if cohort.late or batch.formed_ns != self._cohort_end_ns:
                return None
            shape = cohort.next_shape()
            steps = cohort.steps_to_first_end() - 1
        else:
            shape = BatchShape()
        size = self.limits.block_size
        for seat, _, target in records:
            request = seat.request
            generated = request.generated_tokens
            if target < request.prompt_tokens + generated or request.kv_blocks != -(
                -target // size
            ):
                return None
            left = request.output_tokens - generated - 1
            if left < steps:
                steps = left
            add_chunk(shape, 1, target)
        count = shape.sequences = shape.decode_count
        if steps < 1 or count > self._budget or not self._surely_fits(count, steps):
            return None
        batch.max_steps = 1 + steps
        batch.run_on = RunOn(shape)
        self._leaping = batch
        return batch.run_on

    def _surely_fits(self, members: int, steps: int) -> bool:
        """So many members have blocks for so many steps, wherever in their last block they are."""
        return members * ceil_div(steps, self.limits.block_size) <= self.pool.blocks_free
