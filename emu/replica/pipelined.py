"""Batches on the stages of a pipeline: several are in flight and leave the last one in order."""

from __future__ import annotations

from emu.kernel.clock import PARK
from emu.replica.completion import complete
from emu.replica.events import Event
from emu.replica.replica import LOOP, RESTING, STAGED, Replica
from emu.scheduling.base import Batch
from emu.scheduling.stages import discount_bubbles


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


def wait_for_stage(replica: Replica) -> int:
    """Until the oldest batch leaves the last stage, or something new arrives."""
    replica.activity = STAGED
    return replica.on_stages[0][0][-1].end_ns if replica.on_stages else PARK


def stage_left(replica: Replica, event: Event) -> int:
    """Batches that have left the last stage by now are complete; then look at everything."""
    replica.activity = RESTING
    now_ns = replica.clock.now_ns
    while replica.on_stages and replica.on_stages[0][0][-1].end_ns <= now_ns:
        spans, batch = replica.on_stages.popleft()
        discount_bubbles(batch, spans)
        start_ns = spans[0].start_ns
        gap_ns = spans[-1].end_ns - batch.formed_ns  # it may have waited for the first stage
        complete(replica, batch, 1, start_ns, None, gap_ns, spans)
    return LOOP
