"""A scheduler that lacks only its policy: subclass it and write `form_batch`.

Owns the admitted requests (residents: idle, or members of a batch in flight), the life of a batch
(formed, leaps settled, completed) and the progress of its members. Queue, blocks and handoff are
the ledger's. Vidur's five policies and the user's own derive from it. Blocks are counted, not
named: no prefix sharing here.

A member is a *decode* (its prompt is complete; one token a step) or a *chunk* (a piece of prompt
or of a recomputation). The pass over the last piece yields the next output token. A policy may
read `request.max_output_tokens`, never `output_tokens`.

Leaps: when a batch holds decodes only, no request is left idle, and `leap_limit` says for how long
admission cannot change its mind, the next iterations are the same batch. The run is cut where
the first member ends and where the pool would run out.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, final

from mypy_extensions import mypyc_attr

from emu.config.schema import SchedulerTable
from emu.latency.base import BatchShape, next_decode_shape
from emu.request import Request
from emu.scheduling.base import Batch, Chunk, Progress, ReplicaLimits, Scheduler
from emu.scheduling.faithful import check_faithful

UNLIMITED: Final = sys.maxsize


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


def _by_deadline(request: Request) -> tuple[int, int]:
    urgency = request.deadline_ns if request.deadline_ns >= 0 else 1 << 62
    return urgency, request.arrival_ns


_ORDER_KEYS: Final[Mapping[str, Callable[[Request], Any]]] = MappingProxyType(
    {
        "arrival": attrgetter("arrival_ns"),
        "fair": attrgetter("arrival_ns"),
        "priority": attrgetter("priority", "arrival_ns"),
        "deadline": _by_deadline,
    }
)


@mypyc_attr(allow_interpreted_subclasses=True)
class SimpleScheduler(Scheduler):
    """Everything of a scheduler but the policy."""

    orders_idle = False
    """True: `form_batch` itself leaves in `self.idle` exactly those that it did not take."""

    def __init__(self, table: SchedulerTable, limits: ReplicaLimits) -> None:
        check_faithful(table.quirks)
        super().__init__(table, limits, max_num_seqs=table.places(limits.pipeline_stages))
        self.pool = self.ledger.pool
        self.idle: list[Request] = []
        """Admitted requests that are in no batch in flight, in the order that the policy keeps."""
        self.order_key: Callable[[Request], Any] = _ORDER_KEYS[table.order]
        """Sort key of running requests: the largest is the first to be preempted."""
        self._residents: dict[int, Request] = {}
        self._prefilling: set[int] = set()
        self._in_flight: dict[int, Batch] = {}
        self._preempted: list[Request] = []
        self._next_batch_id = 0
        self._unschedulable_blocks = "hopeless_head_blocks" in table.quirks

    # For the subclass.
    @abstractmethod
    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Put the members of the next iteration into `plan`; leave it empty if none can run.

        At hand: `self.idle`, `self.candidates()`, `self.admit`, `self.grow`, `self.preempt`,
        `self.free_blocks`. A request admitted here must be in the plan (as `read`).
        """

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

    @property
    def free_blocks(self) -> int:
        """Blocks that are free."""
        return self.pool.blocks_free

    @property
    def running_count(self) -> int:
        """Admitted requests, detached ones not counted."""
        return len(self._residents)

    def is_prefilling(self, request: Request) -> bool:
        """Its prompt (or recomputation) is not complete: it runs as chunks, not as a decode."""
        return request.request_id in self._prefilling

    def candidates(self) -> Iterator[Request]:
        """Waiting requests to try, head first.

        The next one comes only after the last one was admitted, unless `skip_blocked` lets later
        requests pass. A head that could never be admitted fails here and blocks no request.
        """
        queue = self.ledger.queue
        while queue:
            head = queue.head()
            yield head
            if not queue or queue.head() is not head:
                continue
            reason = "" if self._unschedulable_blocks else self.never(head)
            if reason:
                queue.remove(head)
                self.ledger.failed.append((head, reason))
            elif self.table.skip_blocked:
                break
            else:
                return
        yield from list(islice(queue, 1, None))

    def admit(self, request: Request, blocks: int) -> None:
        """The waiting request joins the residents and takes `blocks` free blocks."""
        queue = self.ledger.queue
        queue.remove(request)
        queue.charge(request.tenant, request.prompt_tokens)
        request.computed_tokens = 0
        self.pool.hand_over(request, blocks, self.pool.take(blocks))
        self._residents[request.request_id] = request
        self._prefilling.add(request.request_id)

    def preempt(self, request: Request) -> None:
        """An idle resident loses its KV and goes to the head of the queue; it is read again later.

        Everything that it has reached counts as prompt then, and that pass yields its next token.
        """
        self.idle.remove(request)
        self._restart(request)

    def grow(self, request: Request, tokens: int) -> bool:
        """Make sure that the resident has blocks for `tokens` tokens; False if they lack."""
        if tokens <= request.kv_blocks * self.block_size:
            return True
        if self.pool.need(request, tokens) > self.pool.blocks_free:
            return False
        self.pool.grow(request, request.computed_tokens, tokens)
        return True

    # Hooks.
    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        return super().can_ever_hold(request) or self.never(request)

    def never(self, request: Request) -> str:
        """Empty, or why a waiting request could not be admitted even if the pool were empty.

        The reason names limits, not the request's own sizes, so that equal cases count together.
        """
        if self.blocks_for(request) > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        return ""

    def _return(self, members: list[Request]) -> None:
        """Members of a batch that ended become idle again, in the order of the batch."""
        self.idle += members

    def _retire(self, finished: list[Request]) -> None:
        """Members of a batch that ended have left; their blocks become free."""
        for request in finished:
            self.pool.release(request)

    def _welcome(self, requests: Sequence[Request]) -> None:
        """Requests that come with their KV become idle."""
        self.idle += requests

    def _drop_idle(self, request: Request) -> bool:
        """Take the resident out of the idle ones; False if it is in flight."""
        if request not in self.idle:
            return False
        self.idle.remove(request)
        return True

    def _idle_ids(self) -> list[int]:
        return [request.request_id for request in self.idle]

    def _other_blocks(self) -> int:
        """Blocks held by neither residents, nor detached requests, nor reservations."""
        return 0

    # The protocol: batches.
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
                self.ledger.queue.charge(request.tenant, request.generated_tokens)
            self._retire(progress.finished)
        if self.ledger.failed:
            progress.failed = self.ledger.take_failed()
        return progress

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change."""
        left = batch.max_steps - batch.steps_settled
        if left <= 0 or self._idle_ids() or batch.batch_id not in self._in_flight:
            return False
        if self.grows and self._steps_until_pool_is_dry(batch.decodes or []) < left:
            return False
        if self.waiting_count and self.never(self.ledger.queue.head()):
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

    # The protocol: coming and leaving.
    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """Requests at the head that could not run even on an empty replica, removed."""
        dropped, queue = self.ledger.take_failed(), self.ledger.queue
        while queue.count:
            request = queue.head()
            reason = self.never(request)
            if not reason:
                break
            queue.remove(request)
            dropped.append((request, reason))
        return dropped

    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks; False if it is not here."""
        if self._residents.get(request.request_id) is request:
            self._depart(request)
            self.pool.release(request)
            return True
        return self.ledger.queue.remove(request)

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        self._depart(request)
        self.ledger.hold(request)

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        """Reserved requests, KV complete, join the running set."""
        super().activate(requests, now_ns)
        self._join(requests)

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests of this very replica join its running set."""
        super().adopt(requests, now_ns)
        self._join(requests)

    def evacuate(self) -> list[Request]:
        """Waiting and running requests leave, KV lost; the pool is empty."""
        running = list(self._residents.values())
        self._residents.clear()
        self._prefilling.clear()
        self._in_flight.clear()
        self.idle = []
        self._preempted = []
        return self.ledger.evacuate(running)

    # The protocol: seeing.
    def residents(self) -> Iterable[Request]:
        """Running requests, in order of admission."""
        return self._residents.values()

    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        wrong = self.ledger.recount(list(self._residents.values()), self._other_blocks())
        placed = self._idle_ids()
        for batch in self._in_flight.values():
            placed += [request.request_id for request in batch.decodes or ()]
            placed += [chunk.request.request_id for chunk in batch.chunks]
        if sorted(placed) != sorted(self._residents):
            wrong.append(f"idle and in flight {sorted(placed)}, running {sorted(self._residents)}")
        return wrong

    # Inside.
    def _join(self, requests: Sequence[Request]) -> None:
        """Requests that came with their KV run at once."""
        for request in requests:
            del self.ledger.arrived[request.request_id]
            self._residents[request.request_id] = request
            if request.computed_tokens < request.reached_tokens - 1 or not request.generated_tokens:
                self._prefilling.add(request.request_id)
        self._welcome(requests)

    def _depart(self, request: Request) -> None:
        """The resident leaves the running set, and the batch in flight if it is in one."""
        del self._residents[request.request_id]
        self._prefilling.discard(request.request_id)
        self.ledger.queue.charge(request.tenant, request.generated_tokens)
        if self._drop_idle(request):
            return
        for batch in self._in_flight.values():
            if batch.decodes and request in batch.decodes:
                batch.decodes.remove(request)
            batch.chunks = [chunk for chunk in batch.chunks if chunk.request is not request]

    def _restart(self, victim: Request) -> None:
        """Preempt a resident that the policy has taken out of `idle` already."""
        del self._residents[victim.request_id]
        self.pool.release(victim)
        self._lose_progress(victim)
        self._prefilling.discard(victim.request_id)
        if self.ledger.requeue(victim):
            self._preempted.append(victim)

    def _lose_progress(self, victim: Request) -> None:
        victim.recomputed_tokens += victim.computed_tokens
        victim.computed_tokens = 0

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
        if self._preempted or self.ledger.failed:
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
    """The cost-relevant shape; every chunk of one token counts as a decode."""
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
