"""Faults of what controls a cluster, and of what it keeps: caches, drains, the planner."""

from __future__ import annotations

from emu.config.schema import FaultTable
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
from emu.faults.injector import Strike
from emu.faults.ports import FaultWorld
from emu.replica.events import TierLost
from emu.units import ms_to_ns, s_to_ns


def lose_cache(strike: Strike[HostCacheLost]) -> None:
    """A machine's memory loses the model's weights, and the KV of a tier there."""
    fault = strike.fault
    assert fault.node is not None
    strike.note(f"machine {fault.node}")
    lose_memory(strike, fault.node)


def lose_memory(strike: Strike[FaultTable], machine: int) -> None:
    """Nothing is left in the memory of a machine."""
    cluster = strike.cluster
    strike.recovery.lose_weights(machine)
    for scaler in cluster.scalers:
        scaler.lose_cache(machine)
    _lose_tier(strike.cluster, "cpu", machine)
    for replica in cluster.replicas:
        if replica.machine == machine:
            replica.actor.look()  # what it found there is there no more


def lose_cxl(strike: Strike[CxlLost]) -> None:
    """The CXL pool that a machine uses loses the KV of a tier there."""
    fault = strike.fault
    if "cxl" not in strike.cluster.tiers.kinds:
        strike.miss("no tier of KV is in CXL memory")
        return
    assert fault.node is not None
    strike.note(f"the CXL pool of machine {fault.node}")
    _lose_tier(strike.cluster, "cxl", fault.node)


def _lose_tier(cluster: FaultWorld, kind: str, machine: int) -> None:
    """Replicas that keep KV there find nothing; one that is reading it computes it instead."""
    for replica_id in cluster.tiers.lose(kind, machine):
        replica = cluster.replicas[replica_id]
        tier = cluster.tiers.kinds.index(kind)
        replica.actor.tell(TierLost(tier=tier))
        tokens = replica.recall_tokens_lost
        if tokens:
            text = f"{tokens} tokens are computed instead of read"
            cluster.note("recall lost", replica.name, text)


def stale_cache(strike: Strike[HostCacheStale]) -> None:
    """The directory says that a machine has the weights, and they are gone."""
    fault = strike.fault
    scalers = strike.cluster.scalers

    def is_gone(machine: int) -> bool:
        if fault.node not in (None, machine):
            return False
        if fault.probability < 1.0 and strike.rng.random() >= fault.probability:
            return False
        strike.note(f"machine {machine}")
        return True

    trusts = [scaler.distrust(is_gone) for scaler in scalers]

    def over() -> None:
        for trust in trusts:
            trust()
        strike.end("host caches")

    strike.until("host caches", over)


def expire_drain(strike: Strike[DrainExpired]) -> None:
    """Those that drain now, and with a duration those that begin to drain in the window."""
    fault = strike.fault
    struck = [r for r in strike.cluster.replicas if strike.injector.meets_drain(fault, r)]
    for replica in struck:
        strike.injector.expire_drain(fault, replica)
    if fault.duration_s:
        strike.injector.watch_drains(fault)
    elif not struck:
        strike.miss("no replica drains")


def blur_metrics(strike: Strike[MetricsDelayed | MetricsFrozen | MetricsLost]) -> None:
    """What the planner knows of the load stands still, comes late, or does not come at all."""
    fault = strike.fault
    scalers = strike.cluster.scalers
    if not scalers[0].is_active:
        strike.miss("there is no planner")
        return
    strike.note("planner")
    late_ns = ms_to_ns(fault.delay_ms) if isinstance(fault, MetricsDelayed) else 0
    if not (late_ns or fault.duration_s):
        strike.recovery.lose_capacity()  # what is not there by now may never be ordered
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
        strike.end("planner")

    strike.until("planner", over)


def restart_planner(strike: Strike[PlannerRestart]) -> None:
    """The planner loses its memory, and is back after the fault's duration."""
    fault = strike.fault
    scalers = strike.cluster.scalers
    if not scalers[0].is_active:
        strike.miss("there is no planner")
        return
    strike.note("planner")
    for scaler in scalers:
        scaler.restart(strike.kernel.now_ns + s_to_ns(fault.duration_s))
