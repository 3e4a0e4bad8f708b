"""Faults of replicas and their GPUs: they crash, slow down, freeze, or lose KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from emu.config.schema import FaultTable
from emu.faults.control_plane import lose_memory
from emu.replica.events import KvRestored, KvShrunk, Paused, SlowdownSet, Unpaused
from emu.replica.replica import Replica
from emu.replica.states import LOADING, ReplicaState
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector

S = ReplicaState


def states_of(stage: str) -> Sequence[ReplicaState]:
    """States that a crash's `stage` means."""
    found: dict[str, list[ReplicaState]] = {
        "prefill": [S.PREFILL, S.AUS_PREFILL, S.SHUTTING_PREFILL],
        "decode": [S.DECODE, S.AUS_DECODE, S.SHUTTING_DECODE],
        "colocated": [S.COLOCATED, S.SHUTTING_COLOCATED],
        "new_prefill": [S.NEW_PREFILL, S.REFRACTORY_PREFILL],
        "old_prefill": [S.OLD_PREFILL],
        "loading": sorted(LOADING, key=lambda s: s.value),
        "any": [s for s in S if s not in (S.FAILED, S.INACTIVE)],
    }
    return found.get(stage) or [state for state in S if state.value == stage]


def _target(injector: Injector, fault: FaultTable) -> Replica | None:
    """The replica that the fault names, or the first in its stage."""
    replicas = injector.cluster.replicas
    if fault.replica >= 0:
        return replicas[fault.replica]
    if fault.stage == "source":
        sending = [source for source in injector.cluster.scaler.sending() if source >= 0]
        return replicas[sending[0]] if sending else None
    states = states_of(fault.stage)
    return next((r for r in replicas if r.state in states), None)


def crash(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Its KV is gone, and it comes back if a duration says when (or is replaced)."""
    replica = _target(injector, fault)
    if replica is None:
        if fault.stage == "source":
            injector.miss(fault, "no replica sends weights")
        else:  # it waits for one
            injector.waiting.append((msgspec.structs.replace(fault), fault.stage))
        return
    if replica.state is S.FAILED:
        injector.miss(fault, f"{replica.name} is down already")
        return
    early_ns = replica.state_since_ns + s_to_ns(fault.magnitude) - injector.kernel.now_ns
    if fault.magnitude and early_ns > 0:  # not long enough in its stage
        injector.later(early_ns, partial(crash, injector, fault, rng))
        return
    injector.note(fault, replica.name)
    back_ns = s_to_ns(fault.duration_s) if fault.duration_s or "restart" in fault.kind else -1
    injector.recovery.crash(replica, fault.kind, back_ns=back_ns)


def crash_gpus(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """GPUs die, and every replica on one of them: a rank that is gone aborts all the others."""
    cluster, recovery = injector.cluster, injector.recovery
    if fault.kind == "node_crash":
        gpus = cluster.topology.machines[fault.node].gpus
        name = f"machine {fault.node}"
    else:
        gpus = (fault.gpu,)
        name = f"GPU {fault.gpu}"
    there = _on_gpus(cluster.replicas, gpus)
    if not there and fault.kind == "gpu_crash":
        injector.miss(fault, f"{name} belongs to no replica")
        return
    victims = [replica for replica in there if replica.state is not S.FAILED]
    injector.note(fault, f"{name} ({', '.join(r.name for r in victims) or 'down already'})")
    recovery.gpus_down.update(gpus)
    if fault.kind == "node_crash":
        lose_memory(injector, fault.node)
    back_ns = s_to_ns(fault.duration_s) if fault.duration_s else -1

    def over() -> None:
        injector.end(fault, name)
        recovery.gpus_back(gpus)

    if fault.duration_s:
        injector.later(back_ns, over)
    for replica in victims:
        if replica.state is not S.FAILED:
            recovery.crash(replica, fault.kind, back_ns=back_ns)
            recovery.replace_elsewhere(replica)


def _on_gpus(replicas: Sequence[Replica], gpus: Sequence[int]) -> list[Replica]:
    """Replicas with a rank there, and those that share experts with them."""
    there = [replica for replica in replicas if not set(gpus).isdisjoint(replica.gpus)]
    waves = [r.wave for r in there if r.wave is not None and r.wave.shares_experts]
    return [r for r in replicas if r in there or (r.wave is not None and r.wave in waves)]


def _owner(injector: Injector, fault: FaultTable) -> Replica | None:
    """The replica that the fault names, or the one on its GPU; None (told) if there is none."""
    if fault.gpu < 0:
        return injector.cluster.replicas[fault.replica]
    owner = next((r for r in injector.cluster.replicas if fault.gpu in r.gpus), None)
    if owner is None:
        injector.miss(fault, f"GPU {fault.gpu} belongs to no replica")
    return owner


def straggle(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Its iterations take longer by this factor."""
    replica = _owner(injector, fault)
    if replica is None:
        return
    injector.note(fault, replica.name)
    replica.actor.tell(SlowdownSet(factor=replica.slowdown * fault.magnitude))

    def over() -> None:
        slowdown = replica.slowdown / fault.magnitude
        factor = 1.0 if abs(slowdown - 1.0) < 1e-9 else slowdown
        replica.actor.tell(SlowdownSet(factor=factor))
        injector.end(fault, replica.name)

    injector.until(fault, replica.name, over)


def freeze(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Pause or freeze: the difference is only whether an end was given."""
    replica = _owner(injector, fault)
    if replica is None:
        return
    if replica.is_paused or replica.state in (S.FAILED, S.INACTIVE):
        injector.miss(fault, f"{replica.name} does not run")
        return
    injector.note(fault, replica.name)
    replica.actor.tell(Paused())
    incarnation, since_ns = replica.incarnation, replica.paused_ns

    def is_same() -> bool:
        return (
            replica.is_paused
            and replica.incarnation == incarnation
            and replica.paused_ns == since_ns
        )

    def thaw() -> None:
        if is_same():
            replica.actor.tell(Unpaused(life=incarnation, since_ns=since_ns))
            injector.end(fault, replica.name)

    def declare_dead() -> None:
        if is_same():
            injector.recovery.crash(replica, "no progress")

    injector.until(fault, replica.name, thaw)
    deadline_ms = injector.cluster.config.recovery.progress_deadline_ms
    injector.later(ms_to_ns(deadline_ms), declare_dead)


def shrink_kv(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """After the iteration in flight; requests that stand in the way, last admitted first, go."""
    replica = injector.cluster.replicas[fault.replica]
    incarnation = replica.incarnation

    def struck(blocks: int) -> None:
        injector.note(fault, f"{replica.name}: {blocks} blocks")
        injector.recovery.has_lost_capacity = True
        injector.until(fault, replica.name, over)

    def over() -> None:
        if replica.incarnation == incarnation:
            replica.actor.post(KvRestored(over=lambda: injector.end(fault, replica.name)))

    replica.actor.post(KvShrunk(part=fault.magnitude, struck=struck))
