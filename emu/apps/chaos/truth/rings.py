"""Collectives as rounds of messages, in the network that a configuration describes. Seconds.

Restates docs/lab/astra-sim.md for rings and direct exchanges on one dimension or two, whole or cut
into chunks on one. Others are not restated: they take `math.nan`.
"""

from __future__ import annotations

import math
from typing import Final

from emu.latency.context import LatencyContext

_KNOWN: Final = ("ring", "direct")


class Rings:
    """The ranks of a replica."""

    def __init__(self, context: LatencyContext) -> None:
        network, node, gpu = context.network, context.node, context.gpu
        self._network, self._memory = network, gpu.memory_gbytes_per_s
        nvlink = gpu.nvlink_gbps if node.nvlink_gbps < 0 else node.nvlink_gbps
        pcie = gpu.pcie_gbps if node.pcie_gbps <= 0 else node.pcie_gbps
        inner_ns = 1000.0 if nvlink > 0 else 4000.0
        outer_ns = float(round(1000 * node.nic_latency_us))
        if network.link_latency_ns >= 0:
            inner_ns = outer_ns = network.link_latency_ns
        if node.nvlink_latency_ns >= 0:
            inner_ns = node.nvlink_latency_ns
        shapes = [*network.topology, "FullyConnected", "FullyConnected"][:2]
        ranks = max(1, context.tensor_parallel, context.expert_parallel)
        ranks *= context.pipeline_parallel
        inside = min(ranks, context.gpus_per_machine)
        gbps = (nvlink if nvlink > 0 else pcie, node.nic_gbps)
        self._counts = [inside] + ([math.ceil(ranks / inside)] if ranks > inside else [])
        self._dims = list(zip(shapes, gbps, (inner_ns, outer_ns), strict=True))

    def _message(self, dim: int, size: int, ranks: int, far: int = 1) -> int:
        """One message between two ranks that are so far from each other."""
        shape, gbps, latency_ns = self._dims[dim]
        hops = {"FullyConnected": 1, "Switch": 2}.get(shape, min(far, ranks - far))
        return int(hops * latency_ns + size * 8 / gbps)

    def sent(self, size: int) -> float:
        """A message to the next stage."""
        last = len(self._counts) - 1
        shape = self._dims[last][0]
        hops = 2 if shape == "Switch" else 1
        return int(hops * self._dims[last][2] + size * 8 / self._dims[last][1]) / 1e9

    def gathered(self, size: int, ranks: int) -> float:
        """Every rank gets the bytes of all others, which have so many each."""
        return self._whole("all-gather", size, ranks)

    def scattered(self, size: int, ranks: int) -> float:
        """Every rank gets its part of a sum of so many bytes."""
        return self._whole("reduce-scatter", size, ranks)

    def summed(self, size: int, ranks: int) -> float:
        """Every rank gets the sum of so many bytes."""
        return self._whole("all-reduce", size, ranks)

    def _whole(self, kind: str, size: int, ranks: int) -> float:
        network = self._network
        named = {str(one): how for one, how in network.collective_algorithms.items()}
        name = named.get(kind, network.collective_algorithm)
        inside = min(ranks, self._counts[0])
        counts = [inside, ranks // inside]
        fits = ranks % inside == 0 and (len(self._counts) > 1 or counts[1] == 1)
        if name not in _KNOWN or network.congestion or not fits:
            return math.nan
        if name == "direct" and "Ring" in (self._dims[0][0], self._dims[1][0]):
            return math.nan
        active = [dim for dim in (0, 1) if counts[dim] > 1]
        chunks = self._chunks(kind, size, ranks)
        if len(chunks) > 1 and len(active) > 1:
            return math.nan
        turns = math.ceil(len(chunks) / network.collective_active_chunks)
        return turns * self._phases(name, kind, chunks[0], counts, active) / 1e9

    def _chunks(self, kind: str, size: int, ranks: int) -> list[int]:
        """Equal parts; what is left over is one more; small ones are padded."""
        splits = self._network.collective_splits
        each = size // splits
        if each < ranks and kind != "all-gather":
            return [ranks] * splits
        if not each:
            return [size]
        return [each] * math.ceil(size / each)

    def _phases(self, name: str, kind: str, size: int, counts: list[int], active: list[int]) -> int:
        """Dimension by dimension."""
        if kind == "all-gather":
            total = 0
            for dim in reversed(active):
                total += self._rounds(name, "gather", size, dim, counts[dim])
                size *= counts[dim]
            return total
        if kind == "reduce-scatter" or len(active) < 2:
            total = 0
            for dim in active:
                total += self._rounds(name, "scatter", size, dim, counts[dim])
                if kind == "all-reduce":
                    part = size // counts[dim]
                    total += self._rounds(name, "gather", part, dim, counts[dim], is_first=False)
                size //= counts[dim]
            return total
        first, last = active
        part = size // counts[first]
        total = self._rounds(name, "scatter", size, first, counts[first])
        total += self._phases(name, kind, part, counts, [last])
        return total + self._rounds(name, "gather", part, first, counts[first])

    def _rounds(
        self, name: str, what: str, size: int, dim: int, ranks: int, *, is_first: bool = True
    ) -> int:
        """All rounds of a phase; `size` of what is scattered, or of what one rank gathers."""
        delay = self._network.endpoint_delay_ns
        part = size if what == "gather" else size // ranks
        each = self._message(dim, part, ranks) + delay
        if what == "scatter":
            each += 3 * int(part / self._memory)
        count = 1 if name == "direct" else ranks - 1
        return (delay if is_first else 0) + count * each
