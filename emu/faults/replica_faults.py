"""Faults of replicas and their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from emu.config.tables.faults import (
    Freeze,
    GpuCrash,
    KvShrink,
    NodeCrash,
    Pause,
    ReplicaCrash,
    ReplicaRestart,
    Straggler,
)
from emu.faults.control_faults import lose_memory
from emu.faults.injector import Strike, states_of
from emu.replica.events import KvRestored, KvShrunk, Paused, SlowdownSet, Unpaused
from emu.replica.states import LOADING, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    from emu.faults.rank_loss import RankLoss

S = ReplicaState
_WITHOUT_KV: Final = frozenset({S.FAILED, S.INACTIVE}) | LOADING
"""States in which no engine runs whose memory could shrink."""


def _target(
    strike: Strike[ReplicaCrash | ReplicaRestart], fault: ReplicaCrash | ReplicaRestart
) -> ReplicaHandle | None:
    """The replica that the fault names, or the first in its stage."""
    replicas = strike.cluster.replicas
    if fault.replica is not None:
        return replicas[fault.replica]
    assert isinstance(fault, ReplicaCrash)
    assert fault.stage is not None
    if fault.stage == "source":
        sending = [
            source
            for scaler in strike.cluster.scalers
            for source in scaler.under_way.sources()
            if source >= 0
        ]
        return replicas[sending[0]] if sending else None
    states = states_of(fault.stage)
    return next((r for r in replicas if r.state in states), None)


def crash(strike: Strike[ReplicaCrash | ReplicaRestart]) -> None:
    """Its KV is gone, and it comes back if a duration says when (or is replaced).

    What dies is a process. An inactive replica has none, though its GPUs may break (`crash_gpus`).
    """
    fault = strike.fault
    replica = _target(strike, fault)
    if replica is None:
        assert isinstance(fault, ReplicaCrash)
        assert fault.stage is not None
        if fault.stage == "source":
            strike.miss("no replica sends weights")
        else:
            strike.injector.wait_for(fault, fault.stage)
        return
    if replica.state is S.FAILED:
        strike.miss(f"{replica.name} is down already")
        return
    if replica.state is S.INACTIVE:
        strike.miss(f"{replica.name} is inactive: no process runs there")
        return
    if isinstance(fault, ReplicaCrash) and fault.after_s:
        early_ns = replica.state_since_ns + s_to_ns(fault.after_s) - strike.kernel.now_ns
        if early_ns > 0:  # not long enough in its stage
            strike.later(early_ns, partial(crash, strike))
            return
    strike.note(replica.name)
    back_ns = -1 if fault.duration_s is None else s_to_ns(fault.duration_s)
    strike.recovery.crash(replica, fault.kind, back_ns=back_ns)


def crash_gpus(strike: Strike[GpuCrash | NodeCrash]) -> None:
    """GPUs die, and every replica on one of them: a rank that is gone aborts all the others."""
    fault = strike.fault
    cluster, recovery = strike.cluster, strike.recovery
    gpus: Sequence[int]
    if isinstance(fault, NodeCrash):
        assert fault.node is not None
        gpus = cluster.topology.machines[fault.node].gpus
        name = f"machine {fault.node}"
    else:
        assert fault.gpu is not None
        gpus = (fault.gpu,)
        name = f"GPU {fault.gpu}"
    there = _on_gpus(cluster.replicas, gpus, goes_on=recovery.ranks)
    if not there and fault.kind == "gpu_crash":
        strike.miss(f"{name} belongs to no replica")
        return
    victims = [replica for replica in there if replica.state is not S.FAILED]
    strike.note(f"{name} ({', '.join(r.name for r in victims) or 'down already'})")
    recovery.lose_gpus(gpus)
    if isinstance(fault, NodeCrash):
        assert fault.node is not None
        lose_memory(strike, fault.node)
    back_ns = s_to_ns(fault.duration_s) if fault.duration_s else -1

    def over() -> None:
        strike.end(name)
        recovery.gpus_back(gpus)

    if fault.duration_s:
        strike.later(back_ns, over)
    for replica in victims:
        if replica.state is not S.FAILED:
            recovery.crash(replica, fault.kind, back_ns=back_ns)
            recovery.replace_elsewhere(replica)


def _on_gpus(
    replicas: Sequence[ReplicaHandle], gpus: Sequence[int], *, goes_on: RankLoss | None
) -> list[ReplicaHandle]:
    """Replicas with a rank there, and those that share experts with them and cannot go on."""
    there = [replica for replica in replicas if not set(gpus).isdisjoint(replica.gpus)]
    waves = [
        r.wave
        for r in there
        if r.wave is not None
        and r.wave.holds_experts
        and (goes_on is None or not goes_on.goes_on_without(r))
    ]
    return [r for r in replicas if r in there or (r.wave is not None and r.wave in waves)]


def _owner(
    strike: Strike[Straggler | Freeze | Pause], fault: Straggler | Freeze | Pause
) -> ReplicaHandle | None:
    """The replica that the fault names, or the one on its GPU; None (told) if there is none."""
    gpu = None if isinstance(fault, Pause) else fault.gpu
    if gpu is None:
        assert fault.replica is not None
        return strike.cluster.replicas[fault.replica]
    there = [r for r in strike.cluster.replicas if gpu in r.gpus]
    there.sort(key=lambda r: r.state in (S.FAILED, S.INACTIVE))  # those that are loaded first
    owner = next(iter(there), None)
    if owner is None:
        strike.miss(f"GPU {gpu} belongs to no replica")
    return owner


def straggle(strike: Strike[Straggler]) -> None:
    """Its iterations take longer by this factor."""
    fault = strike.fault
    replica = _owner(strike, fault)
    if replica is None:
        return
    strike.note(replica.name)
    replica.actor.tell(SlowdownSet(factor=replica.slowdown * fault.factor))

    def over() -> None:
        slowdown = replica.slowdown / fault.factor
        factor = 1.0 if abs(slowdown - 1.0) < 1e-9 else slowdown
        replica.actor.tell(SlowdownSet(factor=factor))
        strike.end(replica.name)

    strike.until(replica.name, over)


def freeze(strike: Strike[Freeze | Pause]) -> None:
    """Pause or freeze: the difference is only whether an end was given."""
    fault = strike.fault
    replica = _owner(strike, fault)
    if replica is None:
        return
    if replica.is_paused or replica.state in (S.FAILED, S.INACTIVE):
        strike.miss(f"{replica.name} does not run")
        return
    strike.note(replica.name)
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
            if strike.recovery.ranks is not None:
                strike.recovery.ranks.thawed(replica)
        strike.end(replica.name)

    def declare_dead() -> None:
        if is_same():
            strike.recovery.crash(replica, "no progress", is_known=True)

    strike.until(replica.name, thaw)
    deadline_ms = strike.cluster.config.recovery.progress_deadline_ms
    strike.later(ms_to_ns(deadline_ms), declare_dead)


def shrink_kv(strike: Strike[KvShrink]) -> None:
    """After the iteration in flight; requests that stand in the way, last admitted first, go."""
    fault = strike.fault
    assert fault.replica is not None
    replica = strike.cluster.replicas[fault.replica]
    if replica.state in _WITHOUT_KV:  # its next life would lack what it never had
        strike.miss(f"{replica.name} has no KV memory")
        return
    incarnation, loss = replica.incarnation, strike.injector.next_loss()

    def struck(blocks: int) -> None:
        if blocks < 0:
            strike.miss(f"{replica.name} crashed before")
            return
        strike.note(f"{replica.name}: {blocks} blocks")
        strike.recovery.lose_capacity()
        strike.until(replica.name, over)

    def over() -> None:
        if replica.incarnation == incarnation:
            asked = strike.ask(lambda _: strike.end(replica.name))
            replica.actor.post(KvRestored(loss=loss, asked=asked))
        else:  # its crash has made the memory whole
            strike.end(replica.name)

    replica.actor.post(KvShrunk(part=fault.part, loss=loss, asked=strike.ask(struck)))
