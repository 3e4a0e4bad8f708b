"""What the steps of a batch bring about: blocks as a step starts, tokens and ends as it ends.

Base of the schedulers with a decode cohort; owns nothing beside the seats (`seats.py`).

Leaps. Steps 2 to n of a leap are settled when somebody looks or when it ends: until then they are
a promise. A leap is a decode run of the whole cohort. Its first step may be more than that: a
batch that ends prompts *runs on* (`Batch.run_on`) if its members are certain to form the next
batches alone. What its first step brought is entered as the second one is settled (`_end_prompts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.latency.base import next_decode_shape
from emu.request import Request
from emu.scheduling.base import Batch, Progress, RunOn
from emu.scheduling.cohort import Seat
from emu.scheduling.seats import Seats, admission


class CohortScheduler(Seats):
    """Base of schedulers whose plain decodes advance together; subclasses form the batches."""

    def settle(self, batch: Batch, steps: int) -> None:
        """Take the blocks of the steps up to `steps` of a leap in flight (idempotent)."""
        more = steps - batch.steps_settled
        if more <= 0:
            return
        assert steps <= batch.max_steps, "settled beyond the promise"
        if batch.run_on is not None and batch.steps_settled == 1:
            self._end_prompts(batch, batch.run_on)
        batch.steps_settled = steps
        self._next_batch_id += more
        cohort = self._cohort
        if batch is not self._leaping or not cohort.count:
            return
        if self._counts_blocks:
            blocks = cohort.blocks_of(more)
            if blocks:
                free = self.pool.blocks_free = self.pool.blocks_free - blocks
                assert free >= 0
        elif self.block_pool is not None:
            end = cohort.step + more
            for step in cohort.busy_steps(more):
                cohort.step = step
                for seat in self._start_cohort_step():
                    self._index_filled(seat)
            cohort.step = end
            return
        cohort.step += more

    def _start_cohort_step(self) -> Sequence[Seat]:
        """Take the blocks of the cohort's next step; who then has a block to be indexed."""
        cohort = self._cohort
        fillers: Sequence[Seat] = ()
        if self._counts_blocks:
            blocks = cohort.blocks_next()
            if blocks:
                free = self.pool.blocks_free = self.pool.blocks_free - blocks
                assert free >= 0
        elif self.block_pool is not None:
            pool = self.block_pool
            if cohort.blocks_next():
                for seat in cohort.takers():
                    pool.grow_by_one(seat.request)
            fillers = cohort.fillers()
        cohort.step += 1
        cohort.in_flight = 1
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
        run_on = batch.run_on
        if run_on is None:
            batch.shape = next_decode_shape(batch.shape, steps)
        else:
            progress.opening = run_on.opening
            batch.shape = next_decode_shape(run_on.shape, steps - 1)
            batch.chunks = []
        if self._cohort.count:
            self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
        self._cohort_end_ns = now_ns
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
        records = self._records.pop(batch.batch_id)
        formed_ns = batch.formed_ns
        self._last_start_ns = batch.last_start_ns if steps > 1 else formed_ns
        if self._stages == 1:
            self._busy_ns += now_ns - formed_ns
        else:
            for seat, _, _ in records:
                seat.request.execution_ns += now_ns - formed_ns
        ended: list[Seat] = []
        if batch is self._leaping:
            cohort = self._cohort
            self._leaping = None
            if cohort.count:
                self._end_cohort_steps(batch, steps, now_ns, longest_step_ns, progress)
            cohort.in_flight = 0
            self._cohort_end_ns = now_ns
            ended = cohort.pop_ended(now_ns)
        for seat, new, target in records:
            if seat.is_alive and self._end_record(seat, new, target, now_ns, progress):
                ended.append(seat)
        if ended:
            self._finish(ended, progress)
        if self._failed:
            progress.failed, self._failed = self._failed, []
        return progress

    def _end_cohort_steps(
        self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int, progress: Progress
    ) -> None:
        """Every member received `steps` tokens, the last one now (with an opening, one less)."""
        cohort = self._cohort
        count = cohort.count
        completed = cohort.step if batch.steps_settled == steps else cohort.step - 1
        started_ns = batch.formed_ns
        if progress.opening is not None:
            started_ns = batch.first_end_ns
            steps -= 1
            if steps == 0:
                return
        progress.decode_tokens += count * steps
        if started_ns == self._cohort_end_ns:
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

    def _end_prompts(self, batch: Batch, run_on: RunOn) -> None:
        """The first step of a batch that runs on has ended: its members all decode from here."""
        cohort, at_ns = self._cohort, batch.first_end_ns
        run_on.opening = opening = Progress()
        if cohort.count:
            self._end_cohort_steps(batch, 1, at_ns, at_ns - batch.formed_ns, opening)
        cohort.in_flight = 0
        self._cohort_end_ns = at_ns
        for seat, new, target in self._records[batch.batch_id]:
            is_over = self._end_record(seat, new, target, at_ns, opening)
            assert not is_over
            del self._side[seat.admission]
            cohort.join(seat)
        self._records[batch.batch_id] = []
        cohort.in_flight = 1

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

    def _finish(self, seats: list[Seat], progress: Progress) -> None:
        """They have all of their output, and leave in order of admission."""
        if len(seats) > 1:
            seats.sort(key=admission)
        for seat in seats:
            request = seat.request
            self._vacate(seat)
            if self._queue.counts_service:
                self._queue.charge(request.tenant, request.generated_tokens)
            self._let_go(request)
            progress.finished.append(request)

    def _let_go(self, request: Request) -> None:
        """Its blocks are free."""
        self.pool.release(request)
