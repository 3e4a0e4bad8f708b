"""What schedulers with a decode cohort share: seats, batches in flight, ends, handoff, books.

Owns: the running set (cohort and side list), the waiting queue, the pool, the records of batches
in flight, and everything that happens at the end of a batch. Does not form batches: that is the
subclass (`vllm`, `fcfs`).

A seat is in the cohort or in the side list. It may join when it has received a token at the very
instant at which all members received their latest (`_cohort_end_ns`): from then on its gaps are
theirs. Until then it is a member of batches by its own record, with its own gap. When the members
got theirs at the very start of a batch, who has an older one may join too: only the first gap is
its own then (`Cohort.late`), and no batch has to be formed for that alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emu.batching.base import Batch, Progress, ReplicaLimits
from emu.batching.cohort import Cohort, Seat
from emu.batching.handoff import Handoff, WithHandoff
from emu.batching.recount import check_blocks
from emu.batching.waiting import make_queue
from emu.config.schema import SchedulerTable
from emu.kv.blocks import BlockPool
from emu.kv.pool import CountingPool
from emu.kv.tiers import LowerTier
from emu.latency.base import next_decode_shape
from emu.request import Request
from emu.units import ceil_div

Record = tuple[Seat, int, int]
"""A member of a batch outside the cohort: seat, new tokens, computed tokens after the batch."""


class CohortScheduler(WithHandoff):
    """Base of schedulers whose plain decodes advance together."""

    policy = ""
    grows = True
    """Blocks are taken as tokens come; False: all of them at admission."""

    def __init__(
        self,
        table: SchedulerTable,
        limits: ReplicaLimits,
        *,
        preemptions_max: int = 0,
        tiers: Sequence[LowerTier] = (),
    ) -> None:
        """`preemptions_max`: a request preempted more often fails (0 = no limit). `tiers`: KV
        tiers below the GPU pool, used only with prefix caching."""
        self.table = table
        self.limits = limits
        self.preemptions_max = preemptions_max
        self.blocks_total = limits.num_blocks
        caching = self.grows and limits.prefix_caching and table.prefix_caching
        self.block_pool = (
            BlockPool(limits.num_blocks, limits.block_size, tiers) if caching else None
        )
        self.pool: BlockPool | CountingPool = self.block_pool or CountingPool(
            limits.num_blocks, limits.block_size
        )
        self._queue = make_queue(table.order)
        self._handoff = Handoff(self.pool, self.blocks_of)
        self._cohort = Cohort(
            limits.block_size,
            track_members=caching,
            counts_blocks=self.grows and not caching,
            chunk_tokens=tiers[0].chunk_tokens if tiers and caching else 0,
        )
        self._seats: dict[int, Seat] = {}
        """By request id; the order of the dictionary is the order of admission."""
        self._side: dict[int, Seat] = {}
        """By admission, in that order: seats outside the cohort."""
        self._records: dict[int, list[Record]] = {}
        """By batch in flight."""
        self._leaping: Batch | None = None
        """The batch in flight in which the cohort takes part."""
        self._admissions = 0
        self._busy_ns = 0
        """Time in batches so far (one pipeline stage)."""
        self._next_batch_id = 0
        self._cohort_end_ns = -1
        """When every cohort member received its latest token."""
        self._failed: list[tuple[Request, str]] = []

    def blocks_of(self, request: Request) -> int:
        """Blocks to reserve for an inbound request: those of prompt and output so far."""
        return ceil_div(request.prompt_tokens + request.generated_tokens, self.limits.block_size)

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

    def prefix_match(self, request: Request) -> int:
        """Prompt tokens of a request that the GPU pool holds (what a router may ask)."""
        return 0 if self.block_pool is None else self.block_pool.match(request)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests."""
        return self._queue.prompt_tokens

    # --- seats ------------------------------------------------------------------------------
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request joins the waiting queue; it has no KV here."""
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        request.computed_tokens = 0
        request.kv_blocks = 0
        request.block_ids = None
        self._queue.append(request)

    def _sit(self, request: Request) -> Seat:
        """A seat beside the cohort, admitted after all others."""
        seat = Seat(request, self._admissions, busy_since_ns=self._busy_ns)
        self._admissions += 1
        self._seats[request.request_id] = seat
        self._side[seat.admission] = seat
        return seat

    def _seat_arrived(self, seats_max: int) -> None:
        """Requests that came with their KV sit down as long as there is room, in order."""
        arrived = self._handoff.arrived
        for request_id in list(arrived):
            if len(self._seats) >= seats_max:
                return
            request = arrived.pop(request_id)
            seat = self._sit(request)
            seat.prefilling = (
                request.generated_tokens == 0
                or request.computed_tokens < request.reached_tokens - 1
            )

    def _join_ready(self, now_ns: int = -1) -> None:
        """Side seats that decode plainly join the cohort if their latest token came with its.

        With `now_ns`, the start of a batch, the others join late if the cohort's came just now.
        """
        cohort = self._cohort
        size = self.limits.block_size if self.grows else 0
        ready = [
            seat
            for seat in self._side.values()
            if not (seat.prefilling or seat.pending)
            and (not size or seat.request.kv_blocks == -(-seat.request.computed_tokens // size))
        ]
        if ready and cohort.count == 0:
            latest_ns = max(seat.request.last_token_ns for seat in ready)
            self._cohort_end_ns = latest_ns if now_ns < 0 else now_ns
        for seat in ready:
            is_late = seat.request.last_token_ns != self._cohort_end_ns
            if is_late and now_ns != self._cohort_end_ns:
                continue
            del self._side[seat.admission]
            cohort.join(seat)
            if is_late:
                cohort.late.append(seat)

    def _dissolve(self) -> None:
        """Everybody to the side list: this iteration is walked in order of admission."""
        for seat in self._seats.values():
            if seat.in_cohort:
                self._leave_cohort(seat)
        self._side = {seat.admission: seat for seat in self._seats.values()}

    def _leave_cohort(self, seat: Seat) -> None:
        cohort = self._cohort
        cohort.leave(seat)
        if seat in cohort.late:  # its first step here does not end
            cohort.late.remove(seat)
        else:
            seat.request.last_token_ns = self._cohort_end_ns

    def _vacate(self, seat: Seat) -> None:
        """The request has no seat any more; its counts are exact, its blocks are still its own."""
        if seat.in_cohort:
            self._leave_cohort(seat)
        else:
            self._side.pop(seat.admission, None)
        request = seat.request
        del self._seats[request.request_id]
        seat.is_alive = False
        # One batch at a time: whoever runs takes part in all of them.
        request.execution_ns += self._busy_ns - seat.busy_since_ns

    # --- leaps and ends ---------------------------------------------------------------------
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
            if self.grows:
                self.pool.blocks_free -= cohort.blocks_of(more)
            assert self.pool.blocks_free >= 0
            cohort.step += more
            return
        for _ in range(more):
            for seat in self._start_cohort_step():
                self._index_filled(seat)

    def _start_cohort_step(self) -> list[Seat]:
        """Take the blocks of the cohort's next step; who then has a block to be indexed."""
        cohort = self._cohort
        pool = self.block_pool
        fillers: list[Seat] = []
        if pool is not None:
            if cohort.blocks_next():
                for seat in cohort.takers():
                    pool.grow_by_one(seat.request)
            fillers = cohort.fillers()
        elif self.grows:
            blocks = cohort.blocks_next()
            if blocks:
                self.pool.blocks_free -= blocks
                assert self.pool.blocks_free >= 0
        cohort.step += 1
        return fillers

    def _index_filled(self, seat: Seat) -> None:
        """The step just started fills a member's block, which others can find from now on."""
        pool = self.block_pool
        assert pool is not None
        computed = self._cohort.step + seat.offset - 1
        pool.index_at(seat.request, computed // pool.block_size - 1)

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """The first `steps` iterations of a leap ended at `now_ns`, the next one is in flight.

        For whoever must change or lose the running set in the middle of an iteration: afterwards
        the batch is that one iteration, as if it had been stepped to.
        """
        assert 0 < steps < batch.max_steps
        self.settle(batch, steps + 1)
        assert batch.steps_settled == steps + 1
        progress = Progress()
        if self._cohort.count:
            self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
        self._cohort_end_ns = now_ns
        self._busy_ns += now_ns - batch.formed_ns
        batch.shape = next_decode_shape(batch.shape, steps)
        batch.max_steps = batch.steps_settled = 1
        batch.formed_ns = now_ns
        return progress

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        if steps != batch.steps_settled:
            self.settle(batch, steps)
        assert steps == batch.steps_settled
        progress = Progress()
        records = self._records.pop(batch.batch_id)
        if self.limits.pipeline_stages == 1:
            self._busy_ns += now_ns - batch.formed_ns
        else:
            for seat, _, _ in records:
                seat.request.execution_ns += now_ns - batch.formed_ns
        ended: list[Seat] = []
        if batch is self._leaping:
            cohort = self._cohort
            self._leaping = None
            if cohort.count:
                self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
            cohort.in_flight = 0
            self._cohort_end_ns = now_ns
            ended = cohort.pop_ended()
            for seat in ended:
                seat.request.last_token_ns = now_ns
        for seat, new, target in records:
            if seat.is_alive and self._end_record(seat, new, target, now_ns, progress):
                ended.append(seat)
        if len(ended) > 1:
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
        progress.decode_tokens += count * steps
        completed = cohort.step if batch.steps_settled == steps else cohort.step - 1
        if batch.formed_ns == self._cohort_end_ns:
            progress.cohort_size = count
            if cohort.late:
                if steps > 1:
                    progress.late_gaps_ns = cohort.end_late(batch.first_end_ns)
                else:
                    progress.gaps_ns = cohort.end_late(now_ns)
                    progress.cohort_size -= len(progress.gaps_ns)
            cohort.note_gap(longest_step_ns, completed)
        else:
            assert steps == 1
            gap_ns = now_ns - self._cohort_end_ns
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
        if seat.prefilling and request.first_token_ns >= 0:
            progress.resumed.append(request)
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

    def _holders(self) -> list[Request]:
        """All whose blocks are not free, but for the detached."""
        return list(self.residents())

    def recount(self) -> list[str]:
        """Full check of the books; one line for each thing that is wrong."""
        problems = check_blocks(self.pool, self._holders(), self._handoff, self.limits.block_size)
        problems += [
            f"request {r.request_id} waits with blocks" for r in self._queue if r.kv_blocks
        ]
        if sum(r.prompt_tokens for r in self._queue) != self._queue.prompt_tokens:
            problems.append("waiting tokens do not add up")
        members = sum(seat.in_cohort for seat in self._seats.values())
        if members != self._cohort.count:
            problems.append(f"cohort of {self._cohort.count}, counted {members}")
        if members + len(self._side) != len(self._seats):
            problems.append("a running request is neither in the cohort nor beside it")
        return problems


def _admission(seat: Seat) -> int:
    return seat.admission
