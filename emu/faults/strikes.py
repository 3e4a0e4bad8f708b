"""What each kind of fault does: a table from the kind to its handler.

A handler finds its target, notes the strike, acts through the owner of the thing, and schedules
the end of the fault if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from emu.batching.shrink import can_shrink, restore, take_away
from emu.config.schema import FaultTable
from emu.faults.census import census
from emu.faults.links import network_links
from emu.replica import life
from emu.replica.replica import Replica
from emu.replica.states import LOADING, ReplicaState
from emu.request import Request
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector

S = ReplicaState
Strike = Callable[["Injector", FaultTable, "np.random.Generator"], None]
CLONE_IDS: Final = 1 << 40
"""Ids of requests that an overload adds."""


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


# --- replicas -----------------------------------------------------------------------------------
def _crash(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
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


def _straggle(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    replica = injector.cluster.replicas[fault.replica]
    injector.note(fault, replica.name)
    replica.set_slowdown(replica.slowdown * fault.magnitude)

    def over() -> None:
        slowdown = replica.slowdown / fault.magnitude
        replica.set_slowdown(1.0 if abs(slowdown - 1.0) < 1e-9 else slowdown)
        injector.end(fault, replica.name)

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), over)


def _freeze(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
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


def _shrink(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
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


# --- links --------------------------------------------------------------------------------------
def _links(injector: Injector, fault: FaultTable) -> tuple[list[int], str]:
    topology = injector.cluster.plan.topology
    if fault.node >= 0:
        gpus: Sequence[int] = topology.machines[fault.node].gpus
        return network_links(topology, gpus), f"machine {fault.node}"
    replica = injector.cluster.replicas[fault.replica]
    return network_links(topology, replica.gpus), replica.name


def _slow_links(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    links, name = _links(injector, fault)
    factor = 0.0 if fault.kind == "link_down" else fault.magnitude
    times = fault.times if fault.duration_s else 1
    period_ns = s_to_ns(fault.duration_s)

    def down(left: int) -> None:
        injector.note(fault, name)
        injector.links.slow(links, factor)
        if period_ns:
            injector.later(period_ns, lambda: up(left - 1))

    def up(left: int) -> None:
        injector.links.heal(links, factor)
        injector.end(fault, name)
        if left:
            injector.later(period_ns, lambda: down(left))

    down(times)


def _delay_links(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    links, name = _links(injector, fault)
    delay_ns = max(1, ms_to_ns(fault.magnitude))
    injector.note(fault, name)
    injector.links.delay(links, delay_ns)

    def over() -> None:
        injector.links.delay(links, -delay_ns)
        injector.end(fault, name)

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), over)


def _partition(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    pair = (fault.source, fault.destination)
    name = f"{fault.source} -> {fault.destination}"
    injector.note(fault, name)
    injector.links.cut(pair, True)

    def over() -> None:
        injector.links.cut(pair, False)
        injector.end(fault, name)

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), over)


def _swizzle(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Stop the links of some machines one by one, bring them back in another order."""
    machines = injector.cluster.plan.topology.machines
    chosen = [m for m in machines if fault.probability >= 1 or rng.random() < fault.probability]
    if not chosen:
        injector.miss(fault, "no machine was drawn")
        return
    injector.note(fault, f"{len(chosen)} machines")
    duration_ns = s_to_ns(fault.duration_s)
    topology = injector.cluster.plan.topology
    back = list(rng.permutation(len(chosen)))
    for order, at in enumerate(rng.permutation(len(chosen))):
        links = network_links(topology, chosen[int(at)].gpus)
        down_ns = duration_ns * order // len(chosen)
        up_ns = duration_ns + duration_ns * (back.index(at) + 1) // len(chosen)
        injector.later(down_ns, lambda links=links: injector.links.slow(links, 0.0))
        injector.later(up_ns, lambda links=links: injector.links.heal(links, 0.0))


# --- transfers ----------------------------------------------------------------------------------
def _window(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """In force for a time; each strike is noted when it happens."""
    window = injector.transfers.open(fault, rng)

    def over() -> None:
        injector.transfers.close(window)
        injector.end(fault, fault.kind)

    if fault.duration_s:
        injector.later(s_to_ns(fault.duration_s), over)


def _expire_lease(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    watcher = injector.cluster.watchers.get(fault.replica)
    lost = [] if watcher is None else watcher.lose_source()
    if not lost:
        injector.miss(fault, "no KV waits there")
        return
    injector.note(fault, f"replica {fault.replica}: {len(lost)} requests")
    injector.recovery.lost(lost, "lease_expired")


# --- memory and control plane -------------------------------------------------------------------
def _lose_cache(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    injector.note(fault, f"machine {fault.node}")
    if fault.node not in injector.recovery.cacheless:
        injector.recovery.cacheless.append(fault.node)
    cluster = injector.cluster
    cluster.scaler.lose_cache(fault.node)
    cluster.tiers.lose_host(fault.node)
    for replica in cluster.replicas:
        if replica.machine == fault.node:
            replica.inbox.poke()  # what it found there is there no more


def _stale_cache(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
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


def _expire_drain(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
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


def _freeze_metrics(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
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


def _restart_planner(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    scaler = injector.cluster.scaler
    if not scaler.is_active:
        injector.miss(fault, "there is no planner")
        return
    injector.note(fault, "planner")
    scaler.restart(injector.kernel.now_ns + s_to_ns(fault.duration_s))


# --- clients ------------------------------------------------------------------------------------
def _leave(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    places = [
        place
        for place in census(injector.cluster)
        if (fault.request < 0 or place.request.request_id == fault.request)
        and (fault.stage in ("", "any") or place.stage == fault.stage)
    ]
    if not places:
        injector.miss(fault, f"no request is in stage {fault.stage or 'any'}")
        return
    order = rng.permutation(len(places))
    for index in order[: fault.times]:
        request = places[int(index)].request
        if not request.status.is_terminal:
            injector.note(fault, f"request {request.request_id} ({places[int(index)].stage})")
            injector.cluster.cancel(request)


def _overload(injector: Injector, fault: FaultTable, rng: np.random.Generator) -> None:
    """Copies of each arrival: the same lengths, other requests."""
    gateway = injector.cluster.gateway
    copies = max(1, round(fault.magnitude)) - 1
    injector.note(fault, f"{fault.magnitude:g} times the arrivals")

    def echo(request: Request) -> None:
        if request.request_id >= CLONE_IDS or request.retries:
            return
        for _ in range(copies):
            clone = Request(
                request_id=CLONE_IDS + injector.clones,
                arrival_ns=injector.kernel.now_ns,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                max_output_tokens=request.max_output_tokens,
                tenant=request.tenant,
                priority=request.priority,
            )
            injector.clones += 1
            gateway.arrive(clone)

    gateway.echoes.append(echo)
    injector.later(s_to_ns(fault.duration_s), lambda: gateway.echoes.remove(echo))


STRIKES: Final[Mapping[str, Strike]] = MappingProxyType(
    {
        "replica_crash": _crash,
        "replica_restart": _crash,
        "straggler": _straggle,
        "freeze": _freeze,
        "pause": _freeze,
        "kv_shrink": _shrink,
        "link_down": _slow_links,
        "link_degrade": _slow_links,
        "link_latency": _delay_links,
        "partition": _partition,
        "swizzle": _swizzle,
        "transfer_refused": _window,
        "transfer_broken": _window,
        "transfer_hang": _window,
        "completion_late": _window,
        "completion_twice": _window,
        "lease_expired": _expire_lease,
        "handshake_lost": _window,
        "destination_refuses": _window,
        "host_cache_lost": _lose_cache,
        "host_cache_stale": _stale_cache,
        "load_stuck": _window,
        "drain_expired": _expire_drain,
        "metrics_frozen": _freeze_metrics,
        "planner_restart": _restart_planner,
        "client_leaves": _leave,
        "overload": _overload,
    }
)
