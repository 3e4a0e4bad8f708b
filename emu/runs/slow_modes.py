"""Which modes of a run cost much more CPU for each request than a plain one (docs/speed.md)."""

from __future__ import annotations

from typing import Final

from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import Config
from emu.process.compiled import build
from emu.scheduling.parts import STEPS_BY_THE_RULE

COSTS_FROM_S: Final = 10.0
"""A run that took at least so many seconds names its slow modes."""


def slow_modes(config: Config, plan: Plan) -> list[str]:
    """Names of those that cost at least twice a plain run, in the order of the table."""
    found: dict[str, None] = {}
    for replica in plan.replicas:
        found.update(dict.fromkeys(_of_replica(replica)))
    if config.output.trace or config.output.events:
        found["a trace of events"] = None
    if not build().compiled:
        found["pure Python (no compiled build)"] = None
    return list(found)


def _of_replica(replica: ReplicaPlan) -> list[str]:
    found = [one.name for one in replica.features if STEPS_BY_THE_RULE in dict(one.forbids)]
    if replica.data_parallel_group:
        found.append("data-parallel groups")
    if replica.pipeline_parallel > 1:
        found.append("pipelines")
    if replica.latency.backend == "astra-sim":
        found.append("ASTRA-Sim")
    if replica.latency.jitter:
        found.append("jitter")
    return found


def slow_line(config: Config, plan: Plan, wall_s: float) -> str:
    """What the last line of a run adds if it has taken long in slow modes; else nothing."""
    if wall_s < COSTS_FROM_S:
        return ""
    found = slow_modes(config, plan)
    return f"; slow here: {', '.join(found)} (docs/speed.md)" if found else ""
