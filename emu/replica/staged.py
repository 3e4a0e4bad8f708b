"""Batches on the stages of a pipeline: several are in flight and leave the last one in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.replica.outcome import complete
from emu.scheduling.base import Batch
from emu.scheduling.stages import discount_bubbles

if TYPE_CHECKING:
    from emu.replica.replica import Replica


async def launch(replica: Replica, batch: Batch) -> None:
    """Put a batch into the pipeline: stages are FIFO and costs known, so its end is too."""
    if replica.latency.foreign:
        incarnation = replica.incarnation
        await replica.latency.measure(batch.shape)  # type: ignore[attr-defined]
        if replica.incarnation != incarnation:
            return
    costs_ns = replica.latency.stage_ns(batch.shape)
    if replica.slowdown != 1.0:
        costs_ns = tuple(int(cost_ns * replica.slowdown) for cost_ns in costs_ns)
    if replica.wave_wait_ns:
        each, more = divmod(replica.wave_wait_ns, replica.stages)
        costs_ns = tuple(cost + each + (i < more) for i, cost in enumerate(costs_ns))
    if replica.first_uses:
        costs_ns = (costs_ns[0] + replica.first_uses.popleft(), *costs_ns[1:])
    replica._on_stages.append((replica.pipeline.enter(replica.kernel.now_ns, costs_ns), batch))


async def wait_for_stage(replica: Replica) -> None:
    """Until the oldest batch leaves the last stage, or something new arrives."""
    incarnation = replica.incarnation
    await replica.inbox.wait(replica._on_stages[0][0][-1].end_ns if replica._on_stages else None)
    while (
        replica.incarnation == incarnation
        and replica._on_stages
        and replica._on_stages[0][0][-1].end_ns <= replica.kernel.now_ns
    ):
        spans, batch = replica._on_stages.popleft()
        discount_bubbles(batch, spans)
        start_ns = spans[0].start_ns
        gap_ns = spans[-1].end_ns - batch.formed_ns  # it may have waited for the first stage
        complete(replica, batch, 1, start_ns, None, gap_ns, spans)
