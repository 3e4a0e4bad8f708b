"""The running set of a replica: its members, batches in flight, and what their steps bring about.

A part of the schedulers with a decode cohort (`vllm`, `fcfs`), which form the batches. Owns the
running requests in order of admission, their cohort, and the records of batches in flight. Blocks
are taken here as a step starts, tokens and ends are counted here as it ends.

A running request is in the cohort (`emu/scheduling/cohort.py`) or beside it. It may join when it
has received a token at the very instant at which all members received their latest
(`cohort_end_ns`): from then on its gaps are theirs. Until then it is a member of batches by its
own record, with its own gap. When the members got theirs at the very start of a batch, requests
with an older one may join too: only the first gap is their own then (`Cohort.late`), and no batch
has to be formed for that alone.

Leaps. Steps 2 to n of a leap are settled when they are read or when it ends: until then they are
a promise. A leap is a decode run of the whole cohort. Its first step may be more than that: a
batch that ends prompts *runs on* (`Batch.run_on`) if its members are certain to form the next
batches alone. What its first step brought is entered as the second one is settled (`_end_prompts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mypy_extensions import mypyc_attr

from emu.kv.blocks import BlockPool
from emu.kv.grouped import GroupedPool
from emu.latency.base import BatchShape, next_decode_shape
from emu.request import Request
from emu.scheduling.base import Batch, Progress, ReplicaLimits, RunOn
from emu.scheduling.cohort import Cohort, RunningRequest
from emu.scheduling.ledger import Ledger
from emu.scheduling.parts import Part
from emu.scheduling.rotation import Rotation, Turn

Record = tuple[RunningRequest, int, int]
"""A member of a batch outside the cohort: request, new tokens, computed tokens after the batch."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RunningSet:
    """Admitted requests in order of admission, and the batches that they are in."""

    def __init__(
        self,
        ledger: Ledger,
        limits: ReplicaLimits,
        *,
        grows: bool = True,
        frees_late: bool = False,
    ) -> None:
        """`grows`: blocks are taken as tokens come. `frees_late`: what ended keeps its place and
        its blocks until `free_ended` (the next batch is formed before the end is known)."""
        self.limits = limits
        self.ledger = ledger
        self.grows = grows
        self.frees_late = frees_late
        pool = ledger.pool
        self.block_pool = pool if isinstance(pool, BlockPool) else None
        self.grouped = pool if isinstance(pool, GroupedPool) else None
        self.counts_blocks = grows and self.grouped is None
        """The cohort's blocks are taken by their number alone, as its steps start."""
        tiers = () if self.block_pool is None else self.block_pool.tiers
        self.cohort = Cohort(
            limits.block_size,
            track_members=self.block_pool is not None,
            counts_blocks=self.counts_blocks,
            chunk_tokens=tiers[0].chunk_tokens if tiers else 0,
        )
        self.requests: dict[int, RunningRequest] = {}
        """By request id; the order of the dictionary is the order of admission."""
        self.beside: dict[int, RunningRequest] = {}
        """Those outside the cohort by admission, in that order."""
        self.records: dict[int, list[Record]] = {}
        """By batch in flight."""
        self.leaping: Batch | None = None
        """The batch in flight in which the cohort takes part."""
        self.leaving: list[Request] = []
        """Ended with the last batch; their places and blocks are not free yet (`frees_late`)."""
        self.last_start_ns = -1
        """Start of the last iteration that has ended."""
        self.next_batch_id = 0
        self.cohort_end_ns = -1
        """When every cohort member received its latest token."""
        self.parts: Sequence[Part] = ()
        """What features of the replica do with the running requests."""
        self._of_cohort: tuple[int, list[Request]] = (-1, [])
        """Its requests, when it had changed so often."""
        self._admissions = 0
        self._busy_ns = 0
        """Time in batches so far (one pipeline stage)."""

    # Members.
    def admit(self, request: Request) -> RunningRequest:
        """The request runs from now on, beside the cohort, admitted after all others."""
        running = RunningRequest(request, self._admissions, self._busy_ns)
        self._admissions += 1
        if self.parts:
            for part in self.parts:
                part.begin(request)
        self.requests[request.request_id] = running
        self.beside[running.admission] = running
        return running

    def admit_arrived(self, requests_max: int) -> None:
        """Requests that came with their KV are admitted while there is room, in order."""
        arrived = self.ledger.arrived
        for request_id in list(arrived):
            if len(self.requests) >= requests_max:
                return
            if self.parts and not self.may_run(arrived[request_id]):
                continue
            request = arrived.pop(request_id)
            running = self.admit(request)
            running.prefilling = (
                request.generated_tokens == 0
                or request.computed_tokens < request.reached_tokens - 1
            )

    def may_run(self, request: Request) -> bool:
        """Whether no feature keeps the request from joining the running ones."""
        return all(part.may_run(request) for part in self.parts)

    def last(self) -> RunningRequest:
        """The request admitted last."""
        return self.requests[next(reversed(self.requests))]

    def join_ready(self, now_ns: int = -1) -> None:
        """Requests beside the cohort join it if they decode, and their latest token came with its.

        With `now_ns`, the start of a batch, the others join late if the cohort's came just now.
        """
        cohort = self.cohort
        size = self.limits.block_size if self.counts_blocks else 0
        ready = [
            running
            for running in self.beside.values()
            if not (running.prefilling or running.pending)
            and (
                not size or running.request.kv_blocks == -(-running.request.computed_tokens // size)
            )
        ]
        if ready and cohort.count == 0:
            latest_ns = max(running.request.last_token_ns for running in ready)
            self.cohort_end_ns = latest_ns if now_ns < 0 else now_ns
        for running in ready:
            is_late = running.request.last_token_ns != self.cohort_end_ns
            if is_late and now_ns != self.cohort_end_ns:
                continue
            del self.beside[running.admission]
            cohort.join(running)
            if is_late:
                cohort.late.append(running)

    def dissolve(self) -> None:
        """All members leave the cohort: this iteration is walked in order of admission."""
        for running in self.requests.values():
            if running.in_cohort:
                self._leave_cohort(running)
        self.beside = {running.admission: running for running in self.requests.values()}

    def _leave_cohort(self, running: RunningRequest) -> None:
        cohort = self.cohort
        cohort.leave(running)
        if running in cohort.late:  # its first step here does not end
            cohort.late.remove(running)
        else:
            running.request.last_token_ns = self.cohort_end_ns

    def remove(self, running: RunningRequest) -> None:
        """The request runs no more; its counts are exact, its blocks are still its own."""
        if running.in_cohort:
            self._leave_cohort(running)
        else:
            self.beside.pop(running.admission, None)
        request = running.request
        if self.parts:
            for part in self.parts:
                part.end(request)
        del self.requests[request.request_id]
        running.is_alive = False
        # One batch at a time: a running request takes part in all of them.
        request.execution_ns += self._busy_ns - running.busy_since_ns

    def residents(self) -> Iterable[Request]:
        """Running requests in order of admission, then those that arrived and wait to be."""
        for running in self.requests.values():
            if running.in_cohort:
                self.cohort.materialise(running)
            yield running.request
        yield from self.ledger.arrived.values()

    def look_up(self, request: Request) -> None:
        """See `Scheduler.look_up`."""
        running = self.requests.get(request.request_id)
        if running is not None and running.in_cohort:
            self.cohort.materialise(running)

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at the end of each of its steps."""
        receivers = [
            running
            for running, _, target in self.records.get(batch.batch_id, ())
            if running.is_alive and target >= running.request.reached_tokens
        ]
        if batch is self.leaping:
            if not receivers:
                return self._cohort_requests()
            receivers += [running for running in self.requests.values() if running.in_cohort]
            receivers.sort(key=admission)
        return [running.request for running in receivers]

    def _cohort_requests(self) -> list[Request]:
        """Those of the cohort's members: the same list, as long as these are the same."""
        changes = self.cohort.changes
        if changes != self._of_cohort[0]:
            members = [one.request for one in self.requests.values() if one.in_cohort]
            self._of_cohort = (changes, members)
        return self._of_cohort[1]

    def members(self, batch: Batch) -> list[tuple[Request, int, int]]:
        """(request, tokens computed before, new tokens) of each member of a batch just formed."""
        found = [
            (running.admission, running.request, target - new, new)
            for running, new, target in self.records[batch.batch_id]
        ]
        if batch is self.leaping:
            step = self.cohort.step
            found += [
                (running.admission, running.request, step + running.offset - 2, 1)
                for running in self.requests.values()
                if running.in_cohort
            ]
        found.sort()
        return [(request, before, new) for _, request, before, new in found]

    # Leaving.
    def cancel(self, request: Request) -> bool:
        """A waiting or running request leaves, its blocks are free. False if it is not here."""
        ledger = self.ledger
        running = self.requests.get(request.request_id)
        if running is not None:
            self.remove(running)
        elif ledger.arrived.pop(request.request_id, None) is None:
            return ledger.queue.remove(request)
        ledger.queue.charge(request.tenant, request.generated_tokens)
        ledger.pool.release(request)
        return True

    def detach(self, request: Request) -> None:
        """A running request leaves, but keeps its blocks."""
        running = self.requests.get(request.request_id)
        if running is None:
            del self.ledger.arrived[request.request_id]
        else:
            in_flight = self.cohort.in_flight if running.in_cohort else running.pending
            self.remove(running)
            request.computed_tokens -= in_flight  # what a batch in flight computes is lost
        self.ledger.queue.charge(request.tenant, request.generated_tokens)
        self.ledger.hold(request)

    def evacuate(self) -> list[Request]:
        """All running requests leave, blocks not freed; no batch is in flight any more."""
        members = list(self.requests.values())
        for running in members:
            self.remove(running)
        self.records.clear()
        self.leaving.clear()
        self.leaping = None
        self.cohort.in_flight = 0
        for part in self.parts:
            part.clear()
        return [running.request for running in members]

    def free_ended(self) -> bool:
        """Free what ended with the last batch, if that has not been done; whether there was any."""
        leaving, self.leaving = self.leaving, []
        for request in leaving:
            self.ledger.pool.release(request)
        return bool(leaving)

    # Steps start.
    def start_cohort_step(self) -> Sequence[RunningRequest]:
        """Take the blocks of the cohort's next step; the members that fill a block with it."""
        cohort = self.cohort
        fillers: Sequence[RunningRequest] = ()
        if self.counts_blocks:
            blocks = cohort.blocks_next()
            if self.block_pool is None:
                if blocks:
                    pool = self.ledger.pool
                    free = pool.blocks_free = pool.blocks_free - blocks
                    assert free >= 0
            else:
                if blocks:
                    self.block_pool.take(blocks)
                fillers = cohort.fillers()
        cohort.step += 1
        cohort.in_flight = 1
        if self.grouped is not None:
            self._advance(self.grouped)
        return fillers

    def _advance(self, pool: GroupedPool) -> None:
        """Members of the cohort take and leave behind what the steps up to now ask for."""
        step = self.cohort.step
        for running in self.requests.values():
            if running.in_cohort:
                target = step + running.offset - 1
                pool.advance(running.request, target - 1, target)

    def index_filled(self, running: RunningRequest) -> None:
        """The step just started fills a member's block, which others can find from now on."""
        pool = self.block_pool
        assert pool is not None
        computed = self.cohort.step + running.offset - 1
        pool.index_at(running.request, computed // pool.block_size - 1)

    def settle(self, batch: Batch, steps: int) -> None:
        """Take the blocks of the steps up to `steps` of a leap in flight (idempotent)."""
        more = steps - batch.steps_settled
        if more <= 0:
            return
        assert steps <= batch.max_steps, "settled beyond the promise"
        if batch.run_on is not None and batch.steps_settled == 1:
            self._end_prompts(batch, batch.run_on)
        batch.steps_settled = steps
        self.next_batch_id += more
        cohort = self.cohort
        if batch is not self.leaping or not cohort.count:
            return
        if self.block_pool is not None and cohort.has_indexers:
            self._settle_indexed(more)
            return
        if self.counts_blocks:
            blocks = cohort.blocks_of(more)
            if blocks and self.block_pool is not None:
                self.block_pool.take(blocks)
            elif blocks:
                pool = self.ledger.pool
                free = pool.blocks_free = pool.blocks_free - blocks
                assert free >= 0
        cohort.step += more
        if self.grouped is not None:
            self._advance(self.grouped)

    def _settle_indexed(self, more: int) -> None:
        """The same for members that fill blocks which others can find: step by step."""
        cohort = self.cohort
        end = cohort.step + more
        for step in cohort.busy_steps(more):
            cohort.step = step
            for running in self.start_cohort_step():
                self.index_filled(running)
        cohort.step = end

    # Steps end.
    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """The first `steps` iterations of a leap ended at `now_ns`, the next one is in flight."""
        assert 0 < steps < batch.max_steps
        self.settle(batch, steps + 1)
        assert batch.steps_settled == steps + 1
        progress = Progress()
        run_on = batch.run_on
        if run_on is None:
            batch.shape = next_decode_shape(batch.shape, steps)
        else:
            progress.opening = run_on.opening
            batch.shape = next_decode_shape(run_on.shape, steps - 1)
            batch.chunks = []
        if self.cohort.count:
            self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
        self.cohort_end_ns = now_ns
        self._busy_ns += now_ns - batch.formed_ns
        batch.run_on = None
        batch.max_steps = batch.steps_settled = 1
        batch.formed_ns = now_ns
        return progress

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        if steps != batch.steps_settled:
            self.settle(batch, steps)
        progress = Progress()
        if batch.run_on is not None:
            progress.opening = batch.run_on.opening
        records = self.records.pop(batch.batch_id)
        formed_ns = batch.formed_ns
        self.last_start_ns = batch.last_start_ns if steps > 1 else formed_ns
        if self.limits.pipeline_stages == 1:
            self._busy_ns += now_ns - formed_ns
        else:
            _charge(records, now_ns - formed_ns)
        ended: list[RunningRequest] = []
        if batch is self.leaping:
            cohort = self.cohort
            self.leaping = None
            if cohort.count:
                self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
            cohort.in_flight = 0
            self.cohort_end_ns = now_ns
            ended = cohort.pop_ended(now_ns)
        for running, new, target in records:
            if running.is_alive and self.end_record(running, new, target, now_ns, progress):
                ended.append(running)
        if ended:
            self._finish(ended, progress)
        if self.ledger.failed:
            progress.failed = self.ledger.take_failed()
        return progress

    def _end_cohort_steps(
        self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int, progress: Progress
    ) -> None:
        """Every member received `steps` tokens, the last one now (with an opening, one less)."""
        cohort = self.cohort
        count = cohort.count
        completed = cohort.step if batch.steps_settled == steps else cohort.step - 1
        started_ns = batch.formed_ns
        if progress.opening is not None:
            started_ns = batch.first_end_ns
            steps -= 1
            if steps == 0:
                return
        progress.decode_tokens += count * steps
        reached = count * (completed - steps + 1) + cohort.offset_sum
        progress.made_tokens += reached - cohort.prompt_sum
        if started_ns == self.cohort_end_ns:
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
            gap_ns = now_ns - self.cohort_end_ns
            late_gaps_ns = cohort.end_late(now_ns) if cohort.late else []
            progress.gaps_ns = [gap_ns] * (count - len(late_gaps_ns)) + late_gaps_ns
            cohort.note_gap(gap_ns, completed)

    def _end_prompts(self, batch: Batch, run_on: RunOn) -> None:
        """The first step of a batch that runs on has ended: its members all decode from here."""
        cohort, at_ns = self.cohort, batch.first_end_ns
        run_on.opening = opening = Progress()
        if cohort.count:
            self._end_cohort_steps(batch, 1, at_ns, at_ns - batch.formed_ns, opening)
        cohort.in_flight = 0
        self.cohort_end_ns = at_ns
        for running, new, target in self.records[batch.batch_id]:
            is_over = self.end_record(running, new, target, at_ns, opening)
            assert not is_over
            del self.beside[running.admission]
            cohort.join(running)
        self.records[batch.batch_id] = []
        cohort.in_flight = 1

    def end_record(
        self, running: RunningRequest, new: int, target: int, now_ns: int, progress: Progress
    ) -> bool:
        """The outcome of a member outside the cohort. True if its output is complete.

        `new` and `target` count tokens.
        """
        request = running.request
        running.pending -= new
        if running.prefilling:
            progress.prefill_tokens += new
        if target < request.prompt_tokens + request.generated_tokens:
            return False
        if running.prefilling and request.first_token_ns >= 0:
            progress.resumed.append(request)
        running.prefilling = False
        request.generated_tokens += 1
        progress.decode_tokens += 1
        if request.first_token_ns < 0:
            request.first_token_ns = now_ns
            progress.first_tokens.append(request)
        else:
            progress.made_tokens += request.generated_tokens
            gap_ns = now_ns - request.last_token_ns
            progress.gaps_ns.append(gap_ns)
            if gap_ns > request.max_gap_ns:
                request.max_gap_ns = gap_ns
        request.last_token_ns = now_ns
        return request.generated_tokens >= request.output_tokens

    def _finish(self, ended: list[RunningRequest], progress: Progress) -> None:
        """They have all of their output, and leave in order of admission."""
        if len(ended) > 1:
            ended.sort(key=admission)
        queue, pool = self.ledger.queue, self.ledger.pool
        for running in ended:
            request = running.request
            self.remove(running)
            if queue.counts_service:
                queue.charge(request.tenant, request.generated_tokens)
            if self.frees_late:
                self.leaving.append(request)
            else:
                pool.release(request)
            progress.finished.append(request)

    # Batches in turn.
    def rotation(self, batches: Sequence[Batch], tokens_max: int) -> Rotation | None:
        """How long the batches in flight follow each other, if none is admitted.

        Each must give all of its members a token, and have `tokens_max` members at most.
        """
        if self.ledger.arrived or len(batches) != len(self.records):
            return None
        members, count = 0, len(batches)
        ends_max = 1 << 62
        turns: list[Turn] = []
        for index, batch in enumerate(batches):
            turn = batch.turn or self._turn(batch)
            if turn is None or len(turn.members) > tokens_max:
                return None
            for one in turn.members:
                if not one.is_alive:
                    return None
            if (turn.left - 1) * count + index < ends_max:
                ends_max = (turn.left - 1) * count + index
            members += len(turn.members)
            turns.append(turn)
        if members != len(self.requests):
            return None
        # In so many batches of its own, a member takes a block at most each time that one is full.
        ends_max = min(
            ends_max, self.ledger.pool.blocks_free // members * self.limits.block_size * count
        )
        return Rotation(turns, ends_max, self.next_batch_id) if ends_max > 0 else None

    def _turn(self, batch: Batch) -> Turn | None:
        """The members of a batch in flight, if each gets a token with it."""
        members: list[RunningRequest] = []
        records = self.records[batch.batch_id]
        left = total = most = 0
        least = 1 << 62
        formed_ns, is_plain = batch.formed_ns, not batch.chunks
        for one, _, target in records:
            request = one.request
            generated = request.generated_tokens
            if target < request.prompt_tokens + generated:
                return None
            members.append(one)
            total += target
            if target > most:
                most = target
            if target < least:
                least = target
            if not left or request.output_tokens - generated < left:
                left = request.output_tokens - generated
            if request.last_token_ns != formed_ns:
                is_plain = False
        count = len(members)
        shape = BatchShape(None, None, count, total - count, most - 1, least - 1, count)
        return Turn(members, shape, left, batch.batch_id, is_plain=is_plain)

    def turn(
        self, turn: Turn, ended: int, formed: int, last_ns: int, gap_ns: int, run_ns: int
    ) -> None:
        """See `Scheduler.turn`."""
        size, taken = self.limits.block_size, 0
        for one in turn.members:
            request = one.request
            computed = request.computed_tokens = request.computed_tokens + formed
            blocks = -(-computed // size)
            if blocks > request.kv_blocks:
                taken += blocks - request.kv_blocks
                request.kv_blocks = blocks
            if ended:
                request.generated_tokens += ended
                request.last_token_ns = last_ns
                request.execution_ns += run_ns
                if gap_ns > request.max_gap_ns:
                    request.max_gap_ns = gap_ns
        if taken:
            pool = self.ledger.pool
            free = pool.blocks_free = pool.blocks_free - taken
            assert free >= 0

    def resume(self, rotation: Rotation, batches: list[Batch]) -> list[Batch]:
        """See `Scheduler.resume`."""
        turns, count, done = rotation.turns, len(rotation.turns), rotation.done
        self.next_batch_id = rotation.batch_id + done
        found = []
        for index, batch in enumerate(batches):
            turn = turns[index]
            formed = len(range(index, done, count))
            last = index + (formed - 1) * count
            batch_id = rotation.batch_id + last
            self.records.pop(turn.batch_id, None)
            self.records[batch_id] = [(one, 1, one.request.computed_tokens) for one in turn.members]
            if not turn.is_plain:
                batch = Batch(batch_id, turn.shape, [], 1, 0, [one.request for one in turn.members])
                for one in turn.members:
                    one.pending = 1
            batch.turn, batch.shape = turn, turn.shape
            turn.go_on(formed, batch_id)
            batch.batch_id = batch_id
            batch.formed_ns = rotation.ends[last]
            found.append(batch)
        at = done % count if done > count else 0
        return found[at:] + found[:at]

    # Checks.
    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        problems = self.ledger.recount([*self.residents(), *self.leaving])
        members = sum(running.in_cohort for running in self.requests.values())
        if members != self.cohort.count:
            problems.append(f"cohort of {self.cohort.count}, counted {members}")
        if members + len(self.beside) != len(self.requests):
            problems.append("a running request is neither in the cohort nor beside it")
        if self.parts:
            running_requests = [running.request for running in self.requests.values()]
            present = [*self.residents(), *self.ledger.queue]
            for part in self.parts:
                problems += part.recount(running_requests, present)
        return problems


def admission(running: RunningRequest) -> int:
    """What the running set is ordered by."""
    return running.admission


def _charge(records: Sequence[Record], ran_ns: int) -> None:
    """Members of a batch on a pipeline have run so long, each for itself."""
    for running, _, _ in records:
        running.request.execution_ns += ran_ns
