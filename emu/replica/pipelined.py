"""Batches on the stages of a pipeline: several are in flight and leave the last one in order.

While it is certain that they follow each other in turn, they do so as one leap
(`emu/scheduling/rotation.py`): its ends go into the books at the next look, and whatever happens
to the replica ends it, with the batches on the stages that stepping would have there.
"""

from __future__ import annotations

from typing import Final, final

from emu.kernel.clock import PARK
from emu.replica.completion import complete, end_turns
from emu.replica.events import Event
from emu.replica.replica import LOOP, RESTING, STAGED, Replica
from emu.scheduling.base import Batch
from emu.scheduling.rotation import Rotation
from emu.scheduling.stages import StageSpan, discount_bubbles

_ROUNDS_MIN: Final = 8
_ROUNDS_MAX: Final = 64
"""Batches of each turn that are planned at once: as many as the last rotation had, then twice."""


def launch(replica: Replica, batch: Batch) -> None:
    """Put a batch into the pipeline: stages are FIFO and costs known, so its end is too."""
    costs_ns = replica.latency.stage_ns(batch.shape)
    if replica.slowdown != 1.0:
        costs_ns = tuple(int(cost_ns * replica.slowdown) for cost_ns in costs_ns)
    if replica.jitter is not None:
        costs_ns = replica.jitter.stages(costs_ns)
    if replica.wave_wait_ns:
        each, more = divmod(replica.wave_wait_ns, replica.stages)
        costs_ns = tuple(cost + each + (i < more) for i, cost in enumerate(costs_ns))
    if replica.first_uses:
        costs_ns = (costs_ns[0] + replica.first_uses.popleft(), *costs_ns[1:])
    replica.on_stages.append((replica.pipeline.enter(replica.clock.now_ns, costs_ns), batch))


@final
class Turns:
    """A rotation of a replica: what has ended goes into the books at the next look."""

    replica: Replica
    rotation: Rotation

    __slots__ = ("replica", "rotation")

    def __init__(self, replica: Replica, rotation: Rotation) -> None:
        self.replica = replica
        self.rotation = rotation

    def begin(self) -> int:
        """Batches of a pipeline are not begun one by one."""
        raise AssertionError("a rotation has its batches on the stages")

    def go_on(self) -> int:
        """Nor do they end so."""
        raise AssertionError("a rotation has its batches on the stages")

    def plan(self) -> int:
        """Plan the next piece: when it is over."""
        replica, rotation = self.replica, self.rotation
        rounds = rotation.planned // len(rotation.turns) or replica.rounds_seen
        rounds = min(max(rounds, _ROUNDS_MIN), _ROUNDS_MAX)
        jitter = replica.jitter
        vary = None if jitter is None else jitter.spread
        before = 0 if jitter is None else jitter.counted
        if rotation.planned == 0 and replica.has_lines:
            rotation.follow(replica.stage_lines)
        rotation.plan(rounds, replica.pipeline.free_ns, replica.stage_run_ns, vary, before)
        return rotation.due_ns

    def settle(self) -> None:
        """Bring the books up to now.

        At the very end of a batch the order of priorities says whether it has been handled.
        """
        clock = self.replica.clock
        is_past = clock.priority_reached > self.replica.priority
        self.advance(self.rotation.ended_by(clock.now_ns + is_past))

    def advance(self, ended: int) -> None:
        """Enter the ends into the books, up to so many."""
        replica, rotation = self.replica, self.rotation
        begin, count = rotation.done, len(rotation.turns)
        if ended <= begin:
            return
        rotation.done = ended
        told, stream = begin, replica.stream
        for index in range(begin, min(ended, count)):
            if rotation.turns[index].is_plain:
                continue
            if stream is not None:
                sizes = [len(turn.members) for turn in rotation.turns]
                stream.turns(rotation.ends, told, index, sizes)
            told = index + 1
            spans, batch = replica.on_stages[index]
            discount_bubbles(batch, spans)
            end_ns = spans[-1].end_ns
            gap_ns = end_ns - batch.formed_ns
            complete(replica, batch, 1, spans[0].start_ns, None, gap_ns, spans, end_ns)
        end_turns(replica, rotation, begin, ended, told)
        busy_ns = replica.pipeline.busy_ns
        for stage, costs_ns in enumerate(rotation.costs):
            busy_ns[stage] += sum(costs_ns[begin:ended])

    def unroll(self) -> None:
        """The rotation is over now: what is in flight is on the stages, as stepping has it."""
        self.settle()
        replica, rotation = self.replica, self.rotation
        replica.own_leap = None
        done, count = rotation.done, len(rotation.turns)
        replica.rounds_seen = done // count + 1
        on_stages = replica.on_stages
        if replica.jitter is not None:
            replica.jitter.counted += done
        if done:
            batches = [on_stages.popleft()[1] for _ in range(min(done, count))]
            batches = replica.scheduler.resume(rotation, batches)
            for index, batch in enumerate(batches, done + count - len(batches)):
                on_stages.append((_spans(rotation, index), batch))
            replica.pipeline.free_ns[:] = [leaves[done + count - 1] for leaves in rotation.leaves]
        replica.cut_ns = on_stages[0][0][-1].end_ns


def wait_for_stage(replica: Replica) -> int:
    """Wait until the oldest batch leaves the last stage, or something new arrives."""
    replica.activity = STAGED
    if not replica.on_stages:
        return PARK
    due_ns = replica.on_stages[0][0][-1].end_ns
    if replica.may_rotate and due_ns > replica.clock.now_ns and not (replica.out or replica.posted):
        rotation = replica.scheduler.rotation([batch for _, batch in replica.on_stages])
        if rotation is not None and rotation.start(
            [[span.end_ns for span in spans] for spans, _ in replica.on_stages]
        ):
            turns = Turns(replica, rotation)
            replica.own_leap = turns
            return turns.plan()
    return due_ns


def _spans(rotation: Rotation, batch: int) -> list[StageSpan]:
    """Where a batch that was formed again is when."""
    spans, formed = [], batch - len(rotation.turns)
    for stage, leaves in enumerate(rotation.leaves):
        end_ns = leaves[batch]
        spans.append(StageSpan(stage, end_ns - rotation.costs[stage][formed], end_ns))
    return spans


def stage_left(replica: Replica, event: Event) -> int:
    """Batches that have left the last stage by now are complete; then look at everything."""
    now_ns = replica.clock.now_ns
    rotating = replica.own_leap
    if isinstance(rotating, Turns):
        rotation = rotating.rotation
        goes_on = now_ns == rotation.due_ns and rotation.planned < rotation.ends_max
        if goes_on and not (replica.posted or replica.is_paused):
            return rotating.plan()
        rotating.unroll()
        replica.cut_ns = -1
    replica.activity = RESTING
    while replica.on_stages and replica.on_stages[0][0][-1].end_ns <= now_ns:
        spans, batch = replica.on_stages.popleft()
        discount_bubbles(batch, spans)
        start_ns = spans[0].start_ns
        gap_ns = spans[-1].end_ns - batch.formed_ns  # it may have waited for the first stage
        complete(replica, batch, 1, start_ns, None, gap_ns, spans)
    return LOOP
