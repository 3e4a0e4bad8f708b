"""What schedulers with a decode cohort share: who has a seat, who waits, who comes and leaves.

Owns: the running set (cohort and side list), the waiting queue, the pool, and the records of
batches in flight. What the steps of a batch bring about is `steps.py`; batches are formed by the
subclasses (`vllm`, `fcfs`).

A seat is in the cohort or in the side list. It may join when it has received a token at the very
instant at which all members received their latest (`_cohort_end_ns`): from then on its gaps are
theirs. Until then it is a member of batches by its own record, with its own gap. When the members
got theirs at the very start of a batch, who has an older one may join too: only the first gap is
its own then (`Cohort.late`), and no batch has to be formed for that alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emu.config.schema import SchedulerTable
from emu.kv.blocks import BlockPool
from emu.kv.pool import CountingPool
from emu.kv.tiers import LowerTier
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.cohort import Cohort, Seat
from emu.scheduling.handoff import Handoff, WithHandoff
from emu.scheduling.recount import check_blocks
from emu.scheduling.waiting import make_queue
from emu.units import ceil_div

Record = tuple[Seat, int, int]
"""A member of a batch outside the cohort: seat, new tokens, computed tokens after the batch."""


class Seats(WithHandoff):
    """Running set, queue and pool of a scheduler whose plain decodes advance together."""

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
        self._stages = limits.pipeline_stages
        caching = self.grows and limits.prefix_caching and table.prefix_caching
        self.block_pool = (
            BlockPool(limits.num_blocks, limits.block_size, tiers) if caching else None
        )
        self.pool: BlockPool | CountingPool = self.block_pool or CountingPool(
            limits.num_blocks, limits.block_size
        )
        self._counts_blocks = self.grows and not caching
        """The cohort's blocks are taken by their number alone, as its steps start."""
        self._queue = make_queue(table.order)
        self._handoff = Handoff(self.pool, self.blocks_of)
        self._cohort = Cohort(
            limits.block_size,
            track_members=caching,
            counts_blocks=self._counts_blocks,
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
        self._last_start_ns = -1
        """Start of the last iteration that has ended."""
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
        return self._queue.count

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
            receivers.sort(key=admission)
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


def admission(seat: Seat) -> int:
    """What the running set is ordered by."""
    return seat.admission
