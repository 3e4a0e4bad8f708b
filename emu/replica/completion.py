"""What the end of a batch brings about: counters, tokens, requests that end or go on their way.

Functions of a replica that has just run something: a batch, the first iterations of a leap, or its
part of a batch that several replicas compute. Forms nothing. What is to happen to requests is added
to the replica's actions; observers (gaps, the trace, histories) are told here, as part of counting.
"""

from __future__ import annotations

from array import array
from itertools import islice
from operator import sub
from typing import Final

from emu.latency.base import BatchShape, Ends, next_decode_shape
from emu.replica.actions import End, FreeCapacity, HandOff, HandOffSecond
from emu.replica.relay_board import SplitBatch
from emu.replica.replica import Replica
from emu.replica.states import PREFILL_TYPE, ReplicaState
from emu.request import Request, Status
from emu.scheduling.base import Batch, Progress, StageSpan, ran_ns
from emu.scheduling.rotation import Rotation

_HANDS_OFF: Final = frozenset(PREFILL_TYPE | {ReplicaState.SHUTTING_PREFILL})
_COMPLETED: Final = Status.COMPLETED
DUMMY_ID: Final = -1
"""`batch_id` of a batch of one token that only keeps pace."""


def complete(
    replica: Replica,
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
    now_ns = replica.clock.now_ns if end_ns < 0 else end_ns
    observers = replica.observers
    replica.iterations += steps
    replica.busy_ns += now_ns - start_ns
    is_watched = replica.is_watched
    if is_watched and replica.steps_history is not None:
        replica.steps_history.ran(now_ns, replica.replica_id, batch, start_ns, spans)
    if batch.batch_id == DUMMY_ID:
        return
    receivers: list[Request] = []
    if is_watched:
        if replica.is_metered:
            _count(replica, batch, steps)
        if replica.tells:
            receivers = _receivers(replica, batch, steps)
    if ends is not None and replica.signals is not None:
        replica.settle_steps(batch, steps, start_ns, ends)
    progress = replica.scheduler.complete(batch, steps, now_ns, longest_ns)
    if end_ns < 0 and not replica.is_touched:
        replica.touch()
    replica.prefill_tokens += progress.prefill_tokens
    replica.decode_tokens += progress.decode_tokens
    if replica.stream is not None:
        _stream(replica, batch, progress, start_ns, ends, now_ns)
    if ends is None:
        if progress.cohort_size:
            observers.gaps.add_gap(longest_ns, progress.cohort_size, now_ns)
    else:
        _add_run(replica, batch, progress, ends, start_ns)
    if progress.gaps_ns:
        observers.gaps.add_gaps(progress.gaps_ns, now_ns)
    if is_watched:
        if observers.batches is not None:
            observers.batches.batch(replica.replica_id, batch, start_ns, now_ns, steps, spans)
        if receivers:
            _tell(replica, receivers, start_ns, ends, now_ns)
    if progress.finished or progress.first_tokens or progress.failed or progress.resumed:
        _hand_out(replica, progress, now_ns - start_ns)
    if is_watched and replica.signals is not None:
        replica.note_signal()


def end_turns(replica: Replica, rotation: Rotation, begin: int, ended: int, told: int) -> None:
    """Ends `begin` to `ended` of a rotation: members get tokens, and their batch is formed again.

    What the batches in flight that are not plain brought about is known already, and the front
    end knows of the ends before `told`.
    """
    turns, count, ends = rotation.turns, len(rotation.turns), rotation.ends
    sizes = [len(turn.members) for turn in turns]
    if replica.stream is not None:
        replica.stream.turns(ends, told, ended, sizes)
    its = ends[begin:ended]
    first = begin if begin > count else count
    before: list[int] = []
    whole = rotation.whole(max(begin - count, 0), ended - count) if ended > count else []
    in_flight = list(islice(replica.on_stages, begin, min(ended, count)))
    if in_flight:
        before = [batch.formed_ns for _, batch in in_flight]
        whole = [ran_ns(spans) for spans, _ in in_flight] + whole
    if ended > count:
        before += ends[first - count : ended - count]
        replica.busy_ns += sum(its[first - begin :]) - sum(rotation.leaves[0][first:ended])
        replica.busy_ns += sum(rotation.costs[0][first - count : ended - count])
    gaps_ns = list(map(sub, its, before))
    replica.iterations += len(its)
    others = []
    for index in range(begin, min(ended, count)):
        if turns[index].is_plain:
            replica.busy_ns += ends[index] - in_flight[index - begin][0][0].start_ns
        else:
            others.append(index - begin)
    for index, turn in enumerate(turns):
        behind = (index - begin) % count
        formed = steps = len(range(begin + behind, ended, count))
        if not formed:
            continue
        if begin <= index and not turn.is_plain:
            behind += count
            steps -= 1
        last_ns = gap_ns = run_ns = 0
        if steps:
            last_ns = its[behind + (steps - 1) * count]
            gap_ns = max(gaps_ns[behind::count])
            run_ns = sum(whole[behind::count])
            replica.decode_tokens += len(turn.members) * steps
            if replica.is_metered:
                rounds = (begin + behind) // count
                shape = next_decode_shape(turn.shape, rounds) if rounds else turn.shape
                _count_equal(replica, shape, steps)
            if replica.tells:
                requests = [one.request for one in turn.members]
                at_ns = array("q", its[behind::count])
                _tell(replica, requests, 0, at_ns, last_ns)
        replica.scheduler.turn(turn, steps, formed, last_ns, gap_ns, run_ns)
    at = begin % count
    each = (sizes[at:] + sizes[:at]) * (len(its) // count + 1)
    del each[len(its) :]
    for place in reversed(others):
        del its[place], each[place], gaps_ns[place]
    replica.iterations -= len(others)
    replica.observers.gaps.add_each(gaps_ns, each, its)


def _stream(
    replica: Replica,
    batch: Batch,
    progress: Progress,
    start_ns: int,
    ends: Ends | None,
    now_ns: int,
) -> None:
    """Output events of one step, or of the steps of a leap, pass the front end."""
    stream = replica.stream
    assert stream is not None
    opening = progress.opening
    if ends is None or (len(ends) == 1 and opening is None):
        delay_ns = stream.step(now_ns, progress.decode_tokens)
    elif opening is None:
        delay_ns = stream.run(start_ns, ends, 0, batch.shape.decode_count, replica.is_monotone)
    else:
        delay_ns = stream.step(batch.first_end_ns, opening.decode_tokens)
        for request in opening.first_tokens:
            request.first_out_ns = request.last_out_ns = delay_ns
        if len(ends) > 1 and batch.run_on is not None:
            events = batch.run_on.shape.decode_count
            delay_ns = stream.run(start_ns, ends, 1, events, replica.is_monotone)
    for request in progress.first_tokens:
        request.first_out_ns = request.last_out_ns = delay_ns
    for request in progress.finished:
        request.last_out_ns = delay_ns


def _add_run(replica: Replica, batch: Batch, progress: Progress, ends: Ends, start_ns: int) -> None:
    """Gaps of the cohort in a leap, in which some may have joined with or after the first step."""
    gaps, count = replica.observers.gaps, progress.cohort_size
    opening, late_gaps_ns = progress.opening, progress.late_gaps_ns
    if opening is not None:
        first_ns = batch.first_end_ns
        _take_opening(replica, opening, first_ns)
        if count:
            gaps.add_run(ends, count, start_ns, opening.cohort_size)
        else:
            gaps.add_gap(first_ns - start_ns, opening.cohort_size, first_ns)
    elif late_gaps_ns:
        gaps.add_gaps(late_gaps_ns, batch.first_end_ns)
        gaps.add_run(ends, count, start_ns, count - len(late_gaps_ns))
    elif count:
        gaps.add_run(ends, count, start_ns)


def _take_opening(replica: Replica, opening: Progress, at_ns: int) -> None:
    """What the first step brought about in a batch that ran on."""
    replica.prefill_tokens += opening.prefill_tokens
    replica.decode_tokens += opening.decode_tokens
    if opening.gaps_ns:
        replica.observers.gaps.add_gaps(opening.gaps_ns, at_ns)
    for request in opening.first_tokens:
        request.replica_id = replica.replica_id


def _receivers(replica: Replica, batch: Batch, steps: int) -> list[Request]:
    """The requests that got a token at the end of each of these steps."""
    if batch.run_on is not None:
        replica.scheduler.settle(batch, steps)
    return list(replica.scheduler.token_receivers(batch))


def _count(replica: Replica, batch: Batch, steps: int) -> None:
    """Tokens of the first `steps` iterations of a batch."""
    if batch.run_on is None or steps == 1:
        _count_equal(replica, batch.shape, steps)
    else:
        _count_equal(replica, batch.shape, 1)
        _count_equal(replica, batch.run_on.shape, steps - 1)


def _count_equal(replica: Replica, shape: BatchShape, steps: int) -> None:
    """Tokens of `steps` iterations, the first of this shape."""
    decodes = shape.decode_count * steps
    if decodes:
        replica.decodes_run += decodes
        context = shape.decode_context_sum * steps
        if steps > 1:
            context += decodes * (steps - 1) // 2
        replica.decode_context_run += context
    if shape.verify is not None:
        replica.decodes_run += shape.verify.tokens
        replica.decode_context_run += shape.verify.context_sum
    if shape.prefill_new:
        replica.prompts_run += sum(shape.prefill_new)
    if replica.expert_tokens is not None:
        import numpy as np

        for step in range(steps):
            its_shape = next_decode_shape(shape, step) if step else shape
            routing = replica.latency.expert_loads(its_shape)  # type: ignore[attr-defined]
            replica.expert_tokens += np.array(routing.expert_tokens, dtype=np.int64)


def end_leap_part(replica: Replica, batch: Batch, ends: Ends) -> None:
    """The first iterations of a leap have ended, and the one in flight is a batch of its own.

    For a crash or a pause in the middle of a leap (`emu/replica/crash.py`).
    """
    observers, start_ns, steps = replica.observers, replica.start_ns, len(ends)
    end_ns = start_ns + ends[-1]
    if replica.is_metered:
        _count(replica, batch, steps)
    receivers = _receivers(replica, batch, steps) if replica.tells else []
    if observers.batches is not None:
        observers.batches.batch(replica.replica_id, batch, start_ns, end_ns, steps, None)
    batch.first_end_ns = start_ns + ends[0]
    longest_ns = longest_of(ends, batch)
    if replica.signals is not None:
        replica.settle_steps(batch, steps, start_ns, ends)
    progress = replica.scheduler.split(batch, steps, end_ns, longest_ns)
    replica.iterations += steps
    replica.busy_ns += end_ns - start_ns
    replica.decode_tokens += progress.decode_tokens
    if replica.stream is not None:
        _stream(replica, batch, progress, start_ns, ends, end_ns)
    _add_run(replica, batch, progress, ends, start_ns)
    if progress.gaps_ns:
        observers.gaps.add_gaps(progress.gaps_ns, end_ns)
    if receivers:
        _tell(replica, receivers, start_ns, ends, end_ns)
    if replica.signals is not None:
        replica.note_signal()


def _tell(
    replica: Replica,
    receivers: list[Request],
    start_ns: int,
    ends: Ends | None,
    end_ns: int,
) -> None:
    """Tokens that requests got, for observers of single tokens."""
    observers = replica.observers
    if observers.history is not None:
        observers.history.tokens(replica.replica_id, receivers, start_ns, ends, end_ns)
    observers.on_tokens(replica.replica_id, receivers)


def end_part(
    replica: Replica, batch: Batch, start_ns: int, step_ns: int, split: SplitBatch | None = None
) -> None:
    """A batch that was computed layer by layer got its first tokens here.

    `split`: another replica computed its first layers.
    """
    observers = replica.observers
    if replica.steps_history is not None:
        replica.steps_history.ran(replica.clock.now_ns, replica.replica_id, batch, start_ns, None)
    receivers = list(replica.scheduler.token_receivers(batch)) if replica.tells else []
    progress = replica.scheduler.complete(batch, 1, replica.clock.now_ns, step_ns)
    if replica.stream is not None:
        _stream(replica, batch, progress, start_ns, None, replica.clock.now_ns)
    replica.touch()
    replica.iterations += 1
    replica.prefill_tokens += progress.prefill_tokens
    replica.decode_tokens += progress.decode_tokens
    if progress.gaps_ns:  # of those that had got tokens before their KV was lost
        observers.gaps.add_gaps(progress.gaps_ns, replica.clock.now_ns)
    if observers.batches is not None:
        observers.batches.batch(replica.replica_id, batch, start_ns, replica.clock.now_ns, 1, None)
    if receivers:
        _tell(replica, receivers, start_ns, None, replica.clock.now_ns)
    _hand_out(replica, progress, step_ns, split)


def _hand_out(
    replica: Replica, progress: Progress, step_ns: int, split: SplitBatch | None = None
) -> None:
    """Requests that ended leave; those whose prompt ended here go on their way."""
    out = replica.out
    for request in progress.first_tokens:
        request.replica_id = replica.replica_id
    for request in progress.finished:
        request.decode_replica_id = replica.replica_id
        out.append(End(request, _COMPLETED))
    for request, reason in progress.failed:
        out.append(End(request, Status.FAILED, reason))
    if progress.finished or progress.failed:
        out.append(FreeCapacity())
    ready = progress.first_tokens
    if progress.resumed:
        ready = [*ready, *progress.resumed]
    if (not ready and split is None) or replica.outbox is None:
        return
    if split is not None or replica.state in _HANDS_OFF:
        gone = progress.finished
        if progress.failed:
            gone = [*gone, *(request for request, _ in progress.failed)]
        leaving = [r for r in ready if not r.status.is_terminal and r not in gone]
        for request in leaving:
            replica.scheduler.detach(request)
            request.status = Status.MIGRATING
        if not replica.is_touched:
            replica.touch()
        if split is not None:
            out.append(HandOffSecond(split, leaving))
        elif leaving:
            out.append(HandOff(leaving, step_ns))


def longest_of(ends: Ends, batch: Batch) -> int:
    """Longest iteration of a decode run, which may follow a batch's first step."""
    first = 1 if batch.run_on is not None and len(ends) > 1 else 0
    longest_ns: int = 0 if first else ends[0]
    if len(ends) > 1:
        longest_ns = max(longest_ns, max(map(sub, ends[1:], ends)))
    return longest_ns
