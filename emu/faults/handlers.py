"""What each kind of fault does: a table from the kind to its handler.

A handler finds its target, notes the strike, acts through the owner of the thing, and schedules
the end of the fault if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from emu.config.tables.faults import (
    ClientLeaves,
    CxlLost,
    DrainExpired,
    Freeze,
    GpuCrash,
    HostCacheLost,
    HostCacheStale,
    KvShrink,
    LeaseExpired,
    LinkDegrade,
    LinkDown,
    LinkLatency,
    MetricsDelayed,
    MetricsFrozen,
    MetricsLost,
    NodeCrash,
    Overload,
    Partition,
    Pause,
    PlannerRestart,
    ReplicaCrash,
    ReplicaRestart,
    Straggler,
    Swizzle,
)
from emu.faults.injector import Handler, network_links, states_of
from emu.faults.ports import census
from emu.replica.events import KvRestored, KvShrunk, Paused, SlowdownSet, TierLost, Unpaused
from emu.replica.states import LOADING, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector, WindowFault


# --------------------------------------------------------------------------------------------------
# Faults of what controls a cluster, and of what it keeps: caches, drains, the planner.


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


# --- Faults of replicas and their GPUs ------------------------------------------------------------

S = ReplicaState
_WITHOUT_KV: Final = frozenset({S.FAILED, S.INACTIVE}) | LOADING
"""States in which no engine runs whose memory could shrink."""


def _target(injector: Injector, fault: ReplicaCrash | ReplicaRestart) -> ReplicaHandle | None:
    """The replica that the fault names, or the first in its stage."""
    replicas = injector.cluster.replicas
    if fault.replica is not None:
        return replicas[fault.replica]
    assert isinstance(fault, ReplicaCrash)
    assert fault.stage is not None
    if fault.stage == "source":
        sending = [
            source
            for scaler in injector.cluster.scalers
            for source in scaler.under_way.sources()
            if source >= 0
        ]
        return replicas[sending[0]] if sending else None
    states = states_of(fault.stage)
    return next((r for r in replicas if r.state in states), None)


def crash(
    injector: Injector, fault: ReplicaCrash | ReplicaRestart, rng: np.random.Generator
) -> None:
    """Its KV is gone, and it comes back if a duration says when (or is replaced).

    What dies is a process. An inactive replica has none, though its GPUs may break (`crash_gpus`).
    """
    replica = _target(injector, fault)
    if replica is None:
        assert isinstance(fault, ReplicaCrash)
        assert fault.stage is not None
        if fault.stage == "source":
            injector.miss(fault, "no replica sends weights")
        else:
            injector.wait_for(fault, fault.stage)
        return
    if replica.state is S.FAILED:
        injector.miss(fault, f"{replica.name} is down already")
        return
    if replica.state is S.INACTIVE:
        injector.miss(fault, f"{replica.name} is inactive: no process runs there")
        return
    if isinstance(fault, ReplicaCrash) and fault.after_s:
        early_ns = replica.state_since_ns + s_to_ns(fault.after_s) - injector.kernel.now_ns
        if early_ns > 0:  # not long enough in its stage
            injector.later(early_ns, partial(crash, injector, fault, rng))
            return
    injector.note(fault, replica.name)
    back_ns = -1 if fault.duration_s is None else s_to_ns(fault.duration_s)
    injector.recovery.crash(replica, fault.kind, back_ns=back_ns)


def crash_gpus(injector: Injector, fault: GpuCrash | NodeCrash, rng: np.random.Generator) -> None:
    """GPUs die, and every replica on one of them: a rank that is gone aborts all the others."""
    cluster, recovery = injector.cluster, injector.recovery
    gpus: Sequence[int]
    if isinstance(fault, NodeCrash):
        assert fault.node is not None
        gpus = cluster.topology.machines[fault.node].gpus
        name = f"machine {fault.node}"
    else:
        assert fault.gpu is not None
        gpus = (fault.gpu,)
        name = f"GPU {fault.gpu}"
    there = _on_gpus(cluster.replicas, gpus)
    if not there and fault.kind == "gpu_crash":
        injector.miss(fault, f"{name} belongs to no replica")
        return
    victims = [replica for replica in there if replica.state is not S.FAILED]
    injector.note(fault, f"{name} ({', '.join(r.name for r in victims) or 'down already'})")
    recovery.lose_gpus(gpus)
    if isinstance(fault, NodeCrash):
        assert fault.node is not None
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


def _on_gpus(replicas: Sequence[ReplicaHandle], gpus: Sequence[int]) -> list[ReplicaHandle]:
    """Replicas with a rank there, and those that share experts with them."""
    there = [replica for replica in replicas if not set(gpus).isdisjoint(replica.gpus)]
    waves = [r.wave for r in there if r.wave is not None and r.wave.shares_experts]
    return [r for r in replicas if r in there or (r.wave is not None and r.wave in waves)]


def _owner(injector: Injector, fault: Straggler | Freeze | Pause) -> ReplicaHandle | None:
    """The replica that the fault names, or the one on its GPU; None (told) if there is none."""
    gpu = None if isinstance(fault, Pause) else fault.gpu
    if gpu is None:
        assert fault.replica is not None
        return injector.cluster.replicas[fault.replica]
    there = [r for r in injector.cluster.replicas if gpu in r.gpus]
    there.sort(key=lambda r: r.state in (S.FAILED, S.INACTIVE))  # those that are loaded first
    owner = next(iter(there), None)
    if owner is None:
        injector.miss(fault, f"GPU {gpu} belongs to no replica")
    return owner


def straggle(injector: Injector, fault: Straggler, rng: np.random.Generator) -> None:
    """Its iterations take longer by this factor."""
    replica = _owner(injector, fault)
    if replica is None:
        return
    injector.note(fault, replica.name)
    replica.actor.tell(SlowdownSet(factor=replica.slowdown * fault.factor))

    def over() -> None:
        slowdown = replica.slowdown / fault.factor
        factor = 1.0 if abs(slowdown - 1.0) < 1e-9 else slowdown
        replica.actor.tell(SlowdownSet(factor=factor))
        injector.end(fault, replica.name)

    injector.until(fault, replica.name, over)


def freeze(injector: Injector, fault: Freeze | Pause, rng: np.random.Generator) -> None:
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


def shrink_kv(injector: Injector, fault: KvShrink, rng: np.random.Generator) -> None:
    """After the iteration in flight; requests that stand in the way, last admitted first, go."""
    assert fault.replica is not None
    replica = injector.cluster.replicas[fault.replica]
    if replica.state in _WITHOUT_KV:  # its next life would lack what it never had
        injector.miss(fault, f"{replica.name} has no KV memory")
        return
    incarnation, loss = replica.incarnation, injector.next_loss()

    def struck(blocks: int) -> None:
        if blocks < 0:
            injector.miss(fault, f"{replica.name} crashed before")
            return
        injector.note(fault, f"{replica.name}: {blocks} blocks")
        injector.recovery.lose_capacity()
        injector.until(fault, replica.name, over)

    def over() -> None:
        if replica.incarnation == incarnation:
            asked = injector.ask(lambda _: injector.end(fault, replica.name))
            replica.actor.post(KvRestored(loss=loss, asked=asked))
        else:  # its crash has made the memory whole
            injector.end(fault, replica.name)

    replica.actor.post(KvShrunk(part=fault.part, loss=loss, asked=injector.ask(struck)))


# --------------------------------------------------------------------------------------------------
# Faults that clients make: they leave, or there are more of them.

CLONE_IDS: Final = 1 << 40
"""Ids of requests that an overload adds."""


def leave(injector: Injector, fault: ClientLeaves, rng: np.random.Generator) -> None:
    """Requests at this stage, or this one, are cancelled."""
    places = [
        place
        for place in census(injector.cluster)
        if (fault.request is None or place.request.request_id == fault.request)
        and (fault.stage in (None, "any") or place.stage == fault.stage)
    ]
    if not places:
        injector.miss(fault, f"no request is in stage {fault.stage or 'any'}")
        return
    order = rng.permutation(len(places))
    for index in order[: fault.clients]:
        request = places[int(index)].request
        if not request.status.is_terminal:
            injector.note(fault, f"request {request.request_id} ({places[int(index)].stage})")
            injector.cluster.cancel(request)


def overload(injector: Injector, fault: Overload, rng: np.random.Generator) -> None:
    """Copies of each arrival: the same lengths, other requests."""
    gateway = injector.cluster.gateway
    copies = max(1, round(fault.factor)) - 1
    injector.note(fault, f"{fault.factor:g} times the arrivals")

    def echo(request: Request) -> None:
        if request.request_id >= CLONE_IDS or request.retries:
            return
        for _ in range(copies):
            clone = Request(
                request_id=CLONE_IDS + injector.next_clone(),
                arrival_ns=injector.kernel.now_ns,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                max_output_tokens=request.max_output_tokens,
                tenant=request.tenant,
                priority=request.priority,
            )
            clone.ask_as(request)
            gateway.arrive(clone)

    end_echo = gateway.echo(echo)

    def over() -> None:
        end_echo()
        injector.end(fault, "gateway")

    injector.until(fault, "gateway", over)


# --------------------------------------------------------------------------------------------------
# Faults of the network: links that break, slow down or lag, transfers that go wrong.

LinkFault = LinkDown | LinkDegrade | LinkLatency


def _links(injector: Injector, fault: LinkFault) -> tuple[list[int], str]:
    topology = injector.cluster.topology
    if fault.node is not None:
        gpus: Sequence[int] = topology.machines[fault.node].gpus
        return network_links(topology, gpus), f"machine {fault.node}"
    if fault.gpu is not None:
        return network_links(topology, [fault.gpu]), f"GPU {fault.gpu}"
    assert fault.replica is not None
    replica = injector.cluster.replicas[fault.replica]
    return network_links(topology, replica.gpus), replica.name


def slow_links(injector: Injector, fault: LinkDown | LinkDegrade, rng: np.random.Generator) -> None:
    """Links lose bandwidth, all of it or a part, once or several times."""
    links, name = _links(injector, fault)
    factor = fault.factor if isinstance(fault, LinkDegrade) else 0.0
    times = fault.times if fault.duration_s else 1
    period_ns = s_to_ns(fault.duration_s or 0.0)

    def down(left: int) -> None:
        injector.note(fault, name)
        injector.links.slow(links, factor)
        if times == 1:
            injector.until(fault, name, lambda: up(0))
        else:
            injector.later(period_ns, lambda: up(left - 1))

    def up(left: int) -> None:
        injector.links.heal(links, factor)
        injector.end(fault, name)
        if left:
            injector.later(period_ns, lambda: down(left))

    down(times)


def delay_links(injector: Injector, fault: LinkLatency, rng: np.random.Generator) -> None:
    """The latency of links grows."""
    links, name = _links(injector, fault)
    delay_ns = max(1, ms_to_ns(fault.extra_ms))
    injector.note(fault, name)
    injector.links.delay(links, delay_ns)

    def over() -> None:
        injector.links.delay(links, -delay_ns)
        injector.end(fault, name)

    injector.until(fault, name, over)


def partition(injector: Injector, fault: Partition, rng: np.random.Generator) -> None:
    """Nothing gets from one replica to another."""
    assert fault.source is not None
    assert fault.destination is not None
    pair = (fault.source, fault.destination)
    name = f"{fault.source} -> {fault.destination}"
    injector.note(fault, name)
    injector.links.cut(pair, True)

    def over() -> None:
        injector.links.cut(pair, False)
        injector.end(fault, name)

    injector.until(fault, name, over)


def swizzle(injector: Injector, fault: Swizzle, rng: np.random.Generator) -> None:
    """Stop the links of some machines one by one, bring them back in another order."""
    machines = injector.cluster.topology.machines
    chosen = [m for m in machines if fault.probability >= 1 or rng.random() < fault.probability]
    if not chosen:
        injector.miss(fault, "no machine was drawn")
        return
    injector.note(fault, f"{len(chosen)} machines")
    duration_ns = s_to_ns(fault.duration_s)
    topology = injector.cluster.topology
    back = list(rng.permutation(len(chosen)))
    for order, at in enumerate(rng.permutation(len(chosen))):
        links = network_links(topology, chosen[int(at)].gpus)
        down_ns = duration_ns * order // len(chosen)
        up_ns = duration_ns + duration_ns * (back.index(at) + 1) // len(chosen)
        injector.later(down_ns, lambda links=links: injector.links.slow(links, 0.0))
        injector.later(up_ns, lambda links=links: injector.links.heal(links, 0.0))
    injector.later(2 * duration_ns, lambda: injector.end(fault, f"{len(chosen)} machines"))


def window(injector: Injector, fault: WindowFault, rng: np.random.Generator) -> None:
    """In force for a time; each strike is noted when it happens."""
    window = injector.transfers.open(fault, rng)

    def over() -> None:
        injector.transfers.close(window)
        injector.end(fault, fault.kind)

    injector.until(fault, "transfers", over)


def expire_lease(injector: Injector, fault: LeaseExpired, rng: np.random.Generator) -> None:
    """KV that waits to be fetched is given up by its source."""
    assert fault.replica is not None
    watcher = injector.cluster.watchers.get(fault.replica)
    lost = [] if watcher is None else watcher.lose_source()
    if not lost:
        injector.miss(fault, "no KV waits there")
        return
    injector.note(fault, f"replica {fault.replica}: {len(lost)} requests")
    injector.recovery.lost(lost, "lease_expired")


# --- What each kind of fault does -----------------------------------------------------------------

HANDLERS: Final[Mapping[str, Handler]] = MappingProxyType(
    {
        "replica_crash": crash,
        "replica_restart": crash,
        "gpu_crash": crash_gpus,
        "node_crash": crash_gpus,
        "straggler": straggle,
        "freeze": freeze,
        "pause": freeze,
        "kv_shrink": shrink_kv,
        "link_down": slow_links,
        "link_degrade": slow_links,
        "link_latency": delay_links,
        "partition": partition,
        "swizzle": swizzle,
        "transfer_refused": window,
        "transfer_broken": window,
        "transfer_hang": window,
        "completion_late": window,
        "completion_twice": window,
        "lease_expired": expire_lease,
        "handshake_lost": window,
        "destination_refuses": window,
        "host_cache_lost": lose_cache,
        "cxl_lost": lose_cxl,
        "host_cache_stale": stale_cache,
        "load_stuck": window,
        "drain_expired": expire_drain,
        "metrics_delayed": blur_metrics,
        "metrics_frozen": blur_metrics,
        "metrics_lost": blur_metrics,
        "planner_restart": restart_planner,
        "client_leaves": leave,
        "overload": overload,
    }
)
