"""Continuous batching as in SGLang: prompts first, never mixed with decodes unless asked to.

**An iteration** (`_choose`). The piece of a prompt that has just been computed is cached, and what
the last prefill batch ended joins the running batch. Then a prefill batch is tried: if any request
can be taken (`admission.py`) it runs alone, and no running request gets a token. Else all running
requests decode. After a refusal for want of room the batch is *full*: no prefill is tried until a
request has left the running batch. If the pool lacks the pages of a decode, requests are retracted
(`retraction.py`).

**The ratio.** Running requests are expected to make a part of the output that they may. The part
begins at 0.7 (times `schedule_conservativeness`), falls with each decode to 0.14 of that within 600
of them, jumps at a retraction, and starts anew when nothing runs.

**One batch late** (`forms_ahead`: overlap scheduling, SGLang's default). The engine chooses batch
n+1 when batch n starts. Seen from the end of batch n, where this emulator chooses it: requests that
came after that start are not seen; outputs of batch n are not known, so that a request which ended
with it takes part in a decode of n+1 for nothing; what n computed is cached, and what ended with it
is freed, only after n+1 has been chosen (`_process`). A request that has ended stands in the
running batch, and counts for admission, until the next decode is formed.

Where this differs: a request that is retracted keeps the token of the batch in flight, which SGLang
throws away and computes again; and a batch that is empty is never full, where SGLang can hang.

**Looking** (`scheduler_recv_interval`). With an interval of n the engine looks for new requests
after each n-th decode, after each batch of prompts, and while it is idle; until then they are not
in the queue.

**Prompts that are handed over** (`disaggregation/prefill.py`). A prefill server polls whether the
decode server of a request has places for its KV when it looks for new requests: one that comes
during a batch is asked for behind it and taken one batch later, two where batches overlap. A server
that has nothing else to do polls on, and takes it at once; one whose group goes on does not.

**Drafts** (`VerifyingSet`). A decode makes its drafts, and verifies them with the last token: it
asks for the pages of all of them, twice where results come one batch late, in whole pages. Of a
tree one draft of each level can be accepted. What is taken back is the last of the batch. Up to
0.5.10 there is no overlap beside drafts but where `enable_spec_v2` asks for it.

**Leaps.** A promise is a run of decodes in which no request ends, none is waiting or the batch is
full, and no page can be lacking. Decodes advance together in the cohort
(`emu/scheduling/running.py`); what a leap would have evicted is evicted when it is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from mypy_extensions import mypyc_attr

from emu.config.schema import SglangTable
from emu.kv.tree_pool import TreePool
from emu.latency.base import BatchShape, Verify
from emu.request import Request
from emu.scheduling.base import Batch, Chunk, Progress, ReplicaLimits, add_chunk
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.ledger import Ledger
from emu.scheduling.looking import LookingScheduler
from emu.scheduling.parts import Part
from emu.scheduling.running import Record, RunningSet
from emu.scheduling.sglang.admission import (
    CONTINUE,
    NO_TOKEN,
    OUTPUT_MAX,
    UNLIMITED,
    Admission,
    Owed,
    Rules,
)
from emu.scheduling.sglang.orders import ListQueue, Order
from emu.scheduling.sglang.retraction import AHEAD_STEPS, Seat, ratio_after, retract
from emu.scheduling.verifying import VerifyingSet, add_verified, drafting_of
from emu.units import ceil_div

_EVER: Final = 1 << 63
RATIO: Final = 0.7
"""Part of the outputs that admission counts at first, at a conservativeness of 1."""
LEAST_RATIO: Final = 0.14
"""What is left of it in the end."""
DECAY_STEPS: Final = 600
SLOTS_FREED_EACH: Final = 3
"""Free ones that each request of a batch of prompts asks for, where a tree keeps states."""
_FEW_PLACES: Final = 32
"""Up to so many running requests a decode server lets KV come for twice as many more."""


@final
class Launched:
    """The last batch, until its results are known."""

    prompts: list[Record]
    """Members whose prompt it computed, or a piece of it."""
    members: list[RunningRequest]
    """All of them, in the order of the batch."""
    decodes: bool
    """Members of the running batch got a token."""
    fresh: set[int]
    """Admissions of `prompts`."""

    __slots__ = ("decodes", "fresh", "members", "prompts")

    def __init__(
        self, prompts: list[Record], members: list[RunningRequest], *, decodes: bool
    ) -> None:
        self.prompts = prompts
        self.members = members
        self.decodes = decodes
        self.fresh = {one.admission for one, _, _ in prompts}


@mypyc_attr(allow_interpreted_subclasses=True)
class SglangScheduler(LookingScheduler):
    """One replica's scheduler, for stepping and leaping alike."""

    def __init__(
        self,
        table: SglangTable,
        limits: ReplicaLimits,
        *,
        parts: Sequence[Part] = (),
    ) -> None:
        """`parts`: what drafts here, if anything."""
        assert limits.pipeline_stages == 1
        assert limits.kv_layout is None
        states = table.max_mamba_cache_size
        self.pool = TreePool(
            limits.num_blocks,
            limits.block_size,
            caches=not table.disable_radix_cache,
            eviction=table.radix_eviction_policy,
            states_total=0 if table.disable_radix_cache or not limits.state_bytes else states,
        )
        self._listed = ListQueue()
        super().__init__(
            table,
            limits,
            ledger=Ledger(self.pool, self._listed),
            max_num_seqs=table.requests_max,
        )
        self.settings = table
        # `req_to_token_pool` of a rank has places for what all ranks of the server may run.
        self._places = self.max_num_seqs * limits.members
        """Requests that may have KV here, on its way out too."""
        self._interval = table.scheduler_recv_interval
        overlaps = not table.disable_overlap_schedule
        self._late_steps = (1 + overlaps) if limits.hands_off else 0
        """Batches that begin before one that comes now can be in one."""
        self._goes_on: Callable[[], bool] = _alone
        self._looks_late = limits.forms_ahead or self._interval > 1 or self._late_steps > 0
        self._page = limits.block_size
        self.parts = parts
        self._drafting = drafting_of(parts)
        self.running: RunningSet
        if self._drafting is None:
            self.running = RunningSet(self.ledger, limits, frees_late=True)
        else:
            self.running = VerifyingSet(self.ledger, limits, self._drafting, frees_late=True)
        self.running.parts = parts
        self._cohort = self.running.cohort
        self._step_blocks = self._blocks_of_step()
        self._order = Order(table.schedule_policy, self.pool)
        is_asked = table.page_overhead == "on"
        self._rules = Rules(
            prefill_tokens=table.max_prefill_tokens,
            chunk_tokens=table.chunk_tokens or UNLIMITED,
            page_asked=is_asked,
            page_charged=table.page_overhead != "off",
            input_always=not is_asked,
            ignores_eos=table.ignore_eos and table.disable_radix_cache,
        )
        self._first_ratio = min(RATIO * table.schedule_conservativeness, 1.0)
        self._least_ratio = self._first_ratio * LEAST_RATIO
        self._decay = (self._first_ratio - self._least_ratio) / DECAY_STEPS
        self._begin()

    def _begin(self) -> None:
        """Nothing runs."""
        self._ratio = self._first_ratio
        self._is_full = False
        self._batch: list[RunningRequest] = []
        """The running batch, with those in it that have left and have not been taken out."""
        self._has_left = False
        """Some of them are known to have left."""
        self._cut: RunningRequest | None = None
        """The request of whose prompt a piece has been computed."""
        self._last: Launched | None = None
        """The batch that has ended last, until its results are known."""
        self._formed: Launched | None = None
        """The one chosen last."""
        self._late: set[int] = set()
        """Requests that ended with the last batch, whose results are not known."""
        self._not_looked = 0
        """Decodes since the engine has looked for new requests; the interval after a prompt."""
        self._starts_ns = (-1, -1)
        """When the last batch began, or might have, and the one before."""
        self._gained: dict[int, int] = {}
        """Tokens that the last batch brought, by admission, where steps verify drafts."""

    def _blocks_of_step(self) -> int:
        """Pages that a decode asks for, for each request, where it verifies drafts."""
        drafting, page = self._drafting, self._page
        if drafting is None:
            return 0
        tokens = max(drafting.drafted_tokens, 1 + drafting.tokens)
        blocks = ceil_div(tokens, page)
        if drafting.drafted_tokens > drafting.tokens and page > 1:
            blocks += 1  # branches begin behind the page that is begun
        return blocks * (2 if self._ahead else 1)

    # Forming a batch.
    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration; None if nothing can run or one is in flight."""
        if self.running.records:
            return None
        batch = self._form(now_ns)
        last_ns, _ = self._starts_ns
        if now_ns > last_ns:
            self._starts_ns = now_ns, last_ns
        return batch

    def follow(self, goes_on: Callable[[], bool]) -> None:
        """It steps with others; `goes_on`: they do so now, without a batch of its own."""
        self._goes_on = goes_on

    def _form(self, now_ns: int) -> Batch | None:
        last = self._last
        self._look(now_ns)
        if last is not None:
            if not self._ahead:
                self._process(last)
            self._merge(last)
        batch = self._choose(now_ns)
        if last is not None and self._ahead:
            self._process(last)
        if batch is None and self._is_late and self._unseen.count and self._goes_on():
            return None
        if batch is None and self._looks_late:  # it looks again: something has left or come
            self._not_looked = 0
            self._see(now_ns)
            batch = self._choose(now_ns)
        if batch is None:  # it is idle, and looks again
            self._ratio = self._first_ratio
            batch = self._choose(now_ns)
            if batch is None:
                return None
        self._last = self._formed
        if batch is self.running.leaping and not batch.chunks:
            batch.max_steps = self._leap_steps(now_ns)
        return batch

    @property
    def _is_late(self) -> bool:
        """Requests that come are polled for: it prefills, and decodes nothing."""
        return self._late_steps > 0 and not self._batch

    def _look(self, now_ns: int) -> None:
        """What has come joins the queue, if the engine looks before this batch.

        One batch late, it looks when the last batch has started.
        """
        if self._is_late:
            self._see(self._starts_ns[self._late_steps - 1])
            return
        if self._not_looked < self._interval:
            return
        is_now = self._not_looked % self._interval == 0  # else it looked in a leap, at nothing
        self._not_looked %= self._interval
        if is_now and self._unseen.count:
            self._see(self.running.last_start_ns if self._ahead else now_ns)

    def _look_from(self, steps: int) -> int:
        """So many steps of a leap in flight or about to be, or more, until the engine looks."""
        return steps + -(self._not_looked + steps) % self._interval

    def _merge(self, last: Launched) -> None:
        """Members of a prefill batch join the running batch, but for the one that goes on."""
        if not last.prompts:
            return
        cut = self._cut
        joined = [one for one in last.members if one is not cut and self._stays(one)]
        if len(joined) < len(last.members) or not self._batch:
            self._is_full = False
        if joined:
            self._batch = self._batch + joined

    def _stays(self, one: RunningRequest) -> bool:
        """A member of the running batch is not known to have left."""
        return one.is_alive or one.request.request_id in self._late

    def _process(self, last: Launched) -> None:
        """The results of the last batch: prompts are cached, what has ended leaves."""
        self._last = None
        pool, late = self.pool, self._late
        if last.prompts:
            ends = {one.admission: target for one, _, target in last.prompts}
            for one in last.members:
                if one.request.request_id in late:
                    pool.release(one.request)
                elif one.is_alive and one is not self._cut and one.admission in ends:
                    pool.cache(one.request, ends[one.admission])
        elif late:
            for one in last.members:
                if one.request.request_id in late:
                    pool.release(one.request)
        if late:
            late.clear()
            self.running.leaving.clear()
            self._has_left = True

    def _choose(self, now_ns: int) -> Batch | None:
        if self.ledger.arrived:
            self._admit_arrived()
        cut = self._cut
        if cut is not None and not cut.is_alive:
            cut = self._cut = None
            self._is_full = False
        if cut is not None:
            self.pool.cache(cut.request, cut.request.computed_tokens)
        elif not self._batch:
            self._is_full = False
        running = self.running
        if running.beside and self._drafting is None:
            running.join_ready(now_ns)
        batch = None
        if cut is not None or (self._queue.count and not self._is_full):
            batch = self._prefill(now_ns)
        if batch is None and self._batch:
            batch = self._decode(now_ns)
        return batch

    def _admit_arrived(self) -> None:
        running = self.running
        had = len(running.requests)
        running.admit_arrived(self.max_num_seqs)
        self._batch = self._batch + list(running.requests.values())[had:]

    # Prompts.
    def _prefill(self, now_ns: int) -> Batch | None:
        """A batch of prompts, if any can be taken."""
        held = len(self._batch)
        slots = min(self.max_num_seqs - held, self._places - held - len(self.ledger.detached))
        cut = self._cut
        if slots <= 0 and (cut is not None) is (self.settings.full_stops_chunks == "on"):
            self._is_full = True
            return None
        self._order.apply(self._listed)
        decodes = len(self._batch) if self.settings.enable_mixed_chunk else 0
        owed = [self._owed(one) for one in self._batch]
        admission = Admission(self.pool, self._rules, self._ratio, owed, decodes)
        is_cut_again = False
        if cut is not None:
            request = cut.request
            is_cut_again = admission.go_on(
                request, request.reached_tokens - request.computed_tokens
            )
            if not admission.taken:
                return None
        for request in self._queue:
            if len(admission.taken) >= slots:
                self._is_full = True
            if self._is_full:
                break
            result = admission.add(request)
            if result != CONTINUE:
                self._is_full = self._is_full or result == NO_TOKEN
                break
        if not admission.taken:
            return None
        return self._launch_prompts(admission, is_cut_again=is_cut_again, now_ns=now_ns)

    def _launch_prompts(self, admission: Admission, *, is_cut_again: bool, now_ns: int) -> Batch:
        """What has been taken is a batch, with all decodes if they are mixed."""
        running, pool, page = self.running, self.pool, self._page
        taken = admission.taken
        tokens = sum(one.new for one in taken)
        pool.make_room(tokens if page == 1 else tokens + len(taken) * page)
        pool.make_state_room(SLOTS_FREED_EACH * len(taken))
        shape = self._shape()
        chunks: list[Chunk] = []
        prompts: list[Record] = []
        cut = self._cut if is_cut_again else None
        for one in taken:
            request = one.request
            if one.node is None:
                assert self._cut is not None
                member = self._cut
            else:
                self._queue.remove(request)
                self._note_admission(request, one.had, now_ns)
                member = running.admit(request)
                if request is admission.cut:
                    cut = member
            target = one.had + one.new
            pool.take_state(request, pool.tree.root)
            pool.grow(request, one.had, target)
            request.computed_tokens = target
            member.pending += one.new
            prompts.append((member, one.new, target))
            chunks.append(Chunk(request, one.new, one.had))
            add_chunk(shape, one.new, one.had)
            if not request.generated_tokens and target >= request.prompt_tokens:
                request.prefill_scheduled_ns = now_ns
        self._cut = cut
        members = [member for member, _, _ in prompts]
        records, decodes = prompts, False
        if self.settings.enable_mixed_chunk and self._batch:
            staying = [one for one in self._batch if self._stays(one)]
            if staying:
                pool.make_room(len(staying) * page)
                shape, records = self._step(staying, shape, prompts)
                members, decodes = members + staying, True
            self._batch = []
            self._has_left = False
        return self._launch(
            shape, chunks, records, Launched(prompts, members, decodes=decodes), now_ns
        )

    def _note_admission(self, request: Request, had: int, now_ns: int) -> None:
        if request.preemptions:
            request.recomputed_tokens += request.reached_tokens - had
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = now_ns
            request.prefix_hit_tokens = request.npu_hit_tokens = had

    def _owed(self, one: RunningRequest) -> Owed:
        request = one.request
        return Owed(request.max_output_tokens, self._made(one), request.prompt_tokens)

    def _made(self, one: RunningRequest) -> int:
        """Output tokens of a member of the running batch that the engine knows of."""
        request, cohort = one.request, self._cohort
        made = request.generated_tokens
        if one.in_cohort:
            made = cohort.step - cohort.in_flight + one.offset - request.prompt_tokens
        last = self._last
        if last is None or not self._ahead or not self._stays(one):
            return made
        is_late = last.decodes or one.admission in last.fresh
        if self._drafting is not None:
            return made - self._gained.get(one.admission, 0)
        return made - 1 if is_late and made else made

    def _shape(self) -> BatchShape:
        """An empty batch; its drafter, if there is one, computes its tokens too."""
        shape = BatchShape()
        if self._drafting is not None:
            shape.verify = Verify()
        return shape

    # Decodes.
    def _decode(self, now_ns: int) -> Batch | None:
        """All of the running batch gets a token; what does not fit is retracted."""
        batch = self._batch
        if self._has_left:
            self._has_left = False
            batch = [one for one in batch if self._stays(one)]
        has_fallen = len(batch) < len(self._batch)
        self._batch = batch
        preempted: list[Request] = []
        if batch:
            if self._fits(batch):
                self._ratio = max(self._ratio - self._decay, self._least_ratio)
            else:
                has_fallen = True
                preempted = self._retract()
                batch = self._batch
        if not batch:
            self._is_full = False
            return None
        if has_fallen:
            self._is_full = False
        self.pool.make_room(len(batch) * max(1, self._step_blocks) * self._page)
        shape, records = self._step(batch, self._shape(), [])
        formed = self._launch(shape, [], records, Launched([], batch, decodes=True), now_ns)
        formed.preempted = preempted
        return formed

    def _computed(self, one: RunningRequest) -> int:
        """Tokens of a member of the running batch whose KV is there or on its way."""
        if one.in_cohort:
            return self._cohort.step + one.offset - 1
        return one.request.computed_tokens

    def _fits(self, batch: Sequence[RunningRequest]) -> bool:
        """Whether these have pages for a token each; what is cached makes room for them."""
        page = self._page
        blocks = len(batch)
        if self._drafting is not None:
            blocks *= self._step_blocks
        elif page > 1:
            blocks = sum(self._computed(one) % page == 0 for one in batch)
        self.pool.make_room(blocks * page)
        return blocks <= self.pool.blocks_free

    def _retract(self) -> list[Request]:
        """Take requests back until the rest has its pages; those that wait again."""
        batch = self._batch
        preempted: list[Request] = []

        def fits(seats: Sequence[Seat]) -> bool:
            return self._fits([batch[seat.place] for seat in seats])

        def take_back(seat: Seat, left: int) -> None:
            one = batch[seat.place]
            if self._take_back(one):
                preempted.append(one.request)
            self.pool.make_room(left * AHEAD_STEPS)

        seats = [
            Seat(
                place=place,
                made=self._made(one),
                prompt_tokens=one.request.prompt_tokens,
                output_max=one.request.max_output_tokens,
            )
            for place, one in enumerate(batch)
        ]
        seats = retract(seats, fits, take_back, in_order=self._drafting is not None)
        if not fits(seats):  # only where others take pages away: SGLang would stop here
            take_back(seats.pop(), 0)
        self._batch = [batch[seat.place] for seat in seats]
        if seats:
            self._ratio = ratio_after(seats)
        return preempted

    def _take_back(self, one: RunningRequest) -> bool:
        """Free the pages of a request that is retracted; whether it waits again."""
        request = one.request
        if not one.is_alive:  # it has ended, which the engine does not know
            self._late.discard(request.request_id)
            self.running.leaving.remove(request)
            self.pool.leave(request, 0)
            return False
        self.running.remove(one)
        self.pool.leave(request, 0)
        request.computed_tokens = 0
        return self.ledger.requeue(request)

    def _step(
        self, batch: Sequence[RunningRequest], shape: BatchShape, before: list[Record]
    ) -> tuple[BatchShape, list[Record]]:
        """A token more for each of the running batch: the shape with them, and their records
        behind those of prompts."""
        running, cohort = self.running, self._cohort
        records = list(before)
        if cohort.count:
            decodes = cohort.next_shape()
            decodes.prefill_new, decodes.prefill_context = shape.prefill_new, shape.prefill_context
            if shape.decode_count:  # prompts with a single token left
                _add_decodes(decodes, shape)
            shape = decodes
            running.start_cohort_step()
        for one in batch:
            if one.in_cohort:
                continue
            if self._drafting is not None:
                self._verify(one, self._drafting.tokens, shape, records)
                continue
            request = one.request
            had = request.computed_tokens
            new = 1 if not one.is_alive else request.reached_tokens - had
            self.pool.grow(request, had, had + new)
            request.computed_tokens = had + new
            add_chunk(shape, new, had)
            if one.is_alive:
                one.pending += new
                records.append((one, new, had + new))
        return shape, records

    def _verify(
        self, one: RunningRequest, drafts: int, shape: BatchShape, records: list[Record]
    ) -> None:
        """A step of one that verifies drafts: it has slots for all, whatever will be accepted.

        `drafts`: of one that has ended, which the engine does not know.
        """
        request = one.request
        had = request.computed_tokens
        last = request.reached_tokens - had if one.is_alive else 1
        drafts = one.drafts if one.is_alive else drafts
        new = last + max(0, min(drafts, self.limits.max_model_tokens - 1 - had - last))
        self.pool.grow(request, had, had + new)
        add_verified(shape, new, had)
        verify = shape.verify
        if verify is not None and new > last:
            verify.drafting += 1
            verify.drafting_context_sum += had + last
        if one.is_alive:
            request.computed_tokens = had + new
            one.pending += new
            records.append((one, new, had + new))
        else:
            request.computed_tokens = had + 1

    def _launch(
        self,
        shape: BatchShape,
        chunks: list[Chunk],
        records: list[Record],
        launched: Launched,
        now_ns: int,
    ) -> Batch:
        """The batch is formed."""
        running, cohort = self.running, self._cohort
        shape.sequences = len(launched.members)
        batch_id = running.next_batch_id
        running.next_batch_id = batch_id + 1
        batch = Batch(batch_id, shape, chunks, 1, now_ns)
        if launched.decodes and cohort.count:
            running.leaping = batch
        else:
            batch.decodes = [one.request for one, _, _ in records if not one.prefilling]
        running.records[batch_id] = records
        self._formed = launched
        return batch

    # Leaps.
    def _leap_steps(self, now_ns: int) -> int:
        """Iterations, this one included, that are certainly formed like this one."""
        cohort, running = self._cohort, self.running
        if not self.limits.leap or running.beside or now_ns != running.cohort_end_ns:
            return 1
        if self._has_left or len(self._batch) != cohort.count:
            return 1  # what has left is taken out at the next decode
        if not self._is_full and self._queue.count:
            return 1
        steps = cohort.steps_to_first_end()
        if self._unseen.count and (not self._is_full or self._interval > 1):
            steps = min(steps, self._look_from(1))
        if steps > 1:
            steps = 1 + cohort.steps_that_fit(self.pool.blocks_free, steps - 1)
        return steps

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change."""
        settled = batch.steps_settled
        left = batch.max_steps - settled
        if self._unseen.count and left and (not self._is_full or self._interval > 1):
            # The next batch does not see a request that comes now, the one after does; one that
            # came just before the iteration in flight began is seen at its end already.
            is_seen = not self._ahead or self._unseen.first_ns() <= batch.last_start_ns
            steps = self._look_from(settled if is_seen else settled + 1)
            batch.max_steps = min(batch.max_steps, steps)
            left = batch.max_steps - settled
        if self.ledger.arrived or batch is not self.running.leaping or left == 0:
            return False
        if self._queue.count and not self._is_full:
            return False
        return self._cohort.steps_that_fit(self.pool.blocks_free, left) >= left

    def sees_in(self, batch: Batch, started: int, last_start_ns: int) -> int:
        """See `Scheduler.sees_in`; certain only while nothing but unseen requests waits."""
        if not self._ahead or self._queue.count or self._is_full or self.ledger.arrived:
            return 0
        if batch is not self.running.leaping or started >= batch.max_steps:
            return 0
        if self._unseen.first_ns() <= last_start_ns:
            return 0
        batch.max_steps = min(batch.max_steps, self._look_from(started + 1))
        return batch.max_steps

    def settle(self, batch: Batch, steps: int) -> None:
        """Take the pages of the steps up to `steps` of a leap in flight (idempotent)."""
        more = steps - batch.steps_settled
        if more <= 0:
            return
        if batch is self.running.leaping and self._cohort.count:
            self._evict_for(more)
        for _ in range(more):
            if self._ratio <= self._least_ratio:
                break
            self._ratio = max(self._ratio - self._decay, self._least_ratio)
        self.running.settle(batch, steps)

    def _evict_for(self, steps: int) -> None:
        """Evict what the next steps of the cohort evict, each before it takes its pages."""
        pool, cohort, page = self.pool, self._cohort, self._page
        count = cohort.count
        if not pool.tree.evictable:
            return
        if pool.blocks_free - cohort.blocks_of(steps) - count >= pool.evictable_blocks:
            return
        free, taken = pool.blocks_free, 0
        for step in range(1, steps + 1):
            through = cohort.blocks_of(step)
            pool.make_room((through - taken) * page)
            if page > 1:
                pool.make_room(count * page)
            taken = through
            pool.blocks_free = free - taken
            if not pool.tree.evictable:
                break
        pool.blocks_free = free  # they are taken by `running`

    # The running set.
    @property
    def running_count(self) -> int:
        """Requests that hold KV and run or are about to."""
        return len(self.running.requests) + len(self.ledger.arrived)

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """See `Scheduler.split`."""
        self.settle(batch, steps + 1)
        self._not_looked += steps
        return self.running.split(batch, steps, now_ns, longest_step_ns)

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        self.settle(batch, steps)
        is_prompt = self._last is not None and bool(self._last.prompts)
        self._not_looked = self._interval if is_prompt else self._not_looked + steps
        made: list[tuple[RunningRequest, int]] = []
        if isinstance(self.running, VerifyingSet):
            records = self.running.records[batch.batch_id]
            made = [(one, one.request.generated_tokens) for one, _, _ in records]
            self.running.overruns.clear()
        progress = self.running.complete(batch, steps, now_ns, longest_step_ns)
        self._gained = {one.admission: one.request.generated_tokens - had for one, had in made}
        self._late.update([request.request_id for request in progress.finished])
        return progress

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        self.running.detach(request)
        self.pool.cache(request, request.computed_tokens)
        self._has_left = True

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
        """Prompt tokens of a request that are cached (what a router may ask)."""
        return self.pool.match(request)

    # Coming and leaving.
    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks. False if it is not here."""
        self._has_left = True
        is_here = self._unseen.remove(request) or self.running.cancel(request)
        self.pool.drop_state(request)  # one that waited may have had one
        return is_here

    def evacuate(self) -> list[Request]:
        """Everything leaves: waiting requests first, then running ones. The pool is empty."""
        self._see(_EVER)
        leaving = self.ledger.evacuate(self.running.evacuate())
        self._begin()
        return leaving

    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        return self.running.recount()

    # KV on its way in.
    def has_places(self, count: int) -> bool:
        """Whether so many more requests may have KV here: those that run, and where few do, twice
        as many that are told to come (`pre_alloc_size` of its decode servers)."""
        most = self._places
        if most <= _FEW_PLACES:
            most *= 3
        held = len(self.running.requests) + self.ledger.inbound
        return held + count <= most

    # Limits.
    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        if reason := super().can_ever_hold(request):
            return reason
        made = min(request.max_output_tokens, OUTPUT_MAX)
        needed = request.prompt_tokens + made + (self._page if self._rules.page_asked else 0)
        # One step more is taken before its end is known.
        blocks = ceil_div(request.prompt_tokens + request.max_output_tokens, self._page)
        blocks += self._step_blocks
        if needed >= self.blocks_total * self._page or blocks > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        return ""

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """Heads that cannot be admitted although the replica is empty, removed."""
        dropped = self.ledger.take_failed()
        if self.running.requests or self.running.records or self.ledger.holds_blocks:
            return dropped
        for request in list(self._queue):
            if reason := self.can_ever_hold(request):
                self._queue.remove(request)
                self.pool.drop_state(request)
                dropped.append((request, reason))
        return dropped


def _alone() -> bool:
    """No other replica steps with it."""
    return False


def _add_decodes(shape: BatchShape, more: BatchShape) -> None:
    """Add single tokens of one shape to another that has some."""
    shape.decode_count += more.decode_count
    shape.decode_context_sum += more.decode_context_sum
    shape.decode_context_max = max(shape.decode_context_max, more.decode_context_max)
    shape.decode_context_min = min(shape.decode_context_min, more.decode_context_min)
