"""Links that are down, slow or partitioned.

Owns what is in force on each link; several faults on one link multiply (a link that is down stays
down whatever else). The handler that began a fault also ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.network.carrier import Carrier
from emu.network.topology import Topology


class LinkFaults:
    """Factors, delays and cuts in force."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._rates = carrier.topology.link_rates
        self._factors: dict[int, list[float]] = {}
        self._delays: dict[int, list[int]] = {}
        self._cuts: dict[tuple[int, int], int] = {}

    def slow(self, links: Sequence[int], factor: float) -> None:
        """From now on these links carry `factor` times their rate (0 = nothing)."""
        for link in links:
            self._factors.setdefault(link, []).append(factor)
            self._apply(link)
        self._carrier.links_changed(1 if factor == 0 else 0)

    def heal(self, links: Sequence[int], factor: float) -> None:
        """The end of a `slow` of the same factor."""
        for link in links:
            self._factors[link].remove(factor)
            self._apply(link)
        self._carrier.links_changed(-1 if factor == 0 else 0)

    def delay(self, links: Sequence[int], delay_ns: int) -> None:
        """Reports over these links come so much later; negative: the end of that."""
        for link in links:
            delays = self._delays.setdefault(link, [])
            if delay_ns < 0:
                delays.remove(-delay_ns)
            else:
                delays.append(delay_ns)
            self._carrier.set_extra_latency(link, sum(delays))
        self._carrier.links_changed()

    def cut(self, pair: tuple[int, int], is_cut: bool) -> None:
        """Partition or join an ordered pair of replicas."""
        count = self._cuts.get(pair, 0) + (1 if is_cut else -1)
        self._cuts[pair] = count
        if count == int(is_cut):
            self._carrier.set_partition(pair, is_cut)
        self._carrier.links_changed(1 if is_cut else -1)

    def _apply(self, link: int) -> None:
        rate: float = self._rates[link]
        for factor in self._factors[link]:
            rate *= factor
        whole = max(1, int(rate)) if rate else 0
        self._carrier.set_rate(link, whole)


def network_links(topology: Topology, gpus: Sequence[int]) -> list[int]:
    """The links by which these GPUs reach others: NIC and NVLink, both directions."""
    links: list[int] = []
    for index in gpus:
        gpu = topology.gpus[index]
        links += [gpu.nic_out, gpu.nic_in, gpu.nvlink_out, gpu.nvlink_in]
    return [link for link in links if link >= 0]
