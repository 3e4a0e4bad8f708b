"""Faults of the network: links that break, slow down or lag, transfers that go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emu.config.tables.faults import (
    LeaseExpired,
    LinkDegrade,
    LinkDown,
    LinkLatency,
    Partition,
    Swizzle,
)
from emu.faults.link_factors import network_links
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.faults.injector import Injector
    from emu.faults.transfers import WindowFault


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
