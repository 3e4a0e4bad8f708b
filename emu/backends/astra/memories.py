"""Memories outside and inside the NPUs: how long an access takes, and which NPUs share a queue.

Owns the three memories of ASTRA-Sim's memory file (host, CXL, NPU) with their service times and
queues. Bandwidth is GB/s with 1 GB = 1e9 bytes, that is bytes per ns, and is truncated to a whole
number, as is the latency. Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from emu.backends.astra.graph import Location, Node, NodeKind
from emu.errors import InputError, RunError

MemoryType = Literal[
    "NO_MEMORY_EXPANSION",
    "PER_NODE_MEMORY_EXPANSION",
    "PER_NPU_MEMORY_EXPANSION",
    "MEMORY_POOL",
]

_NAMES: Final = {
    Location.LOCAL: "local_mem",
    Location.REMOTE: "remote_mem",
    Location.CXL: "cxl_mem",
}


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of memory."""

    memory_type: MemoryType
    gbytes_per_s: float
    latency_ns: float = 0
    devices: int = 1
    pim_channels: int = 0

    @property
    def bytes_per_ns(self) -> int:
        """Bandwidth as the program takes it."""
        return int(self.gbytes_per_s)

    def access_ns(self, size_bytes: int) -> int:
        """One access without queueing."""
        return int(self.latency_ns) + int(size_bytes / self.bytes_per_ns)


class Memories(msgspec.Struct, frozen=True, kw_only=True):
    """The memories of a system; None = there is none of that kind."""

    remote: Memory | None = None
    cxl: Memory | None = None
    local: Memory | None = None

    def check(self, source: str = "memory") -> None:
        """Refuse memories that mean nothing. Raises InputError."""
        for name, memory in (("remote", self.remote), ("cxl", self.cxl), ("local", self.local)):
            if memory is not None and memory.bytes_per_ns < 1:
                problem = "bandwidth must be at least 1 GB/s (it is truncated to whole GB/s)"
                raise InputError(source, None, name, problem)

    def service(self, node: Node) -> tuple[tuple[int, int] | None, int]:
        """(queue, time) of a memory or PIM node; no queue = any number at a time.

        Raises RunError when the node lies in a memory that does not exist.
        """
        place = node.place
        location = place.location
        memory = (
            self.remote
            if location is Location.REMOTE
            else self.cxl
            if location is Location.CXL
            else self.local
            if location is Location.LOCAL
            else None
        )
        if memory is None or memory.memory_type == "NO_MEMORY_EXPANSION":
            name = _NAMES.get(location, location.name)
            raise RunError(f"node {node.name or node.node_id} lies in {name}, which does not exist")
        service = memory.access_ns(node.size_bytes)
        if node.kind is NodeKind.PIM_COMP:
            # The program numbers PIM queues so; devices with more channels than devices clash.
            queue = memory.devices * place.device + place.channel
            return (int(location) + 16, queue), node.duration_ns + service
        if memory.memory_type == "PER_NPU_MEMORY_EXPANSION":
            return None, service
        return (int(location), place.device), service
