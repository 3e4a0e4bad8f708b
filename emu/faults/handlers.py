"""What each kind of fault does: a table from the kind to its handler.

A handler finds its target, notes the strike, acts through the owner of the thing, and schedules
the end of the fault if it has one. Those that strike replicas, and what controls them, stand in
`replicas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from emu.config.tables.faults import (
    ClientLeaves,
    LeaseExpired,
    LinkDegrade,
    LinkDown,
    LinkLatency,
    Overload,
    Partition,
    Swizzle,
)
from emu.faults import replicas
from emu.faults.injector import Handler, network_links
from emu.faults.ports import census
from emu.request import Request
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector, WindowFault

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
            clone.acceptance_rate = request.acceptance_rate
            clone.adapter = request.adapter
            clone.images = request.images
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
        "replica_crash": replicas.crash,
        "replica_restart": replicas.crash,
        "gpu_crash": replicas.crash_gpus,
        "node_crash": replicas.crash_gpus,
        "straggler": replicas.straggle,
        "freeze": replicas.freeze,
        "pause": replicas.freeze,
        "kv_shrink": replicas.shrink_kv,
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
        "host_cache_lost": replicas.lose_cache,
        "cxl_lost": replicas.lose_cxl,
        "host_cache_stale": replicas.stale_cache,
        "load_stuck": window,
        "drain_expired": replicas.expire_drain,
        "metrics_delayed": replicas.blur_metrics,
        "metrics_frozen": replicas.blur_metrics,
        "metrics_lost": replicas.blur_metrics,
        "planner_restart": replicas.restart_planner,
        "client_leaves": leave,
        "overload": overload,
    }
)
