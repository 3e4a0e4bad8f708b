"""Faults of what controls a cluster, and of what it keeps: caches, drains, the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.config.schema import FaultTable
from emu.units import s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector


def lose_cache(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """A machine's memory loses the model's weights, and the KV of a tier there."""
    injector.note(fault, f"machine {fault.node}")
    if fault.node not in injector.recovery.cacheless:
        injector.recovery.cacheless.append(fault.node)
    cluster = injector.cluster
    cluster.scaler.lose_cache(fault.node)
    cluster.tiers.lose_host(fault.node)
    for replica in cluster.replicas:
        if replica.machine == fault.node:
            replica.inbox.poke()  # what it found there is there no more


def stale_cache(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """The directory says that a machine has the weights, and they are gone."""
    scaler = injector.cluster.scaler

    def is_gone(machine: int) -> bool:
        if fault.node not in (-1, machine):
            return False
        if fault.probability < 1.0 and rng.random() >= fault.probability:
            return False
        injector.note(fault, f"machine {machine}")
        return True

    scaler.stale.append(is_gone)
    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), lambda: scaler.stale.remove(is_gone))


def expire_drain(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Those that drain now, and with a duration those that begin to drain in the window."""
    struck = [r for r in injector.cluster.replicas if injector.meets_drain(fault, r)]
    for replica in struck:
        injector.expire_drain(fault, replica)
    if fault.duration_s:
        injector.drains.append(fault)

        def over() -> None:
            injector.drains.remove(fault)
            injector.end(fault, fault.kind)

        injector.later(s_to_ns(fault.duration_s), over)
    elif not struck:
        injector.miss(fault, "no replica drains")


def freeze_metrics(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """The planner sees the cluster as it was when the fault began."""
    scaler = injector.cluster.scaler
    if not scaler.is_active:
        injector.miss(fault, "there is no planner")
        return
    injector.note(fault, "planner")
    scaler.freeze_metrics()

    def over() -> None:
        scaler.thaw_metrics()
        injector.end(fault, "planner")

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), over)


def restart_planner(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """The planner loses its memory, and is back after the fault's duration."""
    scaler = injector.cluster.scaler
    if not scaler.is_active:
        injector.miss(fault, "there is no planner")
        return
    injector.note(fault, "planner")
    scaler.restart(injector.kernel.now_ns + s_to_ns(fault.duration_s))
