"""Continuous batching as in vLLM's current scheduler, exact and in constant time per decode step.

Owns: the waiting queue, the running set, the KV pool and the batches in flight of one replica.
Rules (LLMServingSim sections 5 and 6): phase A serves running requests in order of admission,
one budget of tokens for all; a request whose blocks cannot be had preempts the most recently
admitted one, itself in the end; phase B admits from the head of the queue only if phase A
preempted nobody; computed tokens advance when a batch is formed, generated ones when it ends.

Why an iteration costs O(prefill chunks + log n), not O(running):

* Plain decodes advance together in the `Cohort`: one counter moves for all. Everybody else (a
  prompt, a recomputation, a request that came with its KV) is in the short ordered `_side`.
* Phase A needs no walk. If the tokens suffice, everybody is served whatever the order. If blocks
  do not suffice, the walk of the rule ends with the largest prefix of the running set whose needs
  fit into what is free after the rest was preempted from its tail: at each failing allocation
  exactly one more of the tail goes, and nobody before the failing one is touched. So: while the
  sum of needs exceeds what is free, preempt the last.
* Only if the token budget runs out before a request that is older than some cohort member does
  the order matter. Then the cohort is dissolved into the side list for that iteration.
* A member's token counts are written to its request when it leaves or when somebody looks.

Within a step, fresh blocks are interchangeable (see emu/kv/blocks.py), so members take theirs
together; blocks are indexed in order of admission, because of equal keys the newest wins.

With pipeline stages > 1, tokens of different members are pending in different batches; nobody
joins the cohort then and every iteration walks the running set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from emu.batching.base import Batch, Chunk, Progress, ReplicaLimits
from emu.batching.cohort import Cohort, Seat
from emu.batching.handoff import Handoff
from emu.batching.waiting import make_queue
from emu.config.schema import SchedulerTable
from emu.kv.blocks import BlockPool
from emu.kv.pool import NO_HIT, CountingPool, Hit
from emu.kv.tiers import LowerTier
from emu.latency.base import BatchShape, next_decode_shape
from emu.request import Request
from emu.units import ceil_div

FREE: Final = 0
"""Nobody waits, or the queue was served as far as the budget goes."""
BLOCKED_FOR_GOOD: Final = 1
"""The head waits for a seat or for budget: decoding alone cannot change that."""
BLOCKED_BY_KV: Final = 2
"""The head waits for blocks (or needs a shorter remainder): a longer prefix hit may help."""

_UNLIMITED: Final = 1 << 62


class VllmScheduler:
    """One replica's scheduler, for stepping and leaping alike."""

    policy = "vllm"

    def __init__(
        self,
        table: SchedulerTable,
        limits: ReplicaLimits,
        *,
        max_preemptions: int = 0,
        tiers: Sequence[LowerTier] = (),
    ) -> None:
        """`max_preemptions`: a request preempted more often fails (0 = no limit). `tiers`: KV
        tiers below the GPU pool, used only with prefix caching."""
        self.table = table
        self.limits = limits
        self.max_preemptions = max_preemptions
        self.blocks_total = limits.num_blocks
        caching = limits.prefix_caching and table.prefix_caching
        self.block_pool = (
            BlockPool(limits.num_blocks, limits.block_size, tiers) if caching else None
        )
        self.pool: BlockPool | CountingPool = self.block_pool or CountingPool(
            limits.num_blocks, limits.block_size
        )
        self._budget = table.max_num_batched_tokens
        self._threshold = table.long_prefill_token_threshold or _UNLIMITED
        self._queue = make_queue(table.order)
        self._handoff = Handoff(self.pool, self._blocks_to_reserve_one)
        self._cohort = Cohort(limits.block_size, track_members=caching)
        self._seats: dict[int, Seat] = {}
        """By request id; the order of the dictionary is the order of admission."""
        self._side: dict[int, Seat] = {}
        """By admission, in that order: seats outside the cohort."""
        self._records: dict[int, list[tuple[Seat, int, int]]] = {}
        """By batch in flight: members outside the cohort, their new tokens and target length."""
        self._leaping: Batch | None = None
        """The batch in flight in which the cohort takes part."""
        self._blocked = FREE
        self._admissions = 0
        self._next_batch_id = 0
        self._last_end_ns = -1
        """End of the last batch: every cohort member received its latest token then."""
        self._failed: list[tuple[Request, str]] = []

    # --- figures ----------------------------------------------------------------------------
    @property
    def blocks_used(self) -> int:
        """Blocks that are not free; cached blocks that nobody references are free."""
        return self.blocks_total - self.pool.blocks_free

    @property
    def waiting_count(self) -> int:
        """Requests in the waiting queue, preempted ones included."""
        return len(self._queue)

    @property
    def running_count(self) -> int:
        """Requests that hold KV and run or are about to."""
        return len(self._seats) + len(self._handoff.arrived)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests."""
        return self._queue.prompt_tokens

    # --- forming a batch --------------------------------------------------------------------
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request joins the waiting queue; it has no KV here."""
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        request.computed_tokens = 0
        request.kv_blocks = 0
        request.block_ids = None
        self._queue.append(request)

    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration; None if nothing can run or all stages are taken."""
        if len(self._records) >= self.limits.pipeline_stages:
            return None
        if self._handoff.arrived:
            self._seat_arrived()
        if self._side:
            self._join_ready()
        cohort = self._cohort
        seated = len(self._seats)
        plan = self._plan_running() if self._side or cohort.count > self._budget else []
        preempted = self._make_room(plan)
        shape = BatchShape()
        records: list[tuple[Seat, int, int]] = []
        chunks: list[Chunk] = []
        self._serve_running(plan, shape, records, chunks, now_ns)
        self._blocked = FREE
        recalls: list[tuple[int, int]] = []
        has_evicted = len(self._seats) < seated
        if self._queue and not (has_evicted and (self._seats or self._records)):
            budget = self._budget - cohort.count - sum(new for _, new in plan)
            recalls = self._admit(budget, shape, records, chunks, now_ns)
        if not records and not cohort.count:
            return None
        shape.sequences = cohort.count + len(records)
        batch = Batch(
            batch_id=self._next_batch_id,
            shape=shape,
            chunks=chunks,
            formed_ns=now_ns,
            preempted=preempted,
            recalls=recalls,
        )
        self._next_batch_id += 1
        if cohort.count:
            self._leaping = batch
            if not records:
                batch.max_steps = self._leap_steps(now_ns)
        else:
            batch.decodes = [seat.request for seat, _, _ in records if not seat.prefilling]
        self._records[batch.batch_id] = records
        return batch

    def _seat_arrived(self) -> None:
        """Requests that came with their KV sit down as long as there is room, in order."""
        arrived = self._handoff.arrived
        for request_id in list(arrived):
            if len(self._seats) >= self.table.max_num_seqs:
                return
            request = arrived.pop(request_id)
            if request.computed_tokens < request.reached_tokens - 1:
                self._sit(request)  # its KV is not complete: the rest is computed here
            else:
                request.computed_tokens = request.reached_tokens - 1
                self._sit(request).prefilling = request.generated_tokens == 0

    def _sit(self, request: Request) -> Seat:
        seat = Seat(request, self._admissions)
        self._admissions += 1
        self._seats[request.request_id] = seat
        self._side[seat.admission] = seat
        return seat

    def _join_ready(self) -> None:
        """Side seats that received a token at the end of the last batch decode plainly now."""
        if self.limits.pipeline_stages > 1 or len(self._seats) > self._budget:
            return
        size = self.limits.block_size
        for seat in list(self._side.values()):
            request = seat.request
            if (
                not seat.prefilling
                and request.last_token_ns == self._last_end_ns
                and request.kv_blocks == -(-request.computed_tokens // size)
            ):
                del self._side[seat.admission]
                self._cohort.join(seat)

    def _dissolve(self) -> None:
        """Everybody to the side list: this iteration is walked in order of admission."""
        for seat in self._seats.values():
            if seat.in_cohort:
                self._leave_cohort(seat)
        self._side = {seat.admission: seat for seat in self._seats.values()}

    def _plan_running(self) -> list[tuple[Seat, int]]:
        """Phase A: new tokens of each side seat, as if all of the cohort had been served."""
        cohort = self._cohort
        left = self._budget - cohort.count
        plan: list[tuple[Seat, int]] = []
        if left < 0:
            self._dissolve()
            return self._plan_running()
        for seat in self._side.values():
            request = seat.request
            new = request.prompt_tokens + request.generated_tokens - request.computed_tokens
            if new <= 0:
                assert seat.pending, "a running request has nothing to compute"
                continue
            if new > self._threshold:
                new = self._threshold
            if new > left:
                if cohort.newest_admission > seat.admission:
                    self._dissolve()
                    return self._plan_running()
                new = left
                if new == 0:
                    break
            plan.append((seat, new))
            left -= new
        return plan

    def _make_room(self, plan: list[tuple[Seat, int]]) -> list[Request]:
        """Preempt from the tail until the blocks of all who remain can be had."""
        pool = self.pool
        need = sum(
            pool.need(seat.request, seat.request.computed_tokens + new) for seat, new in plan
        )
        preempted: list[Request] = []
        while need + self._cohort.blocks_next() > pool.blocks_free:
            seat = self._seats[next(reversed(self._seats))]
            if plan and plan[-1][0] is seat:
                _, new = plan.pop()
                need -= pool.need(seat.request, seat.request.computed_tokens + new)
            if self._preempt(seat):
                preempted.append(seat.request)
        return preempted

    def _preempt(self, seat: Seat) -> bool:
        """Recompute later: its blocks are free, the request waits at the front. False: it fails."""
        request = seat.request
        self._vacate(seat)
        self.pool.release(request)
        request.computed_tokens = 0
        request.preemptions += 1
        if self.max_preemptions and request.preemptions > self.max_preemptions:
            self._failed.append((request, f"preempted {request.preemptions} times"))
            return False
        self._queue.push_front(request)
        return True

    def _serve_running(
        self,
        plan: list[tuple[Seat, int]],
        shape: BatchShape,
        records: list[tuple[Seat, int, int]],
        chunks: list[Chunk],
        now_ns: int,
    ) -> None:
        cohort = self._cohort
        fillers: list[Seat] = []
        if cohort.count:
            shape.decode_count = cohort.count
            total, longest, shortest = cohort.context()
            shape.decode_context_sum = total
            shape.decode_context_max = longest
            shape.decode_context_min = shortest
            fillers = self._start_cohort_step()
        at = 0
        for seat, new in plan:
            while at < len(fillers) and fillers[at].admission < seat.admission:
                self._index_filled(fillers[at])
                at += 1
            self._serve(seat, new, NO_HIT, shape, records, chunks, now_ns)
        for filler in fillers[at:]:
            self._index_filled(filler)
        cohort.in_flight = 1 if cohort.count else 0

    def _start_cohort_step(self) -> list[Seat]:
        """Take the blocks of the cohort's next step; who then has a block to be indexed."""
        cohort = self._cohort
        pool = self.block_pool
        fillers: list[Seat] = []
        if pool is None:
            self.pool.blocks_free -= cohort.blocks_next()
        else:
            if cohort.blocks_next():
                for seat in cohort.takers():
                    pool.grow_by_one(seat.request)
            fillers = cohort.fillers()
        assert self.pool.blocks_free >= 0
        cohort.step += 1
        return fillers

    def _index_filled(self, seat: Seat) -> None:
        pool = self.block_pool
        assert pool is not None
        computed = self._cohort.step + seat.offset - 1
        pool.index(seat.request, computed - 1, computed)

    def _serve(
        self,
        seat: Seat,
        new: int,
        hit: Hit,
        shape: BatchShape,
        records: list[tuple[Seat, int, int]],
        chunks: list[Chunk],
        now_ns: int,
    ) -> None:
        """Put `new` tokens of a seat outside the cohort into the batch."""
        request = seat.request
        had = request.computed_tokens
        target = had + new
        self.pool.grow(request, had, target, hit)
        request.computed_tokens = target
        seat.pending += new
        records.append((seat, new, target))
        if seat.prefilling:
            chunks.append(Chunk(request, new, had))
            if request.generated_tokens == 0 and target >= request.prompt_tokens:
                request.prefill_scheduled_ns = now_ns
        if new == 1:
            if shape.decode_count == 0:
                shape.decode_context_max = shape.decode_context_min = had
            elif had > shape.decode_context_max:
                shape.decode_context_max = had
            elif had < shape.decode_context_min:
                shape.decode_context_min = had
            shape.decode_count += 1
            shape.decode_context_sum += had
        else:
            shape.prefill_new.append(new)
            shape.prefill_context.append(had)

    def _admit(
        self,
        budget: int,
        shape: BatchShape,
        records: list[tuple[Seat, int, int]],
        chunks: list[Chunk],
        now_ns: int,
    ) -> list[tuple[int, int]]:
        """Phase B. Admission never preempts; a head that does not fit blocks those behind it.

        Returns (tier, bytes) to recall.
        """
        queue = self._queue
        recalls: list[tuple[int, int]] = []
        passed: Iterator[Request] | None = None
        while queue and budget > 0:
            if len(self._seats) >= self.table.max_num_seqs:
                break
            request = queue.head() if passed is None else next(passed, None)
            if request is None:
                return recalls
            hit = self.pool.lookup(request)
            new = self._fit(request, hit, budget)
            if new == 0:
                self._blocked = BLOCKED_BY_KV
                if not self.table.skip_blocked:
                    return recalls
                if passed is None:
                    passed = iter(list(queue)[1:])
                continue
            queue.remove(request)
            self._record_admission(request, hit, now_ns)
            request.computed_tokens = hit.tokens
            self._serve(self._sit(request), new, hit, shape, records, chunks, now_ns)
            if hit.recall_bytes:
                recalls.append((hit.tier, hit.recall_bytes))
            budget -= new
        if queue and self._blocked == FREE:
            self._blocked = BLOCKED_FOR_GOOD
        return recalls

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

    def _record_admission(self, request: Request, hit: Hit, now_ns: int) -> None:
        reached = request.prompt_tokens + request.generated_tokens
        self._queue.charge(request.tenant, request.prompt_tokens)
        if request.preemptions:
            request.recomputed_tokens += reached - hit.tokens
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = now_ns
            request.prefix_hit_tokens = hit.tokens
            request.npu_hit_tokens = hit.npu_tokens
            request.storage_hit_tokens = hit.lower_tokens

    # --- leaps ------------------------------------------------------------------------------
    def _leap_steps(self, now_ns: int) -> int:
        """Iterations, this one included, that are certainly formed like this one."""
        cohort = self._cohort
        if not self.limits.leap or self._side or now_ns != self._last_end_ns:
            return 1
        steps = cohort.steps_to_first_end()
        if self._blocked == BLOCKED_BY_KV and self.block_pool is not None:
            steps = self._steps_to_longer_hit(self.block_pool, steps)
        if self.block_pool is not None and any(tier.shared for tier in self.block_pool.tiers):
            # Other replicas must see each chunk at the instant at which it was written.
            steps = 1 + cohort.steps_before_filled_block(steps - 1)
        if steps > 1:
            steps = 1 + cohort.steps_that_fit(self.pool.blocks_free, steps - 1)
        return steps

    def _steps_to_longer_hit(self, pool: BlockPool, limit: int) -> int:
        """Iterations before the blocked head may find a longer prefix than now."""
        if not self.table.reserve_full_sequence:
            return 1  # here even a shorter hit could let the head in
        cohort = self._cohort
        if self.table.skip_blocked or pool.tiers:
            return 1 + cohort.steps_before_filled_block(limit - 1)
        missing = pool.first_missing_key(self._queue.head())
        if missing is None:
            return limit
        position, key = missing
        filled_tokens = (position + 1) * pool.block_size
        for seat in cohort.keyed_members():
            steps = filled_tokens - (cohort.step + seat.offset - 1)
            if 0 < steps < limit and pool.keys_of(seat.request)[position : position + 1] == [key]:
                limit = steps
        return limit

    def settle(self, batch: Batch, steps: int) -> None:
        """Take the blocks of the steps up to `steps` of a leap in flight (idempotent)."""
        more = steps - batch.steps_settled
        if more <= 0:
            return
        assert steps <= batch.max_steps, "settled beyond the promise"
        batch.steps_settled = steps
        self._next_batch_id += more
        cohort = self._cohort
        if batch is not self._leaping or cohort.count == 0:
            return
        if self.block_pool is None:
            self.pool.blocks_free -= cohort.blocks_of(more)
            assert self.pool.blocks_free >= 0
            cohort.step += more
            return
        for _ in range(more):
            for seat in self._start_cohort_step():
                self._index_filled(seat)

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change.

        To be asked after `enqueue`, `reserve`, `unreserve`, `release` or the cancellation of a
        waiting request; any other change ends a leap at the end of the iteration in flight.
        """
        left = batch.max_steps - batch.steps_settled
        if self._handoff.arrived or batch is not self._leaping or left == 0:
            return False
        if self._cohort.steps_that_fit(self.pool.blocks_free, left) < left:
            return False
        if not self._queue or len(self._seats) >= self.table.max_num_seqs:
            return True
        budget = self._budget - self._cohort.count
        if budget == 0:
            return True
        if self.table.skip_blocked or self.block_pool is not None:
            return False
        return self._fit(self._queue.head(), NO_HIT, budget) == 0

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """The first `steps` iterations of a leap ended at `now_ns`, the next one is in flight.

        For whoever must change or lose the running set in the middle of an iteration: afterwards
        the batch is that one iteration, as if it had been stepped to.
        """
        assert 0 < steps < batch.max_steps
        self.settle(batch, steps + 1)
        assert batch.steps_settled == steps + 1
        progress = Progress()
        self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
        self._last_end_ns = now_ns
        batch.shape = next_decode_shape(batch.shape, steps)
        batch.max_steps = batch.steps_settled = 1
        batch.formed_ns = now_ns
        return progress

    # --- the end of a batch -----------------------------------------------------------------
    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        self.settle(batch, steps)
        assert steps == batch.steps_settled
        progress = Progress()
        records = self._records.pop(batch.batch_id)
        ended: list[Seat] = []
        if batch is self._leaping:
            self._leaping = None
            self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
            self._cohort.in_flight = 0
            self._last_end_ns = now_ns
            if self._cohort.count:
                ended = self._cohort.pop_ended()
        self._last_end_ns = now_ns
        for seat in ended:
            seat.request.last_token_ns = now_ns
        for seat, new, target in records:
            if seat.is_alive and self._end_record(seat, new, target, now_ns, progress):
                ended.append(seat)
        if ended:
            ended.sort(key=_admission)
            for seat in ended:
                self._finish(seat)
                progress.finished.append(seat.request)
        if self._failed:
            progress.failed, self._failed = self._failed, []
        return progress

    def _end_cohort_steps(
        self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int, progress: Progress
    ) -> None:
        """Every member received `steps` tokens, the last one now."""
        cohort = self._cohort
        count = cohort.count
        if count == 0:
            return
        progress.decode_tokens += count * steps
        completed = cohort.step if batch.steps_settled == steps else cohort.step - 1
        if batch.formed_ns == self._last_end_ns:
            progress.cohort_size = count
            cohort.note_gap(longest_step_ns, completed)
        else:
            assert steps == 1
            gap_ns = now_ns - self._last_end_ns
            progress.gaps_ns = [gap_ns] * count
            cohort.note_gap(gap_ns, completed)

    def _end_record(
        self, seat: Seat, new: int, target: int, now_ns: int, progress: Progress
    ) -> bool:
        """The outcome of a member outside the cohort. True if its output is complete."""
        request = seat.request
        seat.pending -= new
        if seat.prefilling:
            progress.prefill_tokens += new
        if target < request.prompt_tokens + request.generated_tokens:
            return False
        seat.prefilling = False
        request.generated_tokens += 1
        progress.decode_tokens += 1
        if request.first_token_ns < 0:
            request.first_token_ns = now_ns
            progress.first_tokens.append(request)
        else:
            gap_ns = now_ns - request.last_token_ns
            progress.gaps_ns.append(gap_ns)
            if gap_ns > request.max_gap_ns:
                request.max_gap_ns = gap_ns
        request.last_token_ns = now_ns
        return request.generated_tokens >= request.output_tokens

    def _finish(self, seat: Seat) -> None:
        self._vacate(seat)
        self._queue.charge(seat.request.tenant, seat.request.generated_tokens)
        self.pool.release(seat.request)

    # --- leaving and coming -----------------------------------------------------------------
    def _leave_cohort(self, seat: Seat) -> None:
        self._cohort.leave(seat)
        seat.request.last_token_ns = self._last_end_ns

    def _vacate(self, seat: Seat) -> None:
        """The request has no seat any more; its counts are exact, its blocks are still its own."""
        if seat.in_cohort:
            self._leave_cohort(seat)
        else:
            self._side.pop(seat.admission, None)
        del self._seats[seat.request.request_id]
        seat.is_alive = False

    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        longest = request.prompt_tokens + request.max_output_tokens
        if longest > self.limits.max_model_tokens:
            return f"{longest} tokens exceed the limit of {self.limits.max_model_tokens}"
        # The KV of the last output token is never computed.
        blocks = ceil_div(longest - 1, self.limits.block_size)
        if blocks > self.blocks_total:
            return f"{longest} tokens need {blocks} KV blocks, the replica has {self.blocks_total}"
        first_chunk = min(request.prompt_tokens, self._threshold)
        if not self.table.chunked_prefill and first_chunk > self._budget:
            return (
                f"prompt of {request.prompt_tokens} tokens exceeds max_num_batched_tokens "
                f"{self._budget} without chunked prefill"
            )
        return ""

    def drop_hopeless(self, now_ns: int) -> list[tuple[Request, str]]:
        """Heads that cannot be admitted although the replica is empty, removed."""
        dropped, self._failed = self._failed, []
        if self._seats or self._records or self._handoff.holds_blocks:
            return dropped
        while self._queue:
            request = self._queue.head()
            if self._fit(request, self.pool.lookup(request), self._budget):
                break
            self._queue.remove(request)
            blocks = ceil_div(request.reached_tokens, self.limits.block_size)
            dropped.append(
                (
                    request,
                    f"{request.reached_tokens} tokens ({blocks} KV blocks) can never be scheduled",
                )
            )
        return dropped

    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks. False if it is not here."""
        seat = self._seats.get(request.request_id)
        if seat is not None:
            self._vacate(seat)
        elif self._handoff.arrived.pop(request.request_id, None) is None:
            return self._queue.remove(request)
        self._queue.charge(request.tenant, request.generated_tokens)
        self.pool.release(request)
        return True

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        seat = self._seats.get(request.request_id)
        if seat is None:
            del self._handoff.arrived[request.request_id]
        else:
            in_flight = self._cohort.in_flight if seat.in_cohort else seat.pending
            self._vacate(seat)
            request.computed_tokens -= in_flight  # what a batch in flight computes is lost
        self._queue.charge(request.tenant, request.generated_tokens)
        self._handoff.hold(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a detached request (no-op after an evacuation)."""
        self._handoff.release(request)

    def _blocks_to_reserve_one(self, request: Request) -> int:
        return ceil_div(request.prompt_tokens + request.generated_tokens, self.limits.block_size)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks for the reached length of each: prompt and output so far."""
        return self._handoff.blocks_to_reserve(requests)

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Reserve blocks for inbound requests, all or nothing."""
        return self._handoff.reserve(requests)

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give back reservations that will not be used."""
        self._handoff.unreserve(requests)

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        """Reserved requests join the running set as soon as there is a seat."""
        for request in requests:
            request.computed_tokens = request.reached_tokens - 1
        self._handoff.activate(requests)

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests of this replica go on here."""
        self._handoff.adopt(requests)

    def evacuate(self) -> list[Request]:
        """Everything leaves: waiting requests first, then running ones. The pool is empty.

        Detached requests and reservations are forgotten, not returned: their owners know.
        """
        leaving = list(self._queue)
        for request in leaving:
            self._queue.remove(request)
        for seat in list(self._seats.values()):
            self._vacate(seat)
            leaving.append(seat.request)
        leaving += self._handoff.clear()
        leaving += [request for request, _ in self._failed]
        self._failed = []
        self._records.clear()
        self._leaping = None
        self._cohort.in_flight = 0
        self.pool.clear()
        for request in leaving:
            request.computed_tokens = request.kv_blocks = 0
            request.block_ids = None
        return leaving

    # --- seeing -----------------------------------------------------------------------------
    def residents(self) -> Iterable[Request]:
        """Running requests in order of admission, then those that arrived and wait for a seat."""
        for seat in self._seats.values():
            if seat.in_cohort:
                self._cohort.materialise(seat)
            yield seat.request
        yield from self._handoff.arrived.values()

    def waiting(self) -> Iterable[Request]:
        """Waiting requests, head first."""
        return iter(self._queue)

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at the end of each of its steps."""
        receivers = [
            seat
            for seat, _, target in self._records.get(batch.batch_id, ())
            if seat.is_alive and target >= seat.request.reached_tokens
        ]
        if batch is self._leaping:
            receivers += [seat for seat in self._seats.values() if seat.in_cohort]
            receivers.sort(key=_admission)
        return [seat.request for seat in receivers]

    def recount(self) -> list[str]:
        """Full check of the books; one line for each thing that is wrong."""
        problems: list[str] = []
        residents = list(self.residents())
        size = self.limits.block_size
        problems += [
            f"request {r.request_id}: {r.computed_tokens} tokens in {r.kv_blocks} blocks"
            for r in residents
            if r.kv_blocks < ceil_div(r.computed_tokens, size)
        ]
        problems += [
            f"request {r.request_id} waits with blocks" for r in self._queue if r.kv_blocks
        ]
        if sum(r.prompt_tokens for r in self._queue) != self._queue.prompt_tokens:
            problems.append("waiting tokens do not add up")
        members = [seat for seat in self._seats.values() if seat.in_cohort]
        if len(members) != self._cohort.count:
            problems.append(f"cohort of {self._cohort.count}, counted {len(members)}")
        if len(members) + len(self._side) != len(self._seats):
            problems.append("a running request is neither in the cohort nor beside it")
        if self.block_pool is not None:
            holders = [seat.request.block_ids or [] for seat in self._seats.values()]
            problems += self.block_pool.recount(holders + self._handoff.block_lists())
            problems += [
                f"request {r.request_id}: {r.kv_blocks} blocks, {len(r.block_ids or [])} ids"
                for r in residents
                if r.kv_blocks != len(r.block_ids or [])
            ]
        else:
            held = sum(seat.request.kv_blocks for seat in self._seats.values())
            held += self._handoff.blocks_held()
            if held != self.blocks_used:
                problems.append(f"{self.blocks_used} blocks used, counted {held}")
        return problems


def _admission(seat: Seat) -> int:
    return seat.admission
