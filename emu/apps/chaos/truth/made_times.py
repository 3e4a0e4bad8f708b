"""Which second model of costs a replica has: that of its kind of layers."""

from __future__ import annotations

from emu.apps.chaos.truth.step_times import StepTimes, is_restated
from emu.apps.chaos.truth.unlike_layers import UnlikeSteps
from emu.cluster.plan import Plan
from emu.config.schema import Config
from emu.latency.context import LatencyContext


def made_of(context: LatencyContext) -> StepTimes:
    """The times of a kind that `is_restated`."""
    return UnlikeSteps(context) if context.model.special_layers else StepTimes(context)


def times_of(config: Config, plan: Plan) -> dict[int, StepTimes]:
    """Times by replica, where all is restated; replicas of a kind share one."""
    known: list[tuple[LatencyContext, StepTimes]] = []
    found: dict[int, StepTimes] = {}
    for replica in plan.replicas:
        context = replica.latency_context(config)
        if not is_restated(context):
            continue
        times = next((times for other, times in known if other == context), None)
        if times is None:
            times = made_of(context)
            known.append((context, times))
        found[replica.replica_id] = times
    return found
