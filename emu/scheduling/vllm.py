"""Continuous batching as in vLLM's current scheduler, exact and in constant time per decode step.

**The rule** (LLMServingSim sections 5 and 6; `_walk_running`, then `_admit_waiting`). One budget of
tokens for the iteration. First the running list, in order of admission: each request gets its next
tokens while the budget lasts; where blocks lack, the request admitted last is preempted (in the end
the request itself, and the walk is over). Then, if none was preempted, the waiting queue: the head
is admitted while budget, places (`max_num_seqs`) and blocks last; one that does not fit blocks the
rest. Computed tokens advance when a batch is formed, generated ones when it ends.

**Why an iteration costs O(prefill chunks + log n), not O(running).** Plain decodes advance together
in the cohort: one counter moves for all. A prompt, a recomputation, a request that came with its KV
run beside it. The running list is then served without a walk (`_serve_together`), with the same
result, which tests compare:

* If the tokens suffice, every request is served whatever the order. If blocks do not suffice, the
  walk ends with the largest prefix of the running list whose needs fit into what is free after
  the rest was preempted from its tail: at each failing allocation exactly one more of the tail
  goes, and none before the failing one is touched. So: while the sum of needs exceeds what is
  free, preempt the last.
* Only if the token budget runs out before a request that is older than some cohort member does the
  order matter. Then the cohort is dissolved and the list is walked.
* Within a step fresh blocks are interchangeable (emu/kv/blocks.py), so members take theirs
  together; blocks are indexed in order of admission, because of equal keys the newest wins.

Groups of layers that keep different things (`GroupedPool`) have a cohort too where nothing is found
again: members then take and leave behind their blocks one by one, a whole leap at a time. Where
blocks might not do for all, whatever windows leave behind, the list is walked.

With pipeline stages > 1, tokens of different members are pending in different batches: no request
joins the cohort, and every iteration that is formed walks the running list. Its leaps are rotations
(`emu/scheduling/rotation.py`).

**Leaps.** A promise is the number of steps, the one in flight included, in which no request ends,
none can be admitted and no block can be lacking. A caller that changes the counts asks whether it
still holds (`leap_holds`). A batch that ends prompts while none waits *runs on*: the batches after
it are a decode run of its members (`run_on`).

**Ahead** (`forms_ahead`, vLLM's default since 0.14). The engine forms batch n+1 when batch n
starts. Seen from the end of batch n, where this emulator forms the next batch, that means: a
request is seen one batch late; what ended with batch n keeps its place and its blocks while batch
n+1 is formed (the engine knows that it ends, so it is no longer a member); an engine with nothing
to run looks again at once. Leaps stay exact: requests not seen yet, and places and blocks about to
be free, end a leap after one iteration unless they could change nothing. One stage only: a pipeline
already keeps several batches in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

from mypy_extensions import mypyc_attr

from emu.config.schema import VllmTable
from emu.kv.blocks import BlockPool
from emu.kv.counting import NO_HIT, CountingPool, Hit
from emu.kv.grouped import GroupedPool
from emu.kv.groups import KvLayout
from emu.kv.tiers import LowerTier
from emu.latency.base import BatchShape, Verify, Work
from emu.request import Request
from emu.scheduling.base import (
    Batch,
    Chunk,
    Progress,
    Recall,
    ReplicaLimits,
    RunOn,
    add_chunk,
)
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.ledger import Ledger
from emu.scheduling.looking import LookingScheduler
from emu.scheduling.parts import Drafting, Part
from emu.scheduling.queues import arrival_order, make_queue
from emu.scheduling.rotation import Rotation, Turn
from emu.scheduling.running import Record, RunningSet
from emu.scheduling.verifying import VerifyingSet
from emu.units import ceil_div

UNLIMITED: Final = 1 << 62
NO_SHAPE: Final = BatchShape()
"""Until the cohort's is known."""
_EVER: Final = 1 << 63

# Why the head of the waiting queue was not admitted.
FREE: Final = 0
"""None waits, or the queue was served as far as the budget goes."""
BLOCKED_FOR_GOOD: Final = 1
"""The head waits for a place or for budget: decoding alone cannot change that."""
BLOCKED_BY_KV: Final = 2
"""The head waits for blocks (or needs a shorter remainder): a longer prefix hit may help."""


@final
class Forming:
    """An iteration while it is formed."""

    now_ns: int
    budget: int
    """Tokens that are left of `max_num_batched_tokens`."""
    shape: BatchShape
    records: list[Record]
    """Members outside the cohort."""
    chunks: list[Chunk]
    recalls: list[Recall]
    preempted: list[Request]

    __slots__ = ("budget", "chunks", "now_ns", "preempted", "recalls", "records", "shape")

    def __init__(self, now_ns: int, budget: int, shape: BatchShape) -> None:
        self.now_ns = now_ns
        self.budget = budget
        self.shape = shape
        self.records = []
        self.chunks = []
        self.recalls = []
        self.preempted = []


@mypyc_attr(allow_interpreted_subclasses=True)
class VllmScheduler(LookingScheduler):
    """One replica's scheduler, for stepping and leaping alike."""

    def __init__(
        self,
        table: VllmTable,
        limits: ReplicaLimits,
        *,
        tiers: Sequence[LowerTier] = (),
        walks: bool = False,
        running_set: type[RunningSet] = RunningSet,
        parts: Sequence[Part] = (),
    ) -> None:
        """`tiers`: KV tiers below the GPU pool, used only with prefix caching. `walks`: without a
        cohort, every iteration by the rule. `parts`: what features of the replica do here, in the
        order of asking."""
        ahead = limits.forms_ahead
        self.parts = parts
        self._parts = tuple(parts)
        self._timed = tuple(part for part in parts if part.sees_time)
        self._eviction = next((part for part in parts if part.chooses_victims), None)
        drafting = next((part for part in parts if isinstance(part, Drafting)), None)
        assert not ahead or limits.pipeline_stages == 1
        # What allows neither a cohort nor a rotation: each iteration is formed by the rule.
        caches = limits.prefix_caching and table.prefix_caching
        # Blocks of groups that can be found again are told apart by the order in which they come.
        walks = walks or (limits.kv_layout is not None and (caches or drafting is not None))
        walks = walks or any(part.forbids_cohort for part in parts)
        pool = _pool(parts, limits, tiers, drafting, caches=caches)
        layout = limits.kv_layout
        self._clips = caches and layout is not None and layout.has_states
        self.block_pool = pool if isinstance(pool, BlockPool) else None
        super().__init__(
            table,
            limits,
            ledger=Ledger(pool, make_queue(table.order)),
            max_num_seqs=table.requests_max,
        )
        self.settings = table
        self._grouped = pool if isinstance(pool, GroupedPool) else None
        self._in_flight_tokens = table.tokens_max * (2 if ahead else 1)
        """Tokens planned and not confirmed, at most."""
        self._drafting = drafting
        self._verifying: VerifyingSet | None = None
        self._lookahead = 0
        self.running: RunningSet
        if drafting is None:
            self.running = running_set(self.ledger, limits, frees_late=ahead)
        else:
            self._lookahead = drafting.lookahead_tokens
            self.running = self._verifying = VerifyingSet(
                self.ledger, limits, drafting, frees_late=ahead
            )
        self.running.parts = parts
        self.pool = pool
        self._cohort = self.running.cohort
        self._blocked = FREE
        self._set_up_promises(walks=walks)

    def _set_up_promises(self, *, walks: bool) -> None:
        """What may be taken together. `walks`: each iteration is formed by the rule."""
        table, limits = self.settings, self.limits
        self._stages = limits.pipeline_stages
        self._each_step = 1 if self._grouped is None else self._grouped.most_blocks(1)
        """Blocks that a decode takes in a step at most."""
        self._joins = self._stages == 1 and not walks
        self._budget = table.tokens_max
        self._threshold = table.long_prefill_token_threshold or UNLIMITED
        # The KV of the last output token is never computed.
        tokens = min(limits.max_model_tokens, limits.num_blocks * limits.block_size + 1)
        is_plain = table.chunked_prefill and limits.kv_layout is None and self._drafting is None
        self._holds_tokens = tokens if is_plain else 0
        """Prompt and output of a request that can be held, whatever else is to be asked."""
        is_counted = self.block_pool is None and self._grouped is None
        self._can_run_on = limits.leap and is_counted and self._joins
        self._rotates = (
            limits.leap and self._stages > 1 and type(self.pool) is CountingPool and not walks
        )

    # Forming a batch.
    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration; None if nothing can run or all stages are taken."""
        if not self._ahead:
            return self._form(now_ns)
        if self._unseen.count:
            self._see(self.running.last_start_ns)  # the last batch started: this one was formed
        batch = self._form(now_ns)
        if batch is None and not self.running.records:
            self.running.free_ended()
            self._see(now_ns)
            batch = self._form(now_ns)
        return batch

    def _form(self, now_ns: int) -> Batch | None:
        for part in self._timed:
            part.see_time(now_ns)
        running, cohort = self.running, self._cohort
        if len(running.records) >= self._stages:
            return None
        if self.ledger.arrived:
            running.admit_arrived(self.max_num_seqs)
        count = len(running.requests)
        if not count and not self._queue.count:
            return None
        if running.beside:
            if self._joins and count <= self._budget:
                running.join_ready(now_ns)
        elif not self._queue.count and count <= self._budget:
            blocks_free = self.pool.blocks_free
            if count * self._each_step <= blocks_free or (
                self._grouped is None and cohort.blocks_next() <= blocks_free
            ):
                return self._form_decodes(now_ns)
        return self._form_any(now_ns, count)

    def _form_any(self, now_ns: int, count: int) -> Batch | None:
        """The running list, in which `count` requests are, then the waiting queue."""
        running, cohort = self.running, self._cohort
        has_cohort = cohort.count > 0
        forming = Forming(now_ns, self._budget, NO_SHAPE if has_cohort else BatchShape())
        if self._grouped is not None:
            self._grouped.begin_step()
        if self._parts:
            self._begin_step()
        if self._verifying is not None:
            forming.shape.verify = self._overrun(self._verifying, forming)
        if not has_cohort:
            self._walk_running(forming)
        elif not self._serve_together(forming):
            forming.shape = BatchShape()
            self._walk_running(forming)
        has_evicted = len(running.requests) < count
        self._blocked = FREE
        if self._queue.count and not (has_evicted and (running.requests or running.records)):
            self._admit_waiting(forming)
        if not forming.records and not cohort.count:
            if not (has_evicted and self.ledger.arrived):
                return None
            batch = self._form(now_ns)  # requests that came with their KV find a place now
            if batch is not None:
                batch.preempted = [*forming.preempted, *batch.preempted]
            return batch
        return self._launch(forming, has_evicted)

    def _begin_step(self) -> None:
        """Features see the running requests before members are chosen."""
        requests = [one.request for one in self.running.requests.values()]
        for part in self._parts:
            part.begin_step(requests)

    def _form_decodes(self, now_ns: int) -> Batch:
        """An iteration, or leap, of the cohort alone: nothing else is here."""
        running = self.running
        shape = self._cohort.next_shape()
        for filler in running.start_cohort_step():
            running.index_filled(filler)
        self._blocked = FREE
        has_freed = running.free_ended() if running.leaving else False
        batch_id = running.next_batch_id
        running.next_batch_id = batch_id + 1
        running.records[batch_id] = []
        running.leaping = batch = Batch(
            batch_id, shape, [], self._leap_steps(now_ns, has_freed), now_ns
        )
        return batch

    def _launch(self, forming: Forming, has_evicted: bool) -> Batch:
        """The batch is formed; whether it is the first of a leap."""
        running, records = self.running, forming.records
        forming.shape.sequences = self._cohort.count + len(records)
        if self._parts:
            forming.shape.works = self._works(records)
        has_freed = (running.free_ended() if running.leaving else False) or has_evicted
        batch_id = running.next_batch_id
        running.next_batch_id = batch_id + 1
        batch = Batch(batch_id, forming.shape, forming.chunks, 1, forming.now_ns)
        if self._cohort.count:
            running.leaping = batch
            if not records:
                batch.max_steps = self._leap_steps(forming.now_ns, has_freed)
        else:
            batch.decodes = [r.request for r, _, _ in records if not r.prefilling]
        batch.preempted = forming.preempted
        batch.recalls = forming.recalls
        running.records[batch_id] = records
        return batch

    # The running list.
    def _walk_running(self, forming: Forming) -> None:
        """The rule: running requests in order of admission; blocks lack: preempt the last."""
        pool = self.pool
        for running in list(self.running.requests.values()):
            if not running.is_alive:
                continue  # preempted in this walk
            request = running.request
            new = request.prompt_tokens + request.generated_tokens - request.computed_tokens
            if new <= 0:
                assert running.pending, "a running request has nothing to compute"
                continue
            if running.drafts:
                new += running.drafts
                new = min(new, self.limits.max_model_tokens - 1 - request.computed_tokens)
            new = min(new, self._threshold, forming.budget)
            if new == 0:
                return
            if self._clips or self._parts:
                new = self._limited(running, new)
                if new == 0:
                    continue
            lacks = pool.need(request, self._slots(running, new)) > pool.blocks_free
            if not lacks or self._free_blocks(running, new, forming):
                forming.budget -= new
                self._serve(running, new, NO_HIT, forming)
            elif self._eviction is None:
                return

    def _limited(self, running: RunningRequest, new: int) -> int:
        """New tokens of a running request that block boundaries and features allow."""
        request = running.request
        if self._clips and running.prefilling:
            new = self._clipped(request, request.computed_tokens, new, running.junction_tokens)
        return self._allowed(request, request.computed_tokens, new) if new else 0

    def _free_blocks(self, needy: RunningRequest, new: int, forming: Forming) -> bool:
        """Preempt until the request has blocks for its new tokens; False if it goes itself."""
        pool = self.pool
        while True:
            last = self._victim(needy, forming)
            self._preempt(last, forming)
            if last is needy:
                return False
            if pool.need(needy.request, self._slots(needy, new)) <= pool.blocks_free:
                return True

    def _allowed(self, request: Request, had: int, new: int) -> int:
        """New tokens of a request that all features allow; `had` are computed already."""
        for part in self._parts:
            new = part.fit(request, had, new)
            if new == 0:
                return 0
        return new

    def _works(self, records: Sequence[Record]) -> Sequence[Work]:
        """What features add to a batch of these members."""
        members = [(running.request, new) for running, new, _ in records]
        works: list[Work] = []
        for part in self._parts:
            work = part.work(members)
            if work is not None:
                works.append(work)
        return works

    def _victim(self, needy: RunningRequest, forming: Forming) -> RunningRequest:
        """The request that loses its blocks to `needy`: the last, or one not in this batch."""
        if self._eviction is None:
            return self.running.last()
        served = {one.admission for one, _, _ in forming.records}
        open_ = [one for one in self.running.requests.values() if one.admission not in served]
        chosen = self._eviction.victim(needy.request, [one.request for one in open_])
        return open_[chosen]

    def _slots(self, running: RunningRequest, new: int) -> int:
        """Tokens that a running request needs slots for if it computes so many now."""
        request = running.request
        had = request.computed_tokens
        if self._verifying is None:
            return had + new
        if self._ahead and running.optimistic_tokens > had:
            had = running.optimistic_tokens
        target = had + new
        return max(target, min(target + self._lookahead, self.limits.max_model_tokens))

    def _overrun(self, verifying: VerifyingSet, forming: Forming) -> Verify:
        """What drafts add to the batch; first of all sequences that have ended meanwhile."""
        verify = Verify()
        for context in verifying.overruns:
            verify.count += 1
            verify.tokens += 1 + verifying.drafting.tokens
            verify.context_sum += context
        forming.budget -= min(forming.budget, verify.tokens)
        verifying.overruns.clear()
        return verify

    def _serve_together(self, forming: Forming) -> bool:
        """The cohort as a whole, and what runs beside it, as the walk would have it.

        False, with the cohort dissolved, if the budget makes the order matter.
        """
        cohort, running = self._cohort, self.running
        plan: list[tuple[RunningRequest, int]] = []
        if running.beside or cohort.count > self._budget:
            found = self._plan_beside()
            if found is None:
                running.dissolve()
                return False
            plan = found
        # What is computed has its blocks: so many tokens more need no more than this.
        most = self._budget // self.block_size + len(plan) + cohort.count
        if most * self._each_step > self.pool.blocks_free:
            if self._grouped is not None:
                running.dissolve()
                return False
            self._make_room(plan, forming)
        fillers: Sequence[RunningRequest] = ()
        if cohort.count:
            forming.shape = cohort.next_shape()
            fillers = running.start_cohort_step()
        else:  # all of them were preempted
            forming.shape = BatchShape()
        forming.budget -= cohort.count
        at = 0
        for one, new in plan:
            while at < len(fillers) and fillers[at].admission < one.admission:
                running.index_filled(fillers[at])
                at += 1
            forming.budget -= new
            if self._grouped is not None:  # to ask is to leave behind what its windows let it
                self._grouped.need(one.request, one.request.computed_tokens + new)
            self._serve(one, new, NO_HIT, forming)
        for filler in fillers[at:]:
            running.index_filled(filler)
        return True

    def _plan_beside(self) -> list[tuple[RunningRequest, int]] | None:
        """New tokens of each request beside the cohort once the whole cohort is served.

        None if the budget ends before one that is older than some member: the order matters.
        """
        cohort = self._cohort
        left = self._budget - cohort.count
        if left < 0:
            return None
        plan: list[tuple[RunningRequest, int]] = []
        for running in self.running.beside.values():
            request = running.request
            new = request.prompt_tokens + request.generated_tokens - request.computed_tokens
            if new <= 0:
                assert running.pending, "a running request has nothing to compute"
                continue
            if new > self._threshold:
                new = self._threshold
            if new > left:
                if cohort.newest_admission > running.admission:
                    return None
                new = left
                if new == 0:
                    break
            plan.append((running, new))
            left -= new
        return plan

    def _make_room(self, plan: list[tuple[RunningRequest, int]], forming: Forming) -> None:
        """Preempt from the tail until the blocks of all that remain can be had."""
        pool = self.pool
        need = sum(pool.need(r.request, r.request.computed_tokens + new) for r, new in plan)
        while need + self._cohort.blocks_next() > pool.blocks_free:
            last = self.running.last()
            if plan and plan[-1][0] is last:
                _, new = plan.pop()
                need -= pool.need(last.request, last.request.computed_tokens + new)
            self._preempt(last, forming)

    def _preempt(self, running: RunningRequest, forming: Forming) -> None:
        """Recompute later: its blocks are free, the request waits at the front (or fails)."""
        request = running.request
        self.running.remove(running)
        self.pool.release(request)
        request.computed_tokens = 0
        if self.ledger.requeue(request):
            forming.preempted.append(request)

    def _serve(self, running: RunningRequest, new: int, hit: Hit, forming: Forming) -> None:
        """Put `new` tokens of a request outside the cohort into the batch."""
        request = running.request
        had = request.computed_tokens
        target = had + new
        verify = forming.shape.verify
        if verify is None:
            self.pool.grow(request, had, target, hit)
        else:
            ahead_tokens = self._slots(running, new) - target
            self.pool.grow(request, running.indexed_tokens, target, hit, ahead_tokens)
            reached = request.prompt_tokens + request.generated_tokens
            running.indexed_tokens = min(target, reached)
            running.optimistic_tokens = target
            if target >= reached:
                verify.drafting += 1
                verify.drafting_context_sum += target
        if self._parts:
            for part in self._parts:
                part.commit(request)
        request.computed_tokens = target
        running.pending += new
        forming.records.append((running, new, target))
        if running.prefilling:
            forming.chunks.append(Chunk(request, new, had))
            if request.generated_tokens == 0 and target >= request.prompt_tokens:
                request.prefill_scheduled_ns = forming.now_ns
        if verify is not None and new > 1 and not running.prefilling:
            verify.count += 1
            verify.tokens += new
            verify.context_sum += had
        else:
            add_chunk(forming.shape, new, had)

    # The waiting queue.
    def _admit_waiting(self, forming: Forming) -> None:
        """Admission never preempts; a head that does not fit blocks those behind it."""
        queue = self._queue
        passed: Iterator[Request] | None = None
        while queue.count and forming.budget > 0 and not self._is_full():
            request = queue.head() if passed is None else next(passed, None)
            if request is None:
                return
            hit, new = NO_HIT, 0
            may_run = not self._parts or self.running.may_run(request)
            if may_run:
                hit = self.pool.lookup(request)
                new = self._fit(request, hit, forming.budget)
            if new == 0:
                self._blocked = BLOCKED_BY_KV
                if may_run and not self.settings.skip_blocked:
                    return  # (one that a feature keeps from running is passed by)
                if passed is None:
                    passed = iter(list(queue)[1:])
                continue
            queue.remove(request)
            self._note_admission(request, hit, forming.now_ns)
            if hit is not NO_HIT:
                request.computed_tokens = hit.tokens
            admitted = self.running.admit(request)
            admitted.junction_tokens = hit.junction_tokens
            self._serve(admitted, new, hit, forming)
            if hit.recall_bytes:
                recall = Recall(hit.tier, hit.recall_bytes, request, hit.lower_tokens)
                forming.recalls.append(recall)
            forming.budget -= new
        if queue.count and self._blocked == FREE:
            self._blocked = BLOCKED_FOR_GOOD

    def _note_admission(self, request: Request, hit: Hit, now_ns: int) -> None:
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

    def _is_full(self) -> bool:
        """No place is free."""
        running = self.running
        return len(running.requests) + len(running.leaving) >= self.max_num_seqs

    def _fit(self, request: Request, hit: Hit, budget: int) -> int:
        """Tokens of a waiting request that can be computed now; 0 = it must wait."""
        had = hit.tokens
        reached = request.prompt_tokens + request.generated_tokens
        new = min(reached - had, self._threshold)
        if new > budget:
            if not self.settings.chunked_prefill:
                return 0
            new = budget
        if self._clips:
            new = self._clipped(request, had, new, hit.junction_tokens)
            if new == 0:
                return 0
        if self._parts:
            new = self._allowed(request, had, new)
            if new == 0:
                return 0
        if self._grouped is not None:
            slots = had + new
            if self._lookahead:
                slots = max(slots, min(slots + self._lookahead, self.limits.max_model_tokens))
            whole = reached if self.settings.reserve_full_sequence else 0
            fits = self._grouped.fits(request, whole, slots, hit, self._in_flight_tokens)
            return new if fits else 0
        wanted = reached if self.settings.reserve_full_sequence else had + new
        if self._lookahead:
            slots = min(had + new + self._lookahead, self.limits.max_model_tokens)
            wanted = max(wanted, slots)
        return new if self.pool.need(request, wanted, hit) <= self.pool.blocks_free else 0

    def _clipped(self, request: Request, had: int, new: int, junction: int) -> int:
        """New tokens of a prompt so that its steps end where a state can be found again.

        A state exists only where a step ends. So a chunk stops at a block boundary: the last one
        that it reaches, the next one if it starts inside a block, the last one of the prompt, and
        the one where others go on otherwise (`junction`). 0: it waits for a step with room up to
        the next boundary. A block wider than any step is filled in parts.
        """
        layout = self.limits.kv_layout
        assert layout is not None
        size, reached = layout.block_tokens, request.prompt_tokens + request.generated_tokens
        prompt_end = max(request.prompt_tokens, reached - 1)
        if had >= prompt_end:
            return new
        end = had + new
        if end < prompt_end:
            boundary = end // size * size
            if boundary > had or size <= min(self._budget, self._threshold):
                end = boundary
        stops = [(reached - 1) // size * size]
        if had % size:
            stops.append((had // size + 1) * size)
        if had < junction < end:
            stops.append(had + (junction - had) // size * size)
        return max(0, min([stop for stop in stops if had < stop < end], default=end) - had)

    # Leaps.
    def _leap_steps(self, now_ns: int, has_freed: bool) -> int:
        """Iterations, this one included, that are certainly formed like this one."""
        cohort, running = self._cohort, self.running
        if not self.limits.leap or running.beside or now_ns != running.cohort_end_ns:
            return 1
        if self._unseen.count and (not self._queue.count or self._may_pass()):
            return 1
        if has_freed and (
            self.ledger.arrived or (self._queue.count and not self._is_head_blocked())
        ):
            return 1  # this time the queue was not asked; the next iteration may admit its head
        steps = cohort.steps_to_first_end()
        if self._grouped is not None and self._blocked == BLOCKED_BY_KV:
            return 1  # what windows leave behind may let the head in
        if steps > 1:
            steps = 1 + self._steps_that_fit(steps - 1)
        pool = self.block_pool
        if pool is None or steps == 1:
            return steps
        if self._blocked == BLOCKED_BY_KV:
            steps = self._steps_to_longer_hit(pool, steps)
        if pool.tiers:
            # Chunks are on their way, and seen by other replicas, from their own instant on.
            steps = 1 + cohort.steps_before_chunk(steps - 1)
        return steps

    def _steps_that_fit(self, limit: int) -> int:
        """Steps up to `limit` for which the cohort certainly has its blocks."""
        free, cohort, grouped = self.pool.blocks_free, self._cohort, self._grouped
        if grouped is None:
            return cohort.steps_that_fit(free, limit)
        if cohort.count * grouped.most_blocks(limit) <= free:
            return limit
        size = min(group.block_tokens for group in grouped.layout.groups)
        return min(limit, free // (cohort.count * self._each_step) * size)

    def _is_head_blocked(self) -> bool:
        """Had the waiting queue been asked, no request would have been admitted."""
        if self.settings.skip_blocked:
            return False
        if self._is_full():
            return True
        head = self._queue.head()
        self._blocked = BLOCKED_BY_KV
        return not self._fit(head, self.pool.lookup(head), self._budget - self._cohort.count)

    def _steps_to_longer_hit(self, pool: BlockPool, limit: int) -> int:
        """Iterations before the blocked head may find a longer prefix than now."""
        if not self.settings.reserve_full_sequence:
            return 1  # here even a shorter hit could let the head in
        cohort = self._cohort
        if self.settings.skip_blocked or pool.tiers:
            return 1 + cohort.steps_before_filled_block(limit - 1)
        wanted = pool.keys_wanted(self._queue.head()) if cohort.has_indexers else {}
        size = pool.block_size
        if not wanted or max(wanted) < cohort.least_computed() // size:
            return limit
        for ahead in range(limit - 1):
            for filler in cohort.fillers(ahead):
                position = (cohort.step + ahead + filler.offset) // size - 1
                keys = pool.keys_of(filler.request)
                if position < len(keys) and wanted.get(position) == keys[position]:
                    return ahead + 1
        return limit

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change."""
        left = batch.max_steps - batch.steps_settled
        if self._unseen.count and left and (not self._queue.count or self._may_pass()):
            # The next batch does not see a request that comes now, the one after does; one that
            # came just before the iteration in flight began is seen at its end already.
            left = 0 if self._unseen.first_ns() <= batch.last_start_ns else 1
            batch.max_steps = batch.steps_settled + left
        if self.ledger.arrived or batch is not self.running.leaping or left == 0:
            return False
        if batch.run_on is not None and batch.steps_settled == 1:
            return not self._queue.count and self._surely_fits(
                batch.run_on.shape.decode_count, left
            )
        cohort, blocks_free = self._cohort, self.pool.blocks_free
        each = left * self._each_step
        if cohort.count * each > blocks_free and self._steps_that_fit(left) < left:
            return False
        if not self._queue.count or self._is_full():
            return True
        budget = self._budget - cohort.count
        if budget == 0:
            return True
        if self.settings.skip_blocked or self.block_pool is not None or self._grouped is not None:
            return False
        return self._fit(self._queue.head(), NO_HIT, budget) == 0

    def sees_in(self, batch: Batch, started: int, last_start_ns: int) -> int:
        """See `Scheduler.sees_in`; certain only while nothing but unseen requests waits."""
        if not self._ahead or self._queue.count or self.ledger.arrived:
            return 0
        if self.block_pool is not None or batch is not self.running.leaping:
            return 0
        if started >= batch.max_steps or self._unseen.first_ns() <= last_start_ns:
            return 0
        batch.max_steps = started + 1
        return started + 1

    def _may_pass(self) -> bool:
        """Some unseen request could be admitted before the head of a queue that is not empty."""
        if self.settings.skip_blocked or self.settings.order != "arrival":
            return True
        return self._unseen.first_order() < arrival_order(self._queue.head())

    def run_on(self, batch: Batch) -> RunOn | None:
        """See `Scheduler.run_on`."""
        running, cohort = self.running, self._cohort
        records = running.records[batch.batch_id]
        if not self._can_run_on:
            return None
        if self._queue.count or self._unseen.count or self.ledger.arrived or batch.preempted:
            return None
        if len(records) != len(running.beside):
            return None
        steps = UNLIMITED
        if cohort.count:
            if cohort.late or batch.formed_ns != running.cohort_end_ns:
                return None
            shape = cohort.next_shape()
            steps = cohort.steps_to_first_end() - 1
        else:
            shape = BatchShape()
        size = self.block_size
        for one, _, target in records:
            request = one.request
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
        running.leaping = batch
        return batch.run_on

    def _surely_fits(self, members: int, steps: int) -> bool:
        """So many members have blocks for so many steps, wherever in their last block they are."""
        return members * ceil_div(steps, self.block_size) <= self.pool.blocks_free

    def rotation(self, batches: Sequence[Batch]) -> Rotation | None:
        """See `Scheduler.rotation`."""
        if not self._rotates or (self._queue.count and not self._waits_for_an_end()):
            return None
        return self.running.rotation(batches, self._budget)

    def _waits_for_an_end(self) -> bool:
        """While no request ends, none that waits can be admitted, whatever else is in a batch."""
        if self._is_full():
            return True
        if self.settings.skip_blocked or not self.settings.reserve_full_sequence:
            return False
        head = self._queue.head()
        return self.pool.need(head, head.reached_tokens) > self.pool.blocks_free

    def turn(
        self, turn: Turn, ended: int, formed: int, last_ns: int, gap_ns: int, run_ns: int
    ) -> None:
        """See `Scheduler.turn`."""
        self.running.turn(turn, ended, formed, last_ns, gap_ns, run_ns)

    def resume(self, rotation: Rotation, batches: list[Batch]) -> list[Batch]:
        """See `Scheduler.resume`."""
        return self.running.resume(rotation, batches)

    # The running set.
    @property
    def running_count(self) -> int:
        """Requests that hold KV and run or are about to."""
        return len(self.running.requests) + len(self.ledger.arrived)

    def settle(self, batch: Batch, steps: int) -> None:
        """Take the blocks of the steps up to `steps` of a leap in flight (idempotent)."""
        self.running.settle(batch, steps)

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """See `Scheduler.split`."""
        return self.running.split(batch, steps, now_ns, longest_step_ns)

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        for part in self._timed:
            part.see_time(now_ns)
        return self.running.complete(batch, steps, now_ns, longest_step_ns)

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        self.running.detach(request)

    def prefix_match(self, request: Request) -> int:
        """Prompt tokens of a request that the GPU pool holds (what a router may ask)."""
        pool = self.pool
        return 0 if isinstance(pool, CountingPool) else pool.match(request)

    def residents(self) -> Iterable[Request]:
        """Running requests in order of admission, then those that arrived and wait to be."""
        return self.running.residents()

    def look_up(self, request: Request) -> None:
        """Write the exact token counts of a resident to its request."""
        self.running.look_up(request)

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at the end of each of its steps."""
        return self.running.token_receivers(batch)

    def members(self, batch: Batch) -> list[tuple[Request, int, int]]:
        """(request, tokens computed before, new tokens) of each member of a batch just formed."""
        return self.running.members(batch)

    # Coming and leaving.
    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks. False if it is not here."""
        for part in self._parts:
            part.leave(request)
        return self._unseen.remove(request) or self.running.cancel(request)

    def evacuate(self) -> list[Request]:
        """Everything leaves: waiting requests first, then running ones. The pool is empty."""
        self._see(_EVER)
        return self.ledger.evacuate(self.running.evacuate())

    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        return self.running.recount()

    # Limits.
    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        for part in self._parts:
            if too_large := part.too_large(request):
                return too_large
        longest = request.prompt_tokens + request.max_output_tokens
        if longest <= self._holds_tokens:
            return ""
        if self.limits.kv_layout is not None:
            return self._beyond_layout(self.limits.kv_layout, longest)
        if self._drafting is not None and longest <= self.limits.max_model_tokens:
            blocks = ceil_div(self.slots_held(longest), self.block_size)
            if blocks > self.blocks_total:
                return f"needs {blocks} of the replica's {self.blocks_total} KV blocks"
        if reason := super().can_ever_hold(request):
            return reason
        first_chunk = min(request.prompt_tokens, self._threshold)
        if not self.settings.chunked_prefill and first_chunk > self._budget:
            return f"prompt longer than max_num_batched_tokens {self._budget}, and not chunked"
        return ""

    def _beyond_layout(self, layout: KvLayout, longest: int) -> str:
        """Empty, or why groups of layers cannot hold a request of so many tokens."""
        if longest > self.limits.max_model_tokens:
            return f"longer than the model's {self.limits.max_model_tokens} tokens"
        drafts = 0 if self._drafting is None else self._drafting.tokens
        blocks = layout.blocks_for(
            self.slots_held(longest), in_flight_tokens=self._in_flight_tokens, draft_tokens=drafts
        )
        if blocks > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        return ""

    def slots_held(self, tokens: int) -> int:
        """Slots that a request of so many tokens holds at most when it ends."""
        if self._drafting is None:
            return tokens - 1
        drafts = self._drafting.tokens * (2 if self._ahead else 1)
        return min(tokens - 1 + drafts + self._lookahead, self.limits.max_model_tokens)

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """Heads that cannot be admitted although the replica is empty, removed."""
        dropped = self.ledger.take_failed()
        if self.running.requests or self.running.records or self.ledger.holds_blocks:
            return dropped
        while self._queue.count:
            request = self._queue.head()
            if self._fit(request, self.pool.lookup(request), self._budget):
                break
            self._queue.remove(request)
            for part in self._parts:
                part.leave(request)
            blocks = ceil_div(request.reached_tokens, self.block_size)
            tokens = f"{request.reached_tokens} tokens ({blocks} KV blocks)"
            dropped.append((request, f"{tokens} can never be scheduled"))
        return dropped


def _pool(
    parts: Sequence[Part],
    limits: ReplicaLimits,
    tiers: Sequence[LowerTier],
    drafting: Drafting | None,
    *,
    caches: bool,
) -> BlockPool | CountingPool | GroupedPool:
    """The pool that a feature brings, or the plain one for the replica's layers."""
    total, size = limits.num_blocks, limits.block_size
    for part in parts:
        brought = part.pool(total, size, tiers, caches=caches)
        if brought is not None:
            assert limits.kv_layout is None
            return brought
    if limits.kv_layout is not None:
        drafts = 0 if drafting is None else drafting.tokens
        return GroupedPool(
            total,
            limits.kv_layout,
            prefix_caching=caches,
            draft_tokens=drafts,
            tiers=tiers,
            state_bytes=limits.state_bytes,
        )
    return BlockPool(total, size, tiers) if caches else CountingPool(total, size)
