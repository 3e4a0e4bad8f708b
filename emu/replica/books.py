"""What the end of a batch brings about: counters, tokens, requests that end or go on their way.

A replica that has just run something enters it here: a batch, the first iterations of a leap, or
its part of a batch that several replicas compute. Forms nothing. What is to happen to requests is
added to the replica's actions; observers (gaps, the trace, histories) are told here, as part of
counting.
"""

from __future__ import annotations

from array import array
from operator import sub
from typing import TYPE_CHECKING, Final, final

from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_REPLICA
from emu.kv.grouped import GroupedPool
from emu.latency.base import BatchShape, next_decode_shape
from emu.latency.ends import Ends
from emu.replica.actions import Action, End, FreeCapacity, HandOff, HandOffSecond
from emu.replica.counters import Counters
from emu.replica.pace import Pace
from emu.replica.split_batch import SplitBatch
from emu.replica.watch import Watch
from emu.request import Request, Status
from emu.scheduling.base import Batch, Progress, Scheduler
from emu.scheduling.pipeline import StageSpan, ran_ns
from emu.scheduling.rotation import Rotation

if TYPE_CHECKING:
    from emu.latency.front_end import OutputStream
    from emu.latency.moe_gate import Routing

_COMPLETED: Final = Status.COMPLETED
DUMMY_ID: Final = -1
"""`batch_id` of a batch of one token that only keeps pace."""


@final
class Books:
    """Where one replica enters what its iterations have done."""

    replica_id: int
    priority: int
    """Of the replica's turn at an instant."""
    clock: Kernel
    scheduler: Scheduler
    pace: Pace
    watch: Watch
    counters: Counters
    out: list[Action]
    """The replica's actions, to which what follows is added."""
    stream: OutputStream | None
    """The front end of its engine; None = a token is with its client at once."""
    has_outbox: bool
    """KV can leave from here."""
    hands_off: bool
    """Requests go on elsewhere when their prompt has ended here."""
    shedding: GroupedPool | None
    """The pool, where decodes give blocks back as they go on: states that are found again."""

    __slots__ = (
        "clock",
        "counters",
        "hands_off",
        "has_outbox",
        "out",
        "pace",
        "priority",
        "replica_id",
        "scheduler",
        "shedding",
        "stream",
        "watch",
    )

    def __init__(
        self,
        replica_id: int,
        clock: Kernel,
        scheduler: Scheduler,
        pace: Pace,
        watch: Watch,
        counters: Counters,
        out: list[Action],
    ) -> None:
        self.replica_id = replica_id
        self.priority = PRIORITY_REPLICA + replica_id
        self.clock = clock
        self.scheduler = scheduler
        self.pace = pace
        self.watch = watch
        self.counters = counters
        self.out = out
        self.stream = None
        self.has_outbox = self.hands_off = False
        pool = scheduler.ledger.pool
        self.shedding = pool if isinstance(pool, GroupedPool) and pool.prefix_caching else None

    def past(self, at_ns: int) -> int:
        """Time from an instant up to now: what has ended before it has been handled.

        At the very end of an iteration the order of priorities says whether it has been handled:
        stepping, the next one would be under way if our turn of this instant has passed.
        """
        clock = self.clock
        return clock.now_ns - at_ns + (clock.priority_reached > self.priority)

    def settle_steps(self, batch: Batch, steps: int, start_ns: int, ends: Ends) -> None:
        """Bring the books up to `steps` started iterations of a leap that began at `start_ns`."""
        watch = self.watch
        if watch.signals is None or not watch.signals_blocks:
            self.scheduler.settle(batch, steps)
            return
        for step in range(batch.steps_settled + 1, steps + 1):  # as stepping would have seen it
            self.scheduler.settle(batch, step)
            watch.note_signal(start_ns + ends[step - 2])

    def complete(
        self,
        batch: Batch,
        steps: int,
        start_ns: int,
        ends: Ends | None,
        longest_ns: int,
        spans: list[StageSpan] | None = None,
        end_ns: int = -1,
    ) -> None:
        """`steps` iterations of a batch, begun at `start_ns`, have ended; the longest took so long.

        `ends`: of each iteration of a leap, from its start. `spans`: on each stage of a pipeline.
        `end_ns`: when it was, in the middle of a leap that goes on; -1 = now.
        """
        now_ns = self.clock.now_ns if end_ns < 0 else end_ns
        counters, watch = self.counters, self.watch
        counters.iterations += steps
        counters.busy_ns += now_ns - start_ns
        is_watched = watch.is_watched
        receivers: list[Request] = []
        if is_watched:
            receivers = self._note(batch, steps, start_ns, ends, now_ns, spans)
        progress = self.scheduler.complete(batch, steps, now_ns, longest_ns)
        if end_ns < 0 and not watch.is_touched:
            watch.touch()
        counters.prefill_tokens += progress.prefill_tokens
        counters.decode_tokens += progress.decode_tokens
        if self.stream is not None:
            self._stream(batch, progress, start_ns, ends, now_ns)
        observers = watch.observers
        if ends is not None:
            self._add_run(batch, progress, ends, start_ns)
        elif progress.cohort_size:
            observers.gaps.add_gap(longest_ns, progress.cohort_size, now_ns)
        if progress.gaps_ns:
            observers.gaps.add_gaps(progress.gaps_ns, now_ns)
        if is_watched:
            self._show(batch, steps, start_ns, ends, now_ns, spans, receivers)
        if progress.finished or progress.first_tokens or progress.failed or progress.resumed:
            self._hand_out(progress, now_ns - start_ns)
        if is_watched and watch.signals is not None:
            watch.note_signal()

    def keep_pace(self, batch: Batch, start_ns: int, spans: list[StageSpan] | None = None) -> None:
        """A batch of one token, which only keeps pace, has ended now, or where its spans say."""
        now_ns = self.clock.now_ns
        self.counters.iterations += 1
        self.counters.busy_ns += now_ns - start_ns
        if self.watch.steps_history is not None:
            self.watch.steps_history.ran(now_ns, self.replica_id, batch, start_ns, spans)

    def _note(
        self,
        batch: Batch,
        steps: int,
        start_ns: int,
        ends: Ends | None,
        end_ns: int,
        spans: list[StageSpan] | None,
    ) -> list[Request]:
        """What it ran is noted before the scheduler knows; those that are about to get tokens."""
        watch = self.watch
        if watch.steps_history is not None:
            watch.steps_history.ran(end_ns, self.replica_id, batch, start_ns, spans)
        if watch.is_metered:
            self._count(batch, steps)
        receivers = self._receivers(batch, steps) if watch.tells else []
        if ends is not None and watch.signals is not None:
            self.settle_steps(batch, steps, start_ns, ends)
        return receivers

    def _show(
        self,
        batch: Batch,
        steps: int,
        start_ns: int,
        ends: Ends | None,
        end_ns: int,
        spans: list[StageSpan] | None,
        receivers: list[Request],
    ) -> None:
        """Observers of batches and of single tokens see the steps that have ended."""
        batches = self.watch.observers.batches
        if batches is not None:
            batches.batch(self.replica_id, batch, start_ns, end_ns, steps, spans)
        if receivers:
            self._tell(receivers, start_ns, ends, end_ns)

    def end_leap_part(self, batch: Batch, start_ns: int, ends: Ends) -> None:
        """The first iterations of a leap have ended, and the one in flight is a batch of its own.

        For a crash or a pause in the middle of a leap.
        """
        watch, counters, steps = self.watch, self.counters, len(ends)
        end_ns = start_ns + ends[-1]
        if watch.is_metered:
            self._count(batch, steps)
        receivers = self._receivers(batch, steps) if watch.tells else []
        batches = watch.observers.batches
        if batches is not None:
            batches.batch(self.replica_id, batch, start_ns, end_ns, steps, None)
        batch.first_end_ns = start_ns + ends[0]
        longest_ns = longest_of(ends, batch)
        if watch.signals is not None:
            self.settle_steps(batch, steps, start_ns, ends)
        progress = self.scheduler.split(batch, steps, end_ns, longest_ns)
        counters.iterations += steps
        counters.busy_ns += end_ns - start_ns
        counters.decode_tokens += progress.decode_tokens
        if self.stream is not None:
            self._stream(batch, progress, start_ns, ends, end_ns)
        self._add_run(batch, progress, ends, start_ns)
        if progress.gaps_ns:
            watch.observers.gaps.add_gaps(progress.gaps_ns, end_ns)
        if receivers:
            self._tell(receivers, start_ns, ends, end_ns)
        if watch.signals is not None:
            watch.note_signal()

    def end_part(
        self, batch: Batch, start_ns: int, step_ns: int, split: SplitBatch | None = None
    ) -> None:
        """A batch that was computed layer by layer got its first tokens here.

        `split`: another replica computed its first layers.
        """
        watch, counters, now_ns = self.watch, self.counters, self.clock.now_ns
        if watch.steps_history is not None:
            watch.steps_history.ran(now_ns, self.replica_id, batch, start_ns, None)
        receivers = list(self.scheduler.token_receivers(batch)) if watch.tells else []
        progress = self.scheduler.complete(batch, 1, now_ns, step_ns)
        if self.stream is not None:
            self._stream(batch, progress, start_ns, None, now_ns)
        watch.touch()
        counters.iterations += 1
        counters.prefill_tokens += progress.prefill_tokens
        counters.decode_tokens += progress.decode_tokens
        if progress.gaps_ns:  # of those that had got tokens before their KV was lost
            watch.observers.gaps.add_gaps(progress.gaps_ns, now_ns)
        self._show(batch, 1, start_ns, None, now_ns, None, receivers)
        self._hand_out(progress, step_ns, split)

    def end_turns(
        self,
        rotation: Rotation,
        begin: int,
        ended: int,
        told: int,
        in_flight: list[tuple[list[StageSpan], Batch]],
    ) -> None:
        """Ends `begin` to `ended` of a rotation: members get tokens, their batch is formed again.

        What the batches in flight that are not plain brought about is known already, and the
        front end knows of the ends before `told`. `in_flight`: batches that were in flight before
        the rotation, from `begin` on.
        """
        counters, turns, count = self.counters, rotation.turns, len(rotation.turns)
        sizes = [len(turn.members) for turn in turns]
        if self.stream is not None:
            self.stream.turns(rotation.ends, told, ended, sizes)
        gaps_ns = rotation.gaps_ns(begin, ended, [batch.formed_ns for _, batch in in_flight])
        others = [i for i in range(begin, min(ended, count)) if not turns[i].is_plain]
        counters.busy_ns += rotation.first_stage_ns(begin, ended)
        for index in range(begin, min(ended, count)):
            if index not in others:
                counters.busy_ns += rotation.ends[index] - in_flight[index - begin][0][0].start_ns
        for turn, rounds, formed, ends_ns, gaps, run_ns in rotation.passed(
            begin, ended, gaps_ns, [ran_ns(spans) for spans, _ in in_flight]
        ):
            steps, last_ns, gap_ns = len(ends_ns), 0, 0
            if steps:
                last_ns, gap_ns = ends_ns[-1], max(gaps)
                counters.iterations += steps
                counters.decode_tokens += len(turn.members) * steps
                if self.watch.is_metered:
                    shape = next_decode_shape(turn.shape, rounds) if rounds else turn.shape
                    self._count_equal(shape, steps)
                if self.watch.tells:
                    requests = [one.request for one in turn.members]
                    self._tell(requests, 0, array("q", ends_ns), last_ns)
            self.scheduler.turn(turn, steps, formed, last_ns, gap_ns, run_ns)
        at, its = begin % count, rotation.ends[begin:ended]
        each = (sizes[at:] + sizes[:at]) * (len(its) // count + 1)
        del each[len(its) :]
        for index in reversed(others):
            del its[index - begin], each[index - begin], gaps_ns[index - begin]
        self.watch.observers.gaps.add_each(gaps_ns, each, its)

    def _stream(
        self, batch: Batch, progress: Progress, start_ns: int, ends: Ends | None, now_ns: int
    ) -> None:
        """Output events of one step, or of the steps of a leap, pass the front end."""
        stream, is_monotone = self.stream, self.pace.is_monotone
        assert stream is not None
        opening = progress.opening
        if ends is None or (len(ends) == 1 and opening is None):
            events, firsts = progress.decode_tokens, len(progress.first_tokens)
            delay_ns = stream.step(now_ns, events, firsts, progress.made_tokens)
        elif opening is None:
            events, made = batch.shape.decode_count, progress.made_tokens
            delay_ns = stream.run(start_ns, ends, 0, events, is_monotone, made)
        else:
            first = opening.first_tokens
            events, made = opening.decode_tokens, opening.made_tokens
            delay_ns = stream.step(batch.first_end_ns, events, len(first), made)
            for request in first:
                request.first_out_ns = request.last_out_ns = stream.first_delay_ns
            if len(ends) > 1 and batch.run_on is not None:
                events, made = batch.run_on.shape.decode_count, progress.made_tokens
                delay_ns = stream.run(start_ns, ends, 1, events, is_monotone, made)
        for request in progress.finished:
            request.last_out_ns = delay_ns
        for request in progress.first_tokens:
            request.first_out_ns = request.last_out_ns = stream.first_delay_ns

    def _add_run(self, batch: Batch, progress: Progress, ends: Ends, start_ns: int) -> None:
        """Gaps of the cohort in a leap, in which some may have joined with or after its first."""
        gaps, count = self.watch.observers.gaps, progress.cohort_size
        opening, late_gaps_ns = progress.opening, progress.late_gaps_ns
        if opening is not None:
            first_ns = batch.first_end_ns
            self._take_opening(opening, first_ns)
            if count:
                gaps.add_run(ends, count, start_ns, opening.cohort_size)
            else:
                gaps.add_gap(first_ns - start_ns, opening.cohort_size, first_ns)
        elif late_gaps_ns:
            gaps.add_gaps(late_gaps_ns, batch.first_end_ns)
            gaps.add_run(ends, count, start_ns, count - len(late_gaps_ns))
        elif count:
            gaps.add_run(ends, count, start_ns)

    def _take_opening(self, opening: Progress, at_ns: int) -> None:
        """What the first step brought about in a batch that ran on."""
        self.counters.prefill_tokens += opening.prefill_tokens
        self.counters.decode_tokens += opening.decode_tokens
        if opening.gaps_ns:
            self.watch.observers.gaps.add_gaps(opening.gaps_ns, at_ns)
        for request in opening.first_tokens:
            request.replica_id = self.replica_id

    def _receivers(self, batch: Batch, steps: int) -> list[Request]:
        """The requests that got a token at the end of each of these steps."""
        if batch.run_on is not None:
            self.scheduler.settle(batch, steps)
        found = self.scheduler.token_receivers(batch)
        return found if isinstance(found, list) else list(found)

    def _count(self, batch: Batch, steps: int) -> None:
        """Tokens of the first `steps` iterations of a batch."""
        if batch.run_on is None or steps == 1:
            self._count_equal(batch.shape, steps)
        else:
            self._count_equal(batch.shape, 1)
            self._count_equal(batch.run_on.shape, steps - 1)

    def _count_equal(self, shape: BatchShape, steps: int) -> None:
        """Tokens of `steps` iterations, the first of this shape."""
        counters = self.counters
        decodes = shape.decode_count * steps
        if decodes:
            counters.decodes_run += decodes
            context = shape.decode_context_sum * steps
            if steps > 1:
                context += decodes * (steps - 1) // 2
            counters.decode_context_run += context
        if shape.verify is not None:
            counters.decodes_run += shape.verify.tokens
            counters.decode_context_run += shape.verify.context_sum
        if shape.prefill_new:
            for new, context in zip(shape.prefill_new, shape.prefill_context, strict=True):
                counters.prompts_run += new
                counters.prompt_pairs_run += new * context + new * (new + 1) // 2
        if counters.expert_tokens is not None:
            self._count_experts(shape, steps)

    def _count_experts(self, shape: BatchShape, steps: int) -> None:
        """Tokens of each expert in `steps` iterations; those of equal routings are added once."""
        expert_loads = self.pace.expert_loads
        assert expert_loads is not None
        last: Routing | None = None
        times = 0
        for step in range(steps):
            routing = expert_loads(next_decode_shape(shape, step) if step else shape)
            assert routing is not None
            if routing is last:
                times += 1
                continue
            if last is not None:
                self._add_experts(last, times)
            last, times = routing, 1
        if last is not None:
            self._add_experts(last, times)

    def _add_experts(self, routing: Routing, times: int) -> None:
        import numpy as np

        counted = self.counters.expert_tokens
        assert counted is not None
        counted += np.array(routing.expert_tokens, dtype=np.int64) * times

    def _tell(
        self, receivers: list[Request], start_ns: int, ends: Ends | None, end_ns: int
    ) -> None:
        """Tokens that requests got, for observers of single tokens."""
        observers = self.watch.observers
        if observers.history is not None:
            observers.history.tokens(self.replica_id, receivers, start_ns, ends, end_ns)
        observers.on_tokens(self.replica_id, receivers)

    def _hand_out(self, progress: Progress, step_ns: int, split: SplitBatch | None = None) -> None:
        """Requests that ended leave; those whose prompt ended here go on their way."""
        out, replica_id = self.out, self.replica_id
        for request in progress.first_tokens:
            request.replica_id = replica_id
        for request in progress.finished:
            request.decode_replica_id = replica_id
            out.append(End(request, _COMPLETED))
        for request, reason in progress.failed:
            out.append(End(request, Status.FAILED, reason))
        if progress.finished or progress.failed:
            out.append(FreeCapacity())
        if self.hands_off if split is None else self.has_outbox:
            self._send_on(progress, step_ns, split)

    def _send_on(self, progress: Progress, step_ns: int, split: SplitBatch | None) -> None:
        """Those whose prompt ended here, and that go on, leave with their KV."""
        ready = progress.first_tokens
        if progress.resumed:
            ready = [*ready, *progress.resumed]
        if not ready and split is None:
            return
        gone = progress.finished
        if progress.failed:
            gone = [*gone, *(request for request, _ in progress.failed)]
        leaving = [r for r in ready if not r.status.is_terminal and r not in gone]
        for request in leaving:
            self.scheduler.detach(request)
            request.status = Status.MIGRATING
        if not self.watch.is_touched:
            self.watch.touch()
        if split is not None:
            self.out.append(HandOffSecond(split, leaving))
        elif leaving:
            self.out.append(HandOff(leaving, step_ns))


def longest_of(ends: Ends, batch: Batch) -> int:
    """Longest iteration of a decode run, which may follow a batch's first step."""
    first = 1 if batch.run_on is not None and len(ends) > 1 else 0
    longest_ns: int = 0 if first else ends[0]
    if len(ends) > 1:
        longest_ns = max(longest_ns, max(map(sub, ends[1:], ends)))
    return longest_ns
