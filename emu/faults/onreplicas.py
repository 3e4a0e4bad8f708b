"""Faults of replicas: they crash, slow down, freeze, or lose a part of their KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from emu.batching.shrink import can_shrink, restore, take_away
from emu.config.schema import FaultTable
from emu.replica import life
from emu.replica.replica import Replica
from emu.replica.states import LOADING, ReplicaState
from emu.request import Request
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
    injector.note(fault, replica.name)
    back_ns = s_to_ns(fault.duration_s) if fault.duration_s or "restart" in fault.kind else -1
    injector.recovery.crash(replica, fault.kind, back_ns=back_ns)


def straggle(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Its iterations take longer by this factor."""
    replica = injector.cluster.replicas[fault.replica]
    injector.note(fault, replica.name)
    replica.set_slowdown(replica.slowdown * fault.magnitude)

    def over() -> None:
        slowdown = replica.slowdown / fault.magnitude
        replica.set_slowdown(1.0 if abs(slowdown - 1.0) < 1e-9 else slowdown)
        injector.end(fault, replica.name)

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), over)


def freeze(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Pause or freeze: the difference is only whether an end was given."""
    replica = injector.cluster.replicas[fault.replica]
    if replica.is_paused or replica.state in (S.FAILED, S.INACTIVE):
        injector.miss(fault, f"{replica.name} does not run")
        return
    injector.note(fault, replica.name)
    life.pause(replica)
    incarnation, since_ns = replica.incarnation, replica.paused_ns

    def is_same() -> bool:
        return (
            replica.is_paused
            and replica.incarnation == incarnation
            and replica.paused_ns == since_ns
        )

    def thaw() -> None:
        if is_same():
            life.resume(replica)
            injector.end(fault, replica.name)

    def declare_dead() -> None:
        if is_same():
            injector.recovery.crash(replica, "no progress")

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), thaw)
    deadline_ms = injector.cluster.config.recovery.progress_deadline_ms
    injector.later(ms_to_ns(deadline_ms), declare_dead)


def shrink_kv(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """After the iteration in flight; requests that stand in the way, last admitted first, go."""
    replica = injector.cluster.replicas[fault.replica]
    scheduler = replica.scheduler
    if not can_shrink(scheduler):
        injector.miss(fault, f"the scheduler of {replica.name} has a pool of its own")
        return
    incarnation = replica.incarnation

    def shrink() -> None:
        wanted = int(scheduler.blocks_total * fault.magnitude)
        injector.note(fault, f"{replica.name}: {wanted} blocks")
        injector.recovery.has_lost_capacity = True
        lost: list[Request] = []
        for victim in reversed(list(scheduler.residents())):
            if scheduler.blocks_total - scheduler.blocks_used >= wanted:
                break
            victim.recomputed_tokens += victim.computed_tokens
            scheduler.cancel(victim)
            lost.append(victim)
        take_away(scheduler, wanted)
        injector.recovery.lost(lost, "kv_lost")
        injector.cluster.on_capacity(replica)
        if fault.duration_s:
            injector.later(s_to_ns(fault.duration_s), over)

    def give_back() -> None:
        restore(scheduler)
        injector.end(fault, replica.name)
        injector.cluster.on_capacity(replica)

    def over() -> None:
        if replica.incarnation == incarnation:
            replica.jobs.append(give_back)
            replica.inbox.poke()

    replica.jobs.append(shrink)
    replica.inbox.poke()
