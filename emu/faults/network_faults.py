"""Faults of the network: links that break, slow down or lag, transfers that go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from emu.config.tables.faults import (
    LeaseExpired,
    LinkDegrade,
    LinkDown,
    LinkLatency,
    Partition,
    Swizzle,
)
from emu.faults.injector import Strike
from emu.faults.link_faults import network_links
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    from emu.faults.transfer_faults import WindowFault

LinkFault = LinkDown | LinkDegrade | LinkLatency


def _links(strike: Strike[LinkFault], fault: LinkFault) -> tuple[list[int], str]:
    topology = strike.cluster.topology
    if fault.node is not None:
        gpus: Sequence[int] = topology.machines[fault.node].gpus
        return network_links(topology, gpus), f"machine {fault.node}"
    if fault.gpu is not None:
        return network_links(topology, [fault.gpu]), f"GPU {fault.gpu}"
    assert fault.replica is not None
    replica = strike.cluster.replicas[fault.replica]
    return network_links(topology, replica.gpus), replica.name


def slow_links(strike: Strike[LinkDown | LinkDegrade]) -> None:
    """Links lose bandwidth, all of it or a part, once or several times."""
    fault = strike.fault
    links, name = _links(strike, fault)
    factor = fault.factor if isinstance(fault, LinkDegrade) else 0.0
    times = fault.times if fault.duration_s else 1
    period_ns = s_to_ns(fault.duration_s or 0.0)

    def down(left: int) -> None:
        strike.note(name)
        strike.links.slow(links, factor)
        if times == 1:
            strike.until(name, lambda: up(0))
        else:
            strike.later(period_ns, lambda: up(left - 1))

    def up(left: int) -> None:
        strike.links.heal(links, factor)
        strike.end(name)
        if left:
            strike.later(period_ns, lambda: down(left))

    down(times)


def delay_links(strike: Strike[LinkLatency]) -> None:
    """The latency of links grows."""
    fault = strike.fault
    links, name = _links(strike, fault)
    delay_ns = max(1, ms_to_ns(fault.extra_ms))
    strike.note(name)
    strike.links.delay(links, delay_ns)

    def over() -> None:
        strike.links.delay(links, -delay_ns)
        strike.end(name)

    strike.until(name, over)


def partition(strike: Strike[Partition]) -> None:
    """Nothing gets from one replica to another."""
    fault = strike.fault
    assert fault.source is not None
    assert fault.destination is not None
    pair = (fault.source, fault.destination)
    name = f"{fault.source} -> {fault.destination}"
    strike.note(name)
    strike.links.cut(pair, True)

    def over() -> None:
        strike.links.cut(pair, False)
        strike.end(name)

    strike.until(name, over)


def swizzle(strike: Strike[Swizzle]) -> None:
    """Stop the links of some machines one by one, bring them back in another order."""
    fault = strike.fault
    machines = strike.cluster.topology.machines
    chosen = [
        m for m in machines if fault.probability >= 1 or strike.rng.random() < fault.probability
    ]
    if not chosen:
        strike.miss("no machine was drawn")
        return
    strike.note(f"{len(chosen)} machines")
    duration_ns = s_to_ns(fault.duration_s)
    topology = strike.cluster.topology
    back = list(strike.rng.permutation(len(chosen)))
    for order, at in enumerate(strike.rng.permutation(len(chosen))):
        links = network_links(topology, chosen[int(at)].gpus)
        down_ns = duration_ns * order // len(chosen)
        up_ns = duration_ns + duration_ns * (back.index(at) + 1) // len(chosen)
        strike.later(down_ns, partial(strike.links.slow, links, 0.0))
        strike.later(up_ns, partial(strike.links.heal, links, 0.0))
    strike.later(2 * duration_ns, lambda: strike.end(f"{len(chosen)} machines"))


def window(strike: Strike[WindowFault]) -> None:
    """In force for a time; each strike is noted when it happens."""
    fault = strike.fault
    window = strike.transfers.open(fault, strike.rng)

    def over() -> None:
        strike.transfers.close(window)
        strike.end(fault.kind)

    strike.until("transfers", over)


def expire_lease(strike: Strike[LeaseExpired]) -> None:
    """KV that waits to be fetched is given up by its source."""
    fault = strike.fault
    assert fault.replica is not None
    watcher = strike.cluster.watchers.get(fault.replica)
    lost = [] if watcher is None else watcher.lose_source()
    if not lost:
        strike.miss("no KV waits there")
        return
    strike.note(f"replica {fault.replica}: {len(lost)} requests")
    strike.recovery.lost(lost, "lease_expired")
