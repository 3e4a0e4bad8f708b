"""Pipeline stages of one replica: a FIFO each, and when every batch is where.

Batches enter in the order in which they were formed and never overtake, so the times follow
from a recurrence: a batch starts on a stage when it has left the one before and the stage is
free. The scheduler limits how many batches are in flight; this module only keeps time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass
from emu.scheduling.base import Batch, members_of


class StageSpan(NamedTuple):
    """A batch on one stage, from start to end."""

    stage: int
    start_ns: int
    end_ns: int


class Pipeline:
    """The stages of one replica and the time at which each becomes free."""

    def __init__(self, stages: int) -> None:
        self.free_ns = [0] * stages
        self.busy_ns = [0] * stages

    def enter(self, now_ns: int, stage_ns: Sequence[int]) -> list[StageSpan]:
        """A batch formed at `now_ns` with these durations queues up; its span on each stage."""
        assert len(stage_ns) == len(self.free_ns), "one duration per stage"
        spans = []
        ready_ns = now_ns
        for stage, duration_ns in enumerate(stage_ns):
            start_ns = max(ready_ns, self.free_ns[stage])
            ready_ns = start_ns + duration_ns
            self.free_ns[stage] = ready_ns
            self.busy_ns[stage] += duration_ns
            spans.append(StageSpan(stage, start_ns, ready_ns))
        return spans

    def reset(self, now_ns: int) -> None:
        """Everything under way is lost (the replica crashed)."""
        self.free_ns = [now_ns] * len(self.free_ns)


def bubble_ns(spans: Sequence[StageSpan], formed_ns: int) -> int:
    """Time from formation to the last end in which the batch was on no stage."""
    return spans[-1].end_ns - formed_ns - ran_ns(spans)


def ran_ns(spans: Sequence[StageSpan]) -> int:
    """What a batch takes on all stages together."""
    total = 0
    for _, start_ns, end_ns in spans:
        total += end_ns - start_ns
    return total


def discount_bubbles(batch: Batch, spans: Sequence[StageSpan]) -> None:
    """Take time spent between stages out of the members' execution time, and note how long a
    member's first batch waited for the first stage.

    `Scheduler.complete` counts a batch from its formation to its end, the only two instants that
    it knows. To be called before it, with where the batch was when.
    """
    wait_ns = bubble_ns(spans, batch.formed_ns)
    if not wait_ns:
        return
    queued_ns = spans[0].start_ns - batch.formed_ns
    for request in members_of(batch):
        request.execution_ns -= wait_ns
        if request.first_scheduled_ns == batch.formed_ns:
            request.stage_wait_ns = queued_ns
