"""Nodes of an execution graph: what one NPU does in one iteration, and what waits for what.

Owns the in-memory form that the converter makes, the executor runs and the `.et` writer stores,
and the numbers of the file format (node types of both dialects, places, collectives). Times are
integer nanoseconds, sizes bytes. Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from emu.network.rounds import Kind


class NodeKind(enum.IntEnum):
    """What a node does. The values are those of the fork's files."""

    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    PIM_COMP = 4
    COMP = 5
    SEND = 6
    RECV = 7
    COLL = 8


FORK_TYPES: Final[Mapping[NodeKind, int]] = {kind: int(kind) for kind in NodeKind}
UPSTREAM_TYPES: Final[Mapping[NodeKind, int]] = {
    NodeKind.METADATA: 1,
    NodeKind.MEM_LOAD: 2,
    NodeKind.MEM_STORE: 3,
    NodeKind.COMP: 4,
    NodeKind.SEND: 5,
    NodeKind.RECV: 6,
    NodeKind.COLL: 7,
}
"""The published program has no processing-in-memory nodes."""

COMM_TYPES: Final[Mapping[str, int]] = {
    "ALLREDUCE": 0,
    "ALLGATHER": 2,
    "ALLTOALL": 6,
    "REDUCESCATTER": 7,
}
"""Collectives by the name that a text trace uses."""

COLLECTIVE_KINDS: Final[Mapping[int, Kind]] = {
    0: "all-reduce",
    2: "all-gather",
    6: "all-to-all",
    7: "reduce-scatter",
}
"""Collectives that the network model knows, by their number in a graph."""


class Location(enum.IntEnum):
    """Kinds of memory."""

    LOCAL = 1
    REMOTE = 2
    CXL = 3
    STORAGE = 4


class Place(NamedTuple):
    """Where a tensor lies: a kind of memory, a device, a channel of it (PIM)."""

    location: Location
    device: int = 0
    channel: int = 0

    def __str__(self) -> str:
        if self.location is Location.LOCAL:
            return "LOCAL"
        name = f"{self.location.name}:{self.device}"
        return f"{name}.{self.channel}" if self.channel else name


LOCAL: Final = Place(Location.LOCAL)


class Node(msgspec.Struct, gc=False):
    """One operation. Which of the fields mean something depends on the kind."""

    node_id: int
    kind: NodeKind
    name: str = ""
    deps: Sequence[int] = ()
    """Ids of the nodes that must have finished."""
    duration_ns: int = 0
    """COMP, PIM_COMP."""
    size_bytes: int = 0
    """Tensor (memory, PIM) or message (communication)."""
    place: Place = LOCAL
    """MEM_LOAD, MEM_STORE, PIM_COMP."""
    collective: int = 0
    """COLL: number of the kind of collective."""
    involved: Sequence[bool] | None = None
    """COLL: network dimensions that take part; None = all."""
    source: int = -1
    destination: int = -1
    tag: int = 0
    """SEND, RECV."""


class Graph(msgspec.Struct):
    """All nodes of one NPU for one iteration; ids rise but need not be consecutive."""

    npu: int
    nodes: list[Node] = msgspec.field(default_factory=list)
