"""Dimensions of a collective network, as ASTRA-Sim sees it: a product of simple topologies.

Owns: the shape of the network that collectives run on (ranks in mixed radix, first dimension
fastest) and the time of a single message on it. Does not own: algorithms (`rounds.py`),
contention (`congestion.py`), links shared with KV transfers (`links.py`).

Bandwidths here are GiB/s (2**30 bytes), the unit of ASTRA-Sim's network file. Source of the
rules: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, Literal

import msgspec

Topology = Literal["Ring", "FullyConnected", "Switch"]

_BYTES_PER_NS: Final = (1 << 30) / 1e9


class NetworkDim(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension: `npus` ranks joined by one simple topology."""

    topology: Topology = "FullyConnected"
    npus: int
    gib_per_s: float
    latency_ns: float

    @property
    def bytes_per_ns(self) -> float:
        """Rate of one link."""
        return self.gib_per_s * _BYTES_PER_NS

    def hops(self, source: int, destination: int) -> int:
        """Links that a message crosses between two ranks of this dimension."""
        if self.topology == "FullyConnected":
            return 1
        if self.topology == "Switch":
            return 2
        clockwise = (destination - source) % self.npus
        return min(clockwise, self.npus - clockwise)

    def message_ns(self, size_bytes: int, hops: int = 1) -> int:
        """Time of one message without contention; latency per hop, serialized once."""
        return int(hops * self.latency_ns + size_bytes / self.bytes_per_ns)

    def neighbour_hops(self) -> int:
        """Hops between a rank and the next one."""
        return 2 if self.topology == "Switch" else 1


def rank_count(dims: Sequence[NetworkDim]) -> int:
    """Ranks of the whole network."""
    return prod(dim.npus for dim in dims)


def strides(dims: Sequence[NetworkDim]) -> tuple[int, ...]:
    """Distance in rank numbers of neighbors in each dimension."""
    result, stride = [], 1
    for dim in dims:
        result.append(stride)
        stride *= dim.npus
    return tuple(result)


def coordinates(rank: int, dims: Sequence[NetworkDim]) -> tuple[int, ...]:
    """A rank's position in each dimension."""
    result = []
    for dim in dims:
        rank, position = divmod(rank, dim.npus)
        result.append(position)
    return tuple(result)


def message_between_ns(
    dims: Sequence[NetworkDim], source: int, destination: int, size_bytes: int
) -> int:
    """Point-to-point message between two ranks, without contention.

    Uses the first dimension in which the two differ, as ASTRA-Sim's analytical network does.
    """
    for dim, a, b in zip(
        dims, coordinates(source, dims), coordinates(destination, dims), strict=True
    ):
        if a != b:
            return dim.message_ns(size_bytes, dim.hops(a, b))
    return dims[0].message_ns(size_bytes, 0)


def group_of(rank: int, dims: Sequence[NetworkDim], active: Sequence[int]) -> tuple[int, ...]:
    """Ranks that differ from `rank` in the active dimensions only, in increasing order."""
    step = strides(dims)
    position = coordinates(rank, dims)
    members = [rank - sum(position[d] * step[d] for d in active)]
    for d in active:
        members = [m + k * step[d] for k in range(dims[d].npus) for m in members]
    return tuple(sorted(members))
