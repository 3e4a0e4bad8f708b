"""Continuous batching as in TensorRT-LLM's PyTorch executor: capacity first, then tokens.

**An iteration** (`_form`). All running requests that generate get a token. Waiting ones are asked
in order of arrival whether they fit (`capacity.py`), and those that do are contexts of the step as
far as its tokens go (`chunks.py`), beside the generations. A context takes the blocks of its whole
prompt when it begins; what it then finds in the cache, by token, it does not compute.

**Blocks.** With GUARANTEED_NO_EVICT what running requests may still need is kept for them
(`_owed`), so that decodes never lack a block, but where a fault has taken some. With
MAX_UTILIZATION the running request that came last is paused when blocks lack: its blocks are
cached, and it comes back in order of its arrival as a context of prompt and outputs. In a step that
pauses a request none that came later is asked.

**Waiting** (`batch_wait_*`). While requests generate, contexts that could be taken are held back
until a step has a part of its most tokens, or for so many steps.

**One step late** (`forms_ahead`: overlap scheduler, TensorRT-LLM's default). The engine schedules
step n+1 when step n has been launched. Seen from the end of step n, where this emulator forms the
next one: requests that came after its start are not seen; contexts of step n can be found in the
cache from step n+2 on; what ended with it keeps its place and its blocks while step n+1 is formed.
It takes part in that step for nothing, but from 1.3 on if it ended by its length, which is known
beforehand (`length_ends_known`).

**Drafts** (`VerifyingSet`). A generation computes its last token and its drafts, which count in
the step's tokens, in the next step's blocks and in those that are kept for its output. When it ends
is not known beforehand: a step may bring several tokens.

Where this differs: a request that is paused keeps the token of the step in flight.

**Leaps.** A promise is a run of decodes in which no request ends, none that waits can be taken and
no block can be lacking. What is spare with GUARANTEED_NO_EVICT does not change while requests
decode, because what they take had been kept for them; with MAX_UTILIZATION it only falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, final

from mypy_extensions import mypyc_attr

from emu.config.schema import TensorrtLlmTable
from emu.kv.tree_pool import TreePool
from emu.latency.base import BatchShape, Verify
from emu.request import Request
from emu.scheduling.base import Batch, Chunk, Progress, ReplicaLimits, add_chunk
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.ledger import Ledger
from emu.scheduling.looking import LookingScheduler
from emu.scheduling.parts import Part
from emu.scheduling.queues import ArrivalQueue, arrival_order
from emu.scheduling.running import Record, RunningSet
from emu.scheduling.tensorrt_llm.balance import ContextBalance, Standing
from emu.scheduling.tensorrt_llm.capacity import (
    FITS,
    LACKS_BLOCKS,
    LACKS_PLACE,
    WAITS_FOR_PREFIX,
    Contributed,
    Room,
    blocks_to_end,
    blocks_to_start,
)
from emu.scheduling.tensorrt_llm.chunks import Chunking, from_hit, shares
from emu.scheduling.verifying import VerifyingSet, add_verified, drafting_of

_EVER: Final = 1 << 63


@final
class ActiveQueue(ArrivalQueue):
    """Requests in order of arrival; one that was paused has its place among them."""

    def push_front(self, request: Request) -> None:
        """A request that was paused."""
        self.append(request)


@final
class Forming:
    """A step while it is formed."""

    now_ns: int
    shape: BatchShape
    records: list[Record]
    """Members outside the cohort."""
    chunks: list[Chunk]

    __slots__ = ("chunks", "now_ns", "records", "shape")

    def __init__(self, now_ns: int, verify: Verify | None = None) -> None:
        """`verify`: what drafts add, where steps verify some."""
        self.now_ns = now_ns
        self.shape = BatchShape()
        self.shape.verify = verify
        self.records = []
        self.chunks = []


@mypyc_attr(allow_interpreted_subclasses=True)
class TensorrtLlmScheduler(LookingScheduler):
    """One replica's scheduler, for stepping and leaping alike."""

    def __init__(
        self,
        table: TensorrtLlmTable,
        limits: ReplicaLimits,
        *,
        parts: Sequence[Part] = (),
    ) -> None:
        """`parts`: what drafts here, if anything."""
        assert limits.pipeline_stages == 1
        assert limits.kv_layout is None
        pauses = table.capacity_scheduler_policy == "MAX_UTILIZATION"
        # Without prefixes, only a request that was paused can find anything: its own.
        caches = table.enable_block_reuse and (limits.prefix_caching or pauses)
        self.pool = TreePool(limits.num_blocks, limits.block_size, caches=caches, by_page=True)
        super().__init__(
            table,
            limits,
            ledger=Ledger(self.pool, ActiveQueue()),
            max_num_seqs=table.requests_max,
        )
        self.settings = table
        self.parts = parts
        drafting = drafting_of(parts)
        self._drafts = 0 if drafting is None else drafting.tokens
        """Drafts of a generation."""
        self.running: RunningSet
        if drafting is None:
            self.running = RunningSet(self.ledger, limits, frees_late=True)
        else:
            self.running = VerifyingSet(self.ledger, limits, drafting, frees_late=True)
        self.running.parts = parts
        self._cohort = self.running.cohort
        self._policy = table.capacity_scheduler_policy
        self._pauses = pauses
        self._budget = table.tokens_max
        self._chunking: Chunking = "none"
        if table.enable_chunked_prefill:
            self._chunking = table.context_chunking_policy
        self._knows_ends = table.length_ends_known == "on" and not self._drafts
        self._balance: ContextBalance | None = None
        """With which other ranks its contexts begin; None = by themselves."""
        self._begin()

    def _begin(self) -> None:
        """Nothing runs."""
        self._held_back_steps = 0
        """Steps for which contexts have waited for more."""
        self._owed = 0
        """Blocks that requests with blocks lack for all that they may still compute."""
        self._contexts: list[tuple[RunningRequest, int]] = []
        """Those whose context is complete with the last step and not cached yet, and its tokens."""
        self._paused: list[Request] = []
        """Since the last step was formed."""
        self._stays_to_end: set[int] = set()
        """Requests with blocks that decode here, whatever is done with the replica's contexts."""

    def share_contexts(self, balance: ContextBalance) -> None:
        """From now on its contexts begin with those of other ranks."""
        self._balance = balance
        balance.join(self)

    def standing(self) -> Standing:
        """What it has before it forms a step, for the other ranks."""
        running = self.running
        is_free = not running.requests and not running.leaving
        prefilling = sum(1 for one in running.beside.values() if one.prefilling)
        waits = self._queue.count if is_free or not self._queue_waits() else 0
        unseen = self._unseen.count and self._unseen.first_ns() <= running.last_start_ns
        generates = len(running.requests) > prefilling
        is_idle = not (running.requests or self._queue.count or self._unseen.count)
        return Standing(
            has_context=bool(prefilling or waits or unseen),
            generates=generates or is_idle,
            has_place=len(running.requests) < self.max_num_seqs,
        )

    # Forming a step.
    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration; None if nothing can run or one is in flight."""
        if self.running.records:
            return None
        if self._unseen.count:
            self._see(self.running.last_start_ns)  # the last step started: this one was scheduled
        ended, self._contexts = self._contexts, []
        batch = self._form_or_pause(now_ns)
        begun, self._contexts = self._contexts, ended
        self._process()
        self._contexts = begun
        if batch is None and self._ahead:  # the engine looks again: something has left or come
            self._see(now_ns)
            batch = self._form_or_pause(now_ns)
        if batch is not None and batch is self.running.leaping and not batch.chunks:
            batch.max_steps = self._leap_steps(batch, now_ns)
        return batch

    def _form_or_pause(self, now_ns: int) -> Batch | None:
        """A step; where all that could run was paused, the engine tries again at once."""
        batch = self._form(now_ns)
        if batch is None and self._paused:
            batch = self._form(now_ns)
        if batch is not None:
            batch.preempted, self._paused = self._paused, []
        return batch

    def _process(self) -> None:
        """The results of the last step: contexts can be found, what has ended is free."""
        contexts, self._contexts = self._contexts, []
        for one, tokens in contexts:
            if one.is_alive:
                self.pool.cache(one.request, tokens)
        for request in self.running.leaving:
            self._drop(request)
        self.running.free_ended()

    def _form(self, now_ns: int) -> Batch | None:
        running = self.running
        if self.ledger.arrived:
            running.admit_arrived(self.max_num_seqs)
        if running.beside and not self._drafts:
            running.join_ready(now_ns)
        late = self._late()
        if not (running.requests or self._queue.count or late):
            return None
        cut = self._make_room(late)
        forming = Forming(now_ns, Verify() if self._drafts else None)
        started = [one for one in running.beside.values() if one.prefilling]
        lengths = [self._left(one) for one in started]
        generations = len(running.requests) - len(started) + len(late)
        budget = self._budget - generations - self._draft_tokens(late)
        fitting = self._fitting(started, budget - sum(lengths), cut) if self._queue.count else []
        started = [one for one in started if one.is_alive]  # the others gave way just now
        generations = len(running.requests) - len(started) + len(late)
        tokens = self._shares(started, fitting, budget, is_generating=generations > 0)
        if not (generations or any(tokens)):
            return None
        self._generate(forming, late)
        for one, new in zip(started, tokens, strict=False):
            if new:
                self._compute(forming, one, new)
        for request, new in zip(fitting, tokens[len(started) :], strict=True):
            if new:
                self._start(forming, request, new)
        self.pool.keep_room()
        return self._launch(forming, len(late))

    def _shares(
        self,
        started: Sequence[RunningRequest],
        fitting: Sequence[Request],
        budget: int,
        *,
        is_generating: bool,
    ) -> list[int]:
        """Tokens that each context computes in the step, of those that generations leave."""
        tokens = [*map(self._left, started), *(request.reached_tokens for request in fitting)]
        if tokens:
            tokens = shares(tokens, budget, self._chunking, self.block_size)
        if is_generating and self.settings.batch_wait_timeout_iters and any(tokens):
            requests = [*(one.request for one in started), *fitting]
            prompts = zip(requests, tokens, strict=True)
            whole = sum(request.reached_tokens for request, new in prompts if new)
            if self._holds_back(self._budget - budget + whole):
                return [0] * len(tokens)
        if self._balance is not None and any(tokens) and not self._balance.lets():
            return [0] * len(tokens)
        return tokens

    def _holds_back(self, step_tokens: int) -> bool:
        """Whether the contexts of a step of so many tokens wait for more of them.

        Prompts that are computed in pieces count whole.
        """
        settings = self.settings
        if (
            self._held_back_steps >= settings.batch_wait_timeout_iters
            or step_tokens >= settings.batch_wait_max_tokens_ratio * self._budget
        ):
            self._held_back_steps = 0
            return False
        self._held_back_steps += 1
        return True

    def _late(self) -> list[Request]:
        """What has ended with the last step, where the engine does not know it yet."""
        return [
            request
            for request in self.running.leaving
            if not (self._knows_ends and request.generated_tokens >= request.max_output_tokens)
        ]

    def _left(self, one: RunningRequest) -> int:
        """Tokens of a context that are not computed."""
        return one.request.reached_tokens - one.request.computed_tokens

    # Capacity.
    def _needs(self, late: Sequence[Request]) -> int:
        """Blocks that running requests take in the next step."""
        pool = self.pool
        blocks = self._cohort.blocks_next() if self._cohort.count else 0
        for one in self.running.beside.values():
            blocks += pool.need(one.request, one.request.reached_tokens + self._of(one))
        for request in late:
            blocks += pool.need(request, request.reached_tokens + self._drafts)
        return blocks

    def _draft_tokens(self, late: Sequence[Request]) -> int:
        """Drafts of all generations in the next step."""
        if not self._drafts:
            return 0
        drafts = sum(self._of(one) for one in self.running.beside.values())
        return drafts + self._drafts * len(late)

    def _of(self, one: RunningRequest) -> int:
        """Drafts of its next step."""
        if not self._drafts or one.prefilling:
            return 0
        return max(
            0, min(one.drafts, self.limits.max_model_tokens - one.request.reached_tokens - 1)
        )

    def _make_room(self, late: Sequence[Request]) -> tuple[int, int] | None:
        """Pause those that came last until the others have the blocks of their next token; the
        arrival of the last one that was paused, None if there was none."""
        cut = None
        while self.running.requests and self._needs(late) > self.pool.blocks_free:
            victim = self._latest()
            cut = arrival_order(victim.request)
            self._pause(victim)
        return cut

    def _latest(self) -> RunningRequest:
        """The running request that came last."""
        return max(self.running.requests.values(), key=_arrival)

    def _pause(self, one: RunningRequest) -> None:
        """Its blocks are free, and cached; it waits again."""
        request = one.request
        self.running.remove(one)
        self._drop(request)
        self.pool.release(request)
        request.computed_tokens = 0
        if self.ledger.requeue(request):
            self._paused.append(request)

    def _drop(self, request: Request) -> None:
        """A request with blocks goes: nothing is kept for it any more."""
        self._owed -= self._to_end(request) - request.kv_blocks
        self._stays_to_end.discard(request.request_id)

    def _to_end(self, request: Request) -> int:
        """Blocks that it may take in all: a context that is handed on makes one token."""
        hands_off = self.limits.hands_off and request.request_id not in self._stays_to_end
        return blocks_to_end(
            request, self.block_size, hands_off=hands_off, draft_tokens=self._drafts
        )

    def _asked(self, request: Request) -> int:
        """The same of a waiting request; one that came back with output stays to the end."""
        hands_off = self.limits.hands_off and not request.generated_tokens
        return blocks_to_end(
            request, self.block_size, hands_off=hands_off, draft_tokens=self._drafts
        )

    def _spare(self) -> int:
        """Blocks that running requests leave to others."""
        kept = self._needs(self._late()) if self._pauses else self._owed
        return self.pool.blocks_free - kept

    def _fitting(
        self, started: Sequence[RunningRequest], budget: int, cut: tuple[int, int] | None
    ) -> list[Request]:
        """Waiting requests that fit, in order. `budget`: tokens that contexts under way leave."""
        room = self._room(started)
        if room is None:
            return []
        found: list[Request] = []
        for request in list(islice(self._queue, max(0, room.places))):
            if cut is not None and arrival_order(request) >= cut:
                break
            result = room.take(request)
            if self._pauses and result in (LACKS_BLOCKS, LACKS_PLACE):
                result, cut = self._take_from_later(request, room, result, cut)
            if result == WAITS_FOR_PREFIX:
                continue
            if result != FITS:
                break
            found.append(request)
            budget -= request.reached_tokens
            if budget < 0 and self._chunking == "none":
                break
        return found

    def _contributed(self, started: Sequence[RunningRequest]) -> Contributed:
        """Blocks that these compute now, and that others of the step wait for."""
        found = Contributed(self.pool)
        for one in started:
            found.add(one.request)
        return found

    def _room(self, started: Sequence[RunningRequest]) -> Room | None:
        """What running requests leave to others; None: none may begin."""
        running = self.running
        held = len(running.requests) + len(running.leaving)
        if self._policy == "STATIC_BATCH" and held:
            return None
        return Room(
            self._policy,
            self.block_size,
            spare_blocks=self._spare(),
            places=self.max_num_seqs - held,
            contributed=self._contributed(started) if self.pool.caches else None,
            hands_off=self.limits.hands_off,
            draft_tokens=self._drafts,
        )

    def _take_from_later(
        self, request: Request, room: Room, result: int, cut: tuple[int, int] | None
    ) -> tuple[int, tuple[int, int] | None]:
        """Running requests that came later give way to one that does not fit: whether it does then,
        and the arrival of the last of them."""
        while result != FITS and self.running.requests:
            victim = self._latest()
            if _arrival(victim) < arrival_order(request):
                break
            cut = _arrival(victim)
            before = self._spare()
            self._pause(victim)
            room.spare_blocks += self._spare() - before
            room.places += 1
            result = room.take(request)
        return result, cut

    # Members.
    def _generate(self, forming: Forming, late: Sequence[Request]) -> None:
        """A token for each running request that generates, and for those that have ended."""
        running, cohort = self.running, self._cohort
        if cohort.count:
            forming.shape = cohort.next_shape()
            self._owed -= cohort.blocks_next()
            running.start_cohort_step()
        for one in running.beside.values():
            if not one.prefilling:
                self._compute(forming, one, self._left(one) + self._of(one))
        for request in late:
            had = request.computed_tokens
            self._grow(request, had, request.reached_tokens + self._drafts)
            add_verified(forming.shape, 1 + self._drafts, had)

    def _grow(self, request: Request, had: int, target: int) -> None:
        blocks = request.kv_blocks
        self.pool.grow(request, had, target)
        self._owed -= request.kv_blocks - blocks

    def _start(self, forming: Forming, request: Request, share: int) -> None:
        """A context begins: what is cached of it, the blocks of the rest, its first tokens."""
        pool, reached = self.pool, request.reached_tokens
        self._queue.remove(request)
        node = pool.find(request, reached - 1)
        pool.begin(request, node)
        had = node.end
        if self.settings.enable_partial_reuse:
            copies = self.settings.copy_on_partial_reuse
            had += pool.take_part(request, node, reached - 1, copies=copies)
        if request.generated_tokens:
            self._stays_to_end.add(request.request_id)
        self._owed += self._to_end(request) - request.kv_blocks
        self._note_admission(request, had, forming.now_ns)
        one = self.running.admit(request)
        self._grow(request, had, reached)
        request.computed_tokens = had
        pool.keep_room()
        self._compute(forming, one, from_hit(had, share, reached, self.block_size))

    def _note_admission(self, request: Request, had: int, now_ns: int) -> None:
        if request.preemptions:
            request.recomputed_tokens += request.reached_tokens - had
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = now_ns
            request.prefix_hit_tokens = request.npu_hit_tokens = had

    def _compute(self, forming: Forming, one: RunningRequest, new: int) -> None:
        """A member outside the cohort computes so many tokens."""
        request = one.request
        had = request.computed_tokens
        target = had + new
        self._grow(request, had, target)
        request.computed_tokens = target
        one.pending += new
        forming.records.append((one, new, target))
        verify = forming.shape.verify
        if verify is not None and target >= request.reached_tokens:
            verify.drafting += 1
            verify.drafting_context_sum += target
        if not one.prefilling:
            add_verified(forming.shape, new, had)
            return
        add_chunk(forming.shape, new, had)
        forming.chunks.append(Chunk(request, new, had))
        if target >= request.reached_tokens:
            self._contexts.append((one, target))
        if not request.generated_tokens and target >= request.prompt_tokens:
            request.prefill_scheduled_ns = forming.now_ns

    def _launch(self, forming: Forming, late: int) -> Batch:
        """The step is formed."""
        running, cohort, records = self.running, self._cohort, forming.records
        forming.shape.sequences = cohort.count + len(records) + late
        batch_id = running.next_batch_id
        running.next_batch_id = batch_id + 1
        batch = Batch(batch_id, forming.shape, forming.chunks, 1, forming.now_ns)
        if cohort.count:
            running.leaping = batch
        else:
            batch.decodes = [one.request for one, _, _ in records if not one.prefilling]
        running.records[batch_id] = records
        return batch

    # Leaps.
    def _leap_steps(self, batch: Batch, now_ns: int) -> int:
        """Iterations, this one included, that are certainly formed like this one."""
        cohort, running = self._cohort, self.running
        if not self.limits.leap or running.beside or now_ns != running.cohort_end_ns:
            return 1
        if self._balance is not None:  # what other ranks have may begin this one's contexts
            return 1
        if batch.shape.sequences != cohort.count or batch.preempted:
            return 1
        if self._unseen.count and (not self._queue.count or self._may_pass()):
            return 1
        if not self._queue_waits():
            return 1
        steps = cohort.steps_to_first_end()
        if steps > 1:
            steps = 1 + cohort.steps_that_fit(self.pool.blocks_free, steps - 1)
        return steps

    def _queue_waits(self) -> bool:
        """While the cohort decodes alone, no request of the queue can be taken."""
        if not self._queue.count:
            return True
        running, head = self.running, self._queue.head()
        count = len(running.requests) + len(running.leaving)
        if self._policy == "STATIC_BATCH":
            return True
        if self._pauses and _arrival(self._latest()) > arrival_order(head):
            return False
        if count >= self.max_num_seqs:
            return True
        if self._pauses:
            lacks = blocks_to_start(head, self.block_size) > self.pool.blocks_free
        else:
            lacks = self._asked(head) > self.pool.blocks_free - self._owed
        if lacks:
            return True
        return self._chunking == "none" and head.reached_tokens > self._budget - count

    def _may_pass(self) -> bool:
        """Some request that is not seen yet comes before the head of a queue that is not empty."""
        return self._unseen.first_order() < arrival_order(self._queue.head())

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change."""
        left = batch.max_steps - batch.steps_settled
        if self._unseen.count and left and (not self._queue.count or self._may_pass()):
            # The next step does not see a request that comes now, the one after does; one that
            # came just before the iteration in flight began is seen at its end already.
            left = 0 if self._unseen.first_ns() <= batch.last_start_ns else 1
            batch.max_steps = batch.steps_settled + left
        if self.ledger.arrived or batch is not self.running.leaping or left == 0:
            return False
        if not self._queue_waits():
            return False
        return self._cohort.steps_that_fit(self.pool.blocks_free, left) >= left

    def sees_in(self, batch: Batch, started: int, last_start_ns: int) -> int:
        """See `Scheduler.sees_in`; certain only while nothing but unseen requests waits."""
        if not self._ahead or self._queue.count or self.ledger.arrived:
            return 0
        if batch is not self.running.leaping or started >= batch.max_steps:
            return 0
        if self._unseen.first_ns() <= last_start_ns:
            return 0
        batch.max_steps = started + 1
        return started + 1

    def settle(self, batch: Batch, steps: int) -> None:
        """Take the blocks of the steps up to `steps` of a leap in flight (idempotent)."""
        if steps <= batch.steps_settled:
            return
        pool = self.pool
        free = pool.blocks_free
        self.running.settle(batch, steps)
        self._owed -= free - pool.blocks_free
        pool.keep_room()

    # The running set.
    @property
    def running_count(self) -> int:
        """Requests that hold KV and run or are about to."""
        return len(self.running.requests) + len(self.ledger.arrived)

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """See `Scheduler.split`."""
        self.settle(batch, steps + 1)
        return self.running.split(batch, steps, now_ns, longest_step_ns)

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        self.settle(batch, steps)
        if isinstance(self.running, VerifyingSet):
            self.running.overruns.clear()  # `leaving` says which step too many there is
        progress = self.running.complete(batch, steps, now_ns, longest_step_ns)
        if not self._ahead:
            self._process()
        return progress

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

    def prefix_match(self, request: Request) -> int:
        """Prompt tokens of a request that are cached in whole blocks (what a router may ask)."""
        return self.pool.match(request)

    # Coming and leaving.
    def _has_blocks(self, request: Request) -> bool:
        request_id = request.request_id
        return request_id in self.running.requests or request_id in self.ledger.arrived

    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks. False if it is not here."""
        if self._unseen.remove(request):
            return True
        if self._has_blocks(request):
            self.look_up(request)
            self._drop(request)
        return self.running.cancel(request)

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        self.look_up(request)
        self._drop(request)
        self.running.detach(request)
        self.pool.cache(request, request.computed_tokens)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks that must be spare to take over these requests' KV."""
        if self._pauses:
            return super().blocks_to_reserve(requests)
        # Whatever the replica does with prompts of its own: these come to decode.
        size, drafts = self.block_size, self._drafts
        return sum(blocks_to_end(request, size, draft_tokens=drafts) for request in requests)

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Whether `reserve` would take these requests now."""
        kept = 0 if self._pauses else self._owed
        return self.blocks_to_reserve(requests) <= self.pool.blocks_free - kept

    def has_places(self, count: int) -> bool:
        """Whether so many more requests may have KV here: those of a batch (a request comes to the
        executor, which asks for its KV, when it has a place)."""
        held = len(self.running.requests) + self.ledger.inbound
        return held + count <= self.max_num_seqs

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Reserve blocks for inbound requests, all or nothing; more are kept for their output."""
        if not self.has_room(requests) or not super().reserve(requests):
            return False
        for request in requests:
            self._stays_to_end.add(request.request_id)
            self._owed += self._to_end(request) - self.blocks_for(request)
        return True

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give back a reservation that will not be used."""
        for request in requests:
            held = self.ledger.reserved.get(request.request_id)
            if held is not None:
                self._owed -= self._to_end(request) - held.blocks
                self._stays_to_end.discard(request.request_id)
        super().unreserve(requests)

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests of this very replica go on here (role change, no move)."""
        super().adopt(requests, now_ns)
        for request in requests:
            self._stays_to_end.add(request.request_id)
            self._owed += self._to_end(request) - request.kv_blocks

    def evacuate(self) -> list[Request]:
        """Everything leaves: waiting requests first, then running ones. The pool is empty."""
        self._see(_EVER)
        leaving = self.ledger.evacuate(self.running.evacuate())
        self._begin()
        return leaving

    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        problems = self.running.recount()
        holders = [*self.residents(), *self.running.leaving]
        owed = sum(self._to_end(request) - request.kv_blocks for request in holders)
        for entry in self.ledger.reserved.values():
            owed += self._to_end(entry.request) - entry.blocks
        if owed != self._owed:
            problems.append(f"{self._owed} blocks kept for outputs, counted {owed}")
        return problems

    # Limits.
    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        if reason := super().can_ever_hold(request):
            return reason
        if not (self._pauses and not self._drafts) and self._to_end(request) > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        if self._chunking == "none" and request.prompt_tokens > self._budget:
            return f"prompt longer than max_num_tokens {self._budget}, and not chunked"
        return ""

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """Heads that cannot be taken although the replica is empty, removed."""
        dropped = self.ledger.take_failed()
        if self.running.requests or self.running.records or self.ledger.holds_blocks:
            return dropped
        while self._queue.count:
            request = self._queue.head()
            wanted = blocks_to_start(request, self.block_size)
            blocks = wanted if self._pauses else self._asked(request)
            is_cut = self._chunking != "none"
            if blocks <= self.pool.blocks_free and (
                is_cut or request.reached_tokens <= self._budget
            ):
                break
            self._queue.remove(request)
            tokens = f"{request.reached_tokens} tokens ({blocks} KV blocks)"
            dropped.append((request, f"{tokens} can never be scheduled"))
        return dropped


def _arrival(one: RunningRequest) -> tuple[int, int]:
    return arrival_order(one.request)
