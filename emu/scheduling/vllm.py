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

from collections.abc import Iterator, Sequence

from emu.kv.pool import NO_HIT, Hit
from emu.latency.base import BatchShape
from emu.request import Request
from emu.scheduling.base import Batch, Chunk, Recall
from emu.scheduling.cohort import Seat
from emu.scheduling.seats import Record
from emu.scheduling.shape import add_chunk
from emu.scheduling.vllm_leaps import BLOCKED_BY_KV, BLOCKED_FOR_GOOD, FREE, VllmLeaps
from emu.units import ceil_div


class VllmScheduler(VllmLeaps):
    """One replica's scheduler, for stepping and leaping alike."""

    policy = "vllm"

    # --- forming a batch --------------------------------------------------------------------
    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration; None if nothing can run or all stages are taken."""
        return self._form(now_ns)

    def _form(self, now_ns: int) -> Batch | None:
        if len(self._records) >= self._stages:
            return None
        if self._handoff.arrived:
            self._seat_arrived(self._seats_max)
        seated = len(self._seats)  # to see afterwards whether anybody was preempted
        is_awaited = self._queue.count > 0
        if not seated and not is_awaited:
            return None
        cohort = self._cohort
        if self._side:
            if self._stages == 1 and seated <= self._budget:
                self._join_ready(now_ns)
        elif (
            not is_awaited
            and seated <= self._budget
            and (seated <= self.pool.blocks_free or cohort.blocks_next() <= self.pool.blocks_free)
        ):
            return self._form_decodes(now_ns)
        plan = self._plan_running() if self._side or cohort.count > self._budget else []
        preempted: list[Request] = []
        if plan or cohort.blocks_next() > self.pool.blocks_free:
            preempted = self._make_room(plan)
        shape = cohort.next_shape() if cohort.count else BatchShape()
        records: list[Record] = []
        chunks: list[Chunk] = []
        fillers = self._start_cohort_step() if cohort.count else ()
        if plan or fillers:
            self._serve_side(plan, fillers, shape, records, chunks, now_ns)
        self._blocked = FREE
        recalls: list[Recall] = []
        has_evicted = len(self._seats) < seated
        if (is_awaited or preempted) and not (has_evicted and (self._seats or self._records)):
            budget = self._budget - cohort.count
            for _, new in plan:
                budget -= new
            recalls = self._admit(budget, shape, records, chunks, now_ns)
        if not records and not cohort.count:
            if not (has_evicted and self._handoff.arrived):
                return None
            batch = self._form(now_ns)  # who came with his KV finds a seat now
            if batch is not None:
                batch.preempted = [*preempted, *batch.preempted]
            return batch
        shape.sequences = cohort.count + len(records)
        has_freed = (self._free_ended() if self._leaving else False) or has_evicted
        batch = self._launch(shape, chunks, records, now_ns, has_freed)
        if preempted:
            batch.preempted = preempted
        if recalls:
            batch.recalls = recalls
        return batch

    def _form_decodes(self, now_ns: int) -> Batch:
        """An iteration, or leap, of the cohort alone: nobody else is here."""
        shape = self._cohort.next_shape()
        for seat in self._start_cohort_step():
            self._index_filled(seat)
        self._blocked = FREE
        has_freed = self._free_ended() if self._leaving else False
        batch_id = self._next_batch_id
        self._next_batch_id = batch_id + 1
        self._records[batch_id] = []
        self._leaping = batch = Batch(
            batch_id, shape, [], self._leap_steps(now_ns, has_freed), now_ns
        )
        return batch

    def _launch(
        self,
        shape: BatchShape,
        chunks: list[Chunk],
        records: list[Record],
        now_ns: int,
        has_freed: bool,
    ) -> Batch:
        """The batch is formed; whether it is the first of a leap."""
        batch_id = self._next_batch_id
        self._next_batch_id = batch_id + 1
        batch = Batch(batch_id, shape, chunks, formed_ns=now_ns)
        if self._cohort.count:
            self._leaping = batch
            if not records:
                batch.max_steps = self._leap_steps(now_ns, has_freed)
        else:
            batch.decodes = [seat.request for seat, _, _ in records if not seat.prefilling]
        self._records[batch_id] = records
        return batch

    def _free_ended(self) -> bool:
        """Free what ended with the last batch, if that has not been done; whether there was any."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self.pool.release(request)
        return bool(leaving)

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
        if self.preemptions_max and request.preemptions > self.preemptions_max:
            self._failed.append((request, f"preempted {request.preemptions} times"))
            return False
        self._queue.push_front(request)
        return True

    def _serve_side(
        self,
        plan: list[tuple[Seat, int]],
        fillers: Sequence[Seat],
        shape: BatchShape,
        records: list[Record],
        chunks: list[Chunk],
        now_ns: int,
    ) -> None:
        """Everybody beside the cohort; blocks are indexed in order of admission."""
        at = 0
        for seat, new in plan:
            while at < len(fillers) and fillers[at].admission < seat.admission:
                self._index_filled(fillers[at])
                at += 1
            self._serve(seat, new, NO_HIT, shape, records, chunks, now_ns)
        for filler in fillers[at:]:
            self._index_filled(filler)

    def _serve(
        self,
        seat: Seat,
        new: int,
        hit: Hit,
        shape: BatchShape,
        records: list[Record],
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
        add_chunk(shape, new, had)

    def _admit(
        self,
        budget: int,
        shape: BatchShape,
        records: list[Record],
        chunks: list[Chunk],
        now_ns: int,
    ) -> list[Recall]:
        """Phase B. Admission never preempts; a head that does not fit blocks those behind it.

        Returns what is to be recalled.
        """
        queue = self._queue
        recalls: list[Recall] = []
        passed: Iterator[Request] | None = None
        while queue.count and budget > 0:
            if self._is_full():
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
            if hit is not NO_HIT:
                request.computed_tokens = hit.tokens
            self._serve(self._sit(request), new, hit, shape, records, chunks, now_ns)
            if hit.recall_bytes:
                recalls.append(Recall(hit.tier, hit.recall_bytes, request, hit.lower_tokens))
            budget -= new
        if queue.count and self._blocked == FREE:
            self._blocked = BLOCKED_FOR_GOOD
        return recalls

    def _record_admission(self, request: Request, hit: Hit, now_ns: int) -> None:
        if self._queue.counts_service:
            self._queue.charge(request.tenant, request.prompt_tokens)
        if request.preemptions:
            request.recomputed_tokens += request.reached_tokens - hit.tokens
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = now_ns
            if hit is not NO_HIT:
                request.prefix_hit_tokens = hit.tokens
                request.npu_hit_tokens = hit.npu_tokens
                request.storage_hit_tokens = hit.lower_tokens

    # --- limits -----------------------------------------------------------------------------
    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        longest = request.prompt_tokens + request.max_output_tokens
        if longest <= self._holds_tokens:
            return ""
        if longest > self.limits.max_model_tokens:
            return f"longer than the model's {self.limits.max_model_tokens} tokens"
        # The KV of the last output token is never computed.
        blocks = ceil_div(longest - 1, self.limits.block_size)
        if blocks > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        first_chunk = min(request.prompt_tokens, self._threshold)
        if not self.table.chunked_prefill and first_chunk > self._budget:
            return f"prompt longer than max_num_batched_tokens {self._budget}, and not chunked"
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
