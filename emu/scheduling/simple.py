"""A scheduler that lacks only its policy: subclass it and write `form_batch`.

Owns: the life of a batch (formed, leaps settled, completed) and the progress of its members.
The base class keeps the books. Vidur's five policies and the user's own derive from it.

A member is a *decode* (its prompt is complete; one token a step) or a *chunk* (a piece of prompt
or of a recomputation). The pass over the last piece yields the next output token. A policy may
read `request.max_output_tokens`, never `output_tokens`.

Leaps: when a batch holds decodes only, nobody is left idle, and `leap_limit` says for how long
admission cannot change its mind, the next iterations are the same batch. The run is cut where
the first member ends and where the pool would run out.
"""

from __future__ import annotations

import sys
from typing import final

from emu.config.schema import SchedulerTable
from emu.latency.base import BatchShape, next_decode_shape
from emu.request import Request
from emu.scheduling.base import Batch, Chunk, Progress, ReplicaLimits
from emu.scheduling.books import ReplicaBooks

UNLIMITED = sys.maxsize


@final
class Plan:
    """What `form_batch` fills in: the members of the next iteration."""

    decodes: list[Request]
    chunks: list[Chunk]

    __slots__ = (
        "chunks",
        "decodes",
    )

    def __init__(
        self,
        decodes: list[Request] | None = None,
        chunks: list[Chunk] | None = None,
    ) -> None:
        self.decodes = [] if decodes is None else decodes
        self.chunks = [] if chunks is None else chunks

    def decode(self, request: Request) -> None:
        """The request computes one token; it must have the block for it (`grow`)."""
        self.decodes.append(request)

    def read(self, request: Request, tokens: int) -> None:
        """The request reads the next `tokens` tokens of its prompt (or recomputation)."""
        self.chunks.append(Chunk(request, tokens, request.computed_tokens))

    def __len__(self) -> int:
        return len(self.decodes) + len(self.chunks)


class SimpleScheduler(ReplicaBooks):
    """Everything of the `Scheduler` protocol but the policy."""

    policy = "simple"
    orders_idle = False
    """True: `form_batch` itself leaves in `self.idle` exactly those that it did not take."""

    def __init__(
        self, table: SchedulerTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        super().__init__(table, limits, preemptions_max=preemptions_max)
        self._next_batch_id = 0

    # --- for the subclass -------------------------------------------------------------------
    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Put the members of the next iteration into `plan`; leave it empty if none can run.

        At hand: `self.idle`, `self.candidates()`, `self.admit`, `self.grow`, `self.preempt`,
        `self.free_blocks`. A request admitted here must be in the plan (as `read`).
        """
        raise NotImplementedError

    def leap_limit(self, plan: Plan) -> int:
        """Iterations for which this pure decode plan would be formed again, unless a member ends.

        Asked when no request is idle beside the plan. 1 = no promise.
        """
        return 1

    def would_admit(self, batch: Batch) -> bool:
        """Whether a request that waits now could join while the leap `batch` goes on.

        Yes unless the policy knows better: the leap is then cut.
        """
        return self.waiting_count > 0

    def stalls(self) -> bool:
        """True: do not look at the queue again although requests went back to it."""
        return False

    def on_steps(self, steps: int) -> None:
        """`steps` more iterations of a leap have started without `form_batch` being called."""

    def spare_blocks(self) -> int:
        """Free blocks that a leap may take without changing what stepping would do."""
        return self.free_blocks

    # --- the protocol -----------------------------------------------------------------------
    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration; None if nothing can run or all stages are taken."""
        if len(self._in_flight) >= self.limits.pipeline_stages:
            return None
        if not (self.waiting_count or self.running_count):
            return None
        plan = Plan()
        running = self.running_count
        self.form_batch(plan, now_ns)
        while not plan and self.running_count < running and not self.stalls():
            # The last idle request went back to the queue: another one may fit now.
            running = self.running_count
            self.form_batch(plan, now_ns)
        if not plan:
            return None
        if not self.orders_idle:
            taken = {request.request_id for request in plan.decodes}
            taken.update(chunk.request.request_id for chunk in plan.chunks)
            self.idle = [request for request in self.idle if request.request_id not in taken]
        self._stamp(plan.chunks, now_ns)
        batch = Batch(
            batch_id=self._next_batch_id,
            shape=_shape_of(plan),
            chunks=plan.chunks,
            max_steps=self._leap_steps(plan, now_ns),
            formed_ns=now_ns,
            decodes=plan.decodes,
        )
        batch.preempted = self._preempted
        self._preempted = []
        self._next_batch_id += 1
        self._in_flight[batch.batch_id] = batch
        return batch

    def settle(self, batch: Batch, steps: int) -> None:
        """Tokens of the steps that ended and blocks of the steps that started, up to `steps`."""
        more = steps - batch.steps_settled
        if more <= 0:
            return
        assert steps <= batch.max_steps, "settled beyond the promise"
        for request in batch.decodes or ():
            request.computed_tokens += more
            request.generated_tokens += more
        if self.grows:
            for request in batch.decodes or ():
                fits = self.grow(request, request.prompt_tokens + request.generated_tokens)
                assert fits, "a leap takes blocks that do not exist"
        batch.steps_settled = steps
        self._next_batch_id += more
        self.on_steps(more)

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        self.settle(batch, steps)
        del self._in_flight[batch.batch_id]
        progress = Progress()
        staying: list[Request] = []
        self._advance_decodes(batch, now_ns, longest_step_ns, progress, staying)
        progress.decode_tokens = len(batch.decodes or ()) * steps
        for chunk in batch.chunks:
            self._advance_chunk(batch, chunk, now_ns, progress, staying)
        if staying:
            self._return(staying)
        if progress.finished:
            for request in progress.finished:
                del self._residents[request.request_id]
                self._waiting.charge(request.tenant, request.generated_tokens)
            self.running_count -= len(progress.finished)
            self._retire(progress.finished)
        if self._failed:
            progress.failed, self._failed = self._failed, []
        return progress

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change.

        To be asked after `enqueue`, `reserve`, `unreserve`, `release` or the cancellation of a
        waiting request; any other change ends a leap at the end of the iteration in flight.
        """
        left = batch.max_steps - batch.steps_settled
        if left <= 0 or self._idle_ids() or batch.batch_id not in self._in_flight:
            return False
        if self.grows and self._steps_until_pool_is_dry(batch.decodes or []) < left:
            return False
        if self.waiting_count and self.never(self._waiting.head()):
            return False
        return not self.would_admit(batch)

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """The first `steps` iterations of a leap ended at `now_ns`, the next one is in flight.

        Afterwards the batch is that one iteration, as if it had been stepped to.
        """
        assert 0 < steps < batch.max_steps
        self.settle(batch, steps + 1)
        assert batch.steps_settled == steps + 1
        decodes = batch.decodes or []
        elapsed_ns = now_ns - batch.formed_ns
        for request in decodes:
            request.execution_ns += elapsed_ns
            request.max_gap_ns = max(request.max_gap_ns, longest_step_ns)
            request.last_token_ns = now_ns
        batch.shape = next_decode_shape(batch.shape, steps)
        batch.max_steps = batch.steps_settled = 1
        batch.formed_ns = now_ns
        return Progress(cohort_size=len(decodes), decode_tokens=len(decodes) * steps)

    def token_receivers(self, batch: Batch) -> list[Request]:
        """Members that get an output token at the end of each step of the batch."""
        readers = [
            chunk.request
            for chunk in batch.chunks
            if chunk.context_tokens + chunk.new_tokens == chunk.request.reached_tokens
        ]
        return [*(batch.decodes or ()), *readers]

    # --- inside -----------------------------------------------------------------------------
    def _advance_decodes(
        self,
        batch: Batch,
        now_ns: int,
        longest_step_ns: int,
        progress: Progress,
        staying: list[Request],
    ) -> None:
        """One more token for each decode (those of earlier steps were settled)."""
        formed_ns = batch.formed_ns
        elapsed_ns = now_ns - formed_ns
        # With several batches in flight the caller knows no single duration of a step.
        cohort_since_ns = formed_ns if self.limits.pipeline_stages == 1 else -2
        gaps_ns = progress.gaps_ns
        stay = staying.append
        for request in batch.decodes or ():
            request.computed_tokens += 1
            request.execution_ns += elapsed_ns
            gap_ns = longest_step_ns
            if request.last_token_ns != cohort_since_ns:
                gap_ns = now_ns - request.last_token_ns
                gaps_ns.append(gap_ns)
            if gap_ns > request.max_gap_ns:
                request.max_gap_ns = gap_ns
            request.last_token_ns = now_ns
            generated = request.generated_tokens = request.generated_tokens + 1
            if generated < request.output_tokens:
                stay(request)
            else:
                progress.finished.append(request)
        progress.cohort_size = len(batch.decodes or ()) - len(gaps_ns)

    def _advance_chunk(
        self, batch: Batch, chunk: Chunk, now_ns: int, progress: Progress, staying: list[Request]
    ) -> None:
        """The piece is read; if it was the last one, the next output token comes with it."""
        request = chunk.request
        request.computed_tokens += chunk.new_tokens
        request.execution_ns += now_ns - batch.formed_ns
        progress.prefill_tokens += chunk.new_tokens
        if request.computed_tokens < request.reached_tokens:
            staying.append(request)
            return
        self._prefilling.discard(request.request_id)
        request.generated_tokens += 1
        progress.decode_tokens += 1
        if request.first_token_ns < 0:
            request.first_token_ns = now_ns
            progress.first_tokens.append(request)
        else:
            gap_ns = now_ns - request.last_token_ns
            progress.gaps_ns.append(gap_ns)
            progress.resumed.append(request)
            request.max_gap_ns = max(request.max_gap_ns, gap_ns)
        request.last_token_ns = now_ns
        done = request.generated_tokens >= request.output_tokens
        (progress.finished if done else staying).append(request)

    def _stamp(self, chunks: list[Chunk], now_ns: int) -> None:
        for chunk in chunks:
            request = chunk.request
            if request.first_scheduled_ns < 0:
                request.first_scheduled_ns = now_ns
            if request.first_token_ns < 0 and (
                chunk.context_tokens + chunk.new_tokens == request.prompt_tokens
            ):
                request.prefill_scheduled_ns = now_ns

    def _leap_steps(self, plan: Plan, now_ns: int) -> int:
        """How many iterations may be taken at once, this one included."""
        if plan.chunks or self.idle:
            return 1
        if self._preempted or self._failed:
            return 1  # an eviction makes room for an admission; failures are told at the end
        if not self.limits.leap or self.limits.pipeline_stages > 1:
            return 1
        steps = self.leap_limit(plan)
        if steps <= 1:
            return 1
        for request in plan.decodes:
            if request.last_token_ns != now_ns:
                return 1  # its first gap is longer than the step: take that one alone
            left = request.output_tokens - request.generated_tokens
            if left < steps:
                steps = left
        if steps > 1 and self.grows:
            steps = min(steps, 1 + self._steps_until_pool_is_dry(plan.decodes))
        return max(steps, 1)

    def _steps_until_pool_is_dry(self, decodes: list[Request]) -> int:
        """Further steps whose blocks can all be had.

        Each member takes a block once every `block_size` steps; the phases sorted give the step
        at which the first block is lacking.
        """
        spare = self.spare_blocks()
        if spare < 0:
            return 0
        size = self.block_size
        phases = [
            (r.kv_blocks * size - r.prompt_tokens - r.generated_tokens) % size for r in decodes
        ]
        rounds, more = divmod(spare, len(phases))
        if more:
            phases.sort()
            return rounds * size + phases[more]
        return rounds * size + min(phases)


def _shape_of(plan: Plan) -> BatchShape:
    """The cost-relevant shape; a chunk of one token counts as a decode, whoever's it is."""
    contexts = [request.computed_tokens for request in plan.decodes]
    shape = BatchShape(sequences=len(plan))
    for chunk in plan.chunks:
        if chunk.new_tokens == 1:
            contexts.append(chunk.context_tokens)
        else:
            shape.prefill_new.append(chunk.new_tokens)
            shape.prefill_context.append(chunk.context_tokens)
    if contexts:
        shape.decode_count = len(contexts)
        shape.decode_context_sum = sum(contexts)
        shape.decode_context_max = max(contexts)
        shape.decode_context_min = min(contexts)
    return shape
