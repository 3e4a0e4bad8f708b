"""Faults of what controls a cluster, and of what it keeps: caches, drains, the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.config.tables.faults import (
    CxlLost,
    DrainExpired,
    HostCacheLost,
    HostCacheStale,
    MetricsDelayed,
    MetricsFrozen,
    MetricsLost,
    PlannerRestart,
)
from emu.replica.events import TierLost
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector


def lose_cache(injector: Injector, fault: HostCacheLost, rng: np.random.Generator) -> None:
    """A machine's memory loses the model's weights, and the KV of a tier there."""
    assert fault.node is not None
    injector.note(fault, f"machine {fault.node}")
    lose_memory(injector, fault.node)


def lose_memory(injector: Injector, machine: int) -> None:
    """Nothing is left in the memory of a machine."""
    cluster = injector.cluster
    injector.recovery.lose_weights(machine)
    for scaler in cluster.scalers:
        scaler.lose_cache(machine)
    _lose_tier(injector, "cpu", machine)
    for replica in cluster.replicas:
        if replica.machine == machine:
            replica.actor.look()  # what it found there is there no more


def lose_cxl(injector: Injector, fault: CxlLost, rng: np.random.Generator) -> None:
    """The CXL pool that a machine uses loses the KV of a tier there."""
    if "cxl" not in injector.cluster.tiers.kinds:
        injector.miss(fault, "no tier of KV is in CXL memory")
        return
    assert fault.node is not None
    injector.note(fault, f"the CXL pool of machine {fault.node}")
    _lose_tier(injector, "cxl", fault.node)


def _lose_tier(injector: Injector, kind: str, machine: int) -> None:
    """Replicas that keep KV there find nothing; one that is reading it computes it instead."""
    cluster = injector.cluster
    for replica_id in cluster.tiers.lose(kind, machine):
        replica = cluster.replicas[replica_id]
        tier = cluster.tiers.kinds.index(kind)
        replica.actor.tell(TierLost(tier=tier))
        tokens = replica.recall_tokens_lost
        if tokens:
            text = f"{tokens} tokens are computed instead of read"
            cluster.note("recall lost", replica.name, text)


def stale_cache(injector: Injector, fault: HostCacheStale, rng: np.random.Generator) -> None:
    """The directory says that a machine has the weights, and they are gone."""
    scalers = injector.cluster.scalers

    def is_gone(machine: int) -> bool:
        if fault.node not in (None, machine):
            return False
        if fault.probability < 1.0 and rng.random() >= fault.probability:
            return False
        injector.note(fault, f"machine {machine}")
        return True

    trusts = [scaler.distrust(is_gone) for scaler in scalers]

    def over() -> None:
        for trust in trusts:
            trust()
        injector.end(fault, "host caches")

    injector.until(fault, "host caches", over)


def expire_drain(injector: Injector, fault: DrainExpired, rng: np.random.Generator) -> None:
    """Those that drain now, and with a duration those that begin to drain in the window."""
    struck = [r for r in injector.cluster.replicas if injector.meets_drain(fault, r)]
    for replica in struck:
        injector.expire_drain(fault, replica)
    if fault.duration_s:
        injector.watch_drains(fault)
    elif not struck:
        injector.miss(fault, "no replica drains")


def blur_metrics(
    injector: Injector,
    fault: MetricsDelayed | MetricsFrozen | MetricsLost,
    rng: np.random.Generator,
) -> None:
    """What the planner knows of the load stands still, comes late, or does not come at all."""
    scalers = injector.cluster.scalers
    if not scalers[0].is_active:
        injector.miss(fault, "there is no planner")
        return
    injector.note(fault, "planner")
    late_ns = ms_to_ns(fault.delay_ms) if isinstance(fault, MetricsDelayed) else 0
    if not (late_ns or fault.duration_s):
        injector.recovery.lose_capacity()  # what is not there by now may never be ordered
    for scaler in scalers:
        sight = scaler.sight
        if late_ns:
            sight.slow(late_ns, scaler.snapshot())
        elif isinstance(fault, MetricsFrozen):
            sight.freeze(scaler.snapshot())
        else:
            sight.lose()

    def over() -> None:
        for scaler in scalers:
            sight = scaler.sight
            if late_ns:
                sight.slow(-late_ns, scaler.snapshot())
            elif isinstance(fault, MetricsFrozen):
                sight.thaw()
            else:
                sight.find()
            scaler.look()
        injector.end(fault, "planner")

    injector.until(fault, "planner", over)


def restart_planner(injector: Injector, fault: PlannerRestart, rng: np.random.Generator) -> None:
    """The planner loses its memory, and is back after the fault's duration."""
    scalers = injector.cluster.scalers
    if not scalers[0].is_active:
        injector.miss(fault, "there is no planner")
        return
    injector.note(fault, "planner")
    for scaler in scalers:
        scaler.restart(injector.kernel.now_ns + s_to_ns(fault.duration_s))
