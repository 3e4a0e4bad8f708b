"""The text trace of an iteration, one row per layer, and the graphs that are made of it.

Owns the rows, their text form (11 columns and marker rows), and the way from rows to the nodes of
all NPUs of one replica. One trace describes one replica's iteration, all pipeline stages. Sizes are
bytes, times ns. Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from emu.network.rounds import Kind

# --------------------------------------------------------------------------------------------------
# Nodes of an execution graph: what one NPU does in one iteration, and what waits for what.
#
# Owns the in-memory form that the converter makes, the executor runs and the `.et` writer stores,
# and the numbers of the file format (node types of both dialects, places, collectives). Times are
# integer nanoseconds, sizes bytes. Source: ASTRA-Sim as LLMServingSim drives it.


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


# --- The text trace of an iteration ---------------------------------------------------------------

TraceKind = Literal["COLOCATED", "PREFILL", "DECODE"]

_COLUMNS: Final = (
    *("Layername", "comp_time", "input_loc", "input_size", "weight_loc", "weight_size"),
    *("output_loc", "output_size", "comm_type", "comm_size", "misc"),
)
_WIDTHS: Final = (30, *[15] * 10)
_KV_ROWS: Final = ("kv_load", "kv_evict")


class Marker(enum.IntEnum):
    """Rows that open or close a section instead of describing a layer."""

    NONE = 0
    EXPERT = 1
    EXPERT_END = 2
    PIM = 3
    PIM_END = 4


class TraceModel(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a model as a trace needs them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    element_bytes: int = 2
    kv_element_bytes: int = 2
    experts: int = 0
    """0 = dense."""
    expert_ffn: int = 0


class Row(msgspec.Struct, gc=False):
    """One layer, or a marker."""

    name: str
    comp_ns: int = 0
    input_place: Place = LOCAL
    input_bytes: int = 0
    weight_place: Place = LOCAL
    weight_bytes: int = 0
    output_place: Place = LOCAL
    output_bytes: int = 0
    comm: str = "NONE"
    comm_bytes: int = 0
    involved: tuple[bool, ...] | None = None
    """Network dimensions of the collective; None = all."""
    batch: int = 0
    """Sub-batch 1 or 2 when two are interleaved, else 0."""
    marker: Marker = Marker.NONE
    index: int = 0
    """Marker rows: expert rank or PIM channel."""

    @property
    def is_kv(self) -> bool:
        """A row that moves KV blocks instead of computing."""
        return self.name.startswith(_KV_ROWS)


class Trace(msgspec.Struct):
    """One replica's iteration."""

    kind: TraceKind
    rows: list[Row]
    stages: int = 1
    boundaries: tuple[int, ...] = ()
    """Index of the first row of each later stage, KV rows not counted."""


def _comm_text(row: Row) -> str:
    if row.involved is None:
        return row.comm
    return f"{row.comm}:{','.join('1' if flag else '0' for flag in row.involved)}"


def _cells(row: Row, index: int) -> list[str]:
    if row.marker is Marker.EXPERT:
        return ["EXPERT", str(row.index), _comm_text(row), str(row.comm_bytes)]
    if row.marker is Marker.EXPERT_END:
        return ["EXPERT", "END", _comm_text(row), str(row.comm_bytes)]
    if row.marker is Marker.PIM:
        return ["PIM", str(row.index)]
    if row.marker is Marker.PIM_END:
        return ["PIM", "END"]
    cells = [
        f"{row.name}_{index}",
        *(row.comp_ns, row.input_place, row.input_bytes, row.weight_place, row.weight_bytes),
        *(row.output_place, row.output_bytes, _comm_text(row), row.comm_bytes),
        f"BATCH_{row.batch}" if row.batch else "NONE",
    ]
    return [str(cell) for cell in cells]


def _line(cells: Sequence[str]) -> str:
    padded = [cell.ljust(width - 1) for cell, width in zip(cells, _WIDTHS, strict=False)]
    return " ".join(padded).rstrip()


def format_trace(trace: Trace) -> str:
    """The text form, ending in a newline."""
    head = f"{trace.kind}\t\tmodel_parallel_NPU_group: {trace.stages}"
    if trace.stages > 1:
        head += f"\t\tpp_stage_boundaries: {','.join(map(str, trace.boundaries))}"
    lines = [head, str(len(trace.rows)), _line(_COLUMNS)]
    lines += [_line(_cells(row, index)) for index, row in enumerate(trace.rows)]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------
# From rows to nodes: the graphs of all NPUs of one replica for one iteration.
#
# Owns the dependencies: layers in a chain, collectives behind the layer that they belong to, weight
# loads that wait for nothing, expert and PIM sections, transfers between pipeline stages, and the
# receivers of a prefill replica's KV. Source: ASTRA-Sim as LLMServingSim drives it.
#
# NPU numbering: stage s, rank o of a replica that starts at NPU f is f + s * n + o, with n NPUs per
# stage. A prefill replica owns twice as many: NPU i + num_npus only receives what NPU i sends.


QUIRKS: Final = ("expert_dispatch", "pim_chain")
"""Dependencies that LLMServingSim's converter loses, to be reproduced by name:

expert_dispatch: experts of the second and later ranks of a replica do not wait for the dispatch.
pim_chain: the first layer behind a PIM section waits for the section's pieces only, so with no
pieces it (and with interleaved sub-batches the first layer of the second one) waits for nothing.
"""
_KV_SOURCE: Final = "v_proj"
"""Layers whose name contains this produce the KV that a prefill replica sends."""
_P2P_ROW: Final = -1
"""Row index in the tag key of messages that do not belong to a row."""


class Tags:
    """Numbers for messages: the same for both ends, different for every message."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}

    def of(self, source: int, destination: int, row: int) -> int:
        """Tag of the message between two NPUs that belongs to a row."""
        return self._numbers.setdefault((source, destination, row), len(self._numbers))


class _Section:
    """A pipeline stage's rows and what surrounds them."""

    def __init__(self, trace: Trace, stage: int) -> None:
        rows = [row for row in trace.rows if not row.is_kv]
        self.kv_rows = [row for row in trace.rows if row.is_kv]
        self.offset = len(self.kv_rows)
        cuts = (0, *trace.boundaries, len(rows))
        self.first, self.end = cuts[stage], cuts[stage + 1]
        self.rows = rows[self.first : self.end]
        self.before = rows[self.first - 1] if self.first else None
        self.after = rows[self.end] if self.end < len(rows) else None

    @property
    def received_bytes(self) -> int:
        """Size of the hidden state that enters this stage."""
        if self.rows[0].marker is not Marker.NONE and self.before is not None:
            return self.before.output_bytes
        return self.rows[0].input_bytes

    @property
    def sent_bytes(self) -> int:
        """Size of the hidden state that leaves it."""
        if self.rows[-1].marker is Marker.EXPERT_END and self.after is not None:
            return self.after.input_bytes
        return self.rows[-1].output_bytes


class _Writer:
    """Builds one NPU's graph row by row."""

    def __init__(
        self,
        npu: int,
        rank: int,
        per_stage: int,
        next_id: int,
        offload: bool,
        named: bool,
        quirks: Sequence[str] = (),
    ) -> None:
        self.graph = Graph(npu)
        self.nodes = self.graph.nodes
        self.rank = rank
        self.per_stage = per_stage
        self.next_id = next_id
        self.offload = offload
        self.named = named
        self.loses_dispatch = "expert_dispatch" in quirks
        self.loses_chain = "pim_chain" in quirks
        self.entry: list[int] = []
        """What the first compute node waits for."""
        self.tail = -1
        """The collective or compute node that the next compute node follows."""
        self.computed = -1
        """The latest compute node."""
        self.in_expert = False
        self.is_mine = True
        self.batch = 0
        self.pieces: list[int] = []
        """PIM nodes that no compute node has waited for yet."""
        self.earlier_pieces: list[int] = []
        """Interleaved sub-batches: those that the sub-batch whose turn is next left behind."""
        self.in_pim = False
        self.after_pim = False

    def add(self, kind: NodeKind, name: str, deps: Sequence[int]) -> Node:
        """Append a node and give it the next id."""
        node = Node(self.next_id, kind, name if self.named else "", deps)
        self.next_id += 1
        self.nodes.append(node)
        return node

    def memory(
        self, kind: NodeKind, name: str, place: Place, size: int, deps: Sequence[int]
    ) -> int:
        """A load or store."""
        node = self.add(kind, f"{kind.name}_NODE_{name}", deps)
        node.place = place
        node.size_bytes = size
        return node.node_id

    def message(
        self, kind: NodeKind, name: str, ends: tuple[int, int], size: int, tag: int,
        deps: Sequence[int],
    ) -> int:  # fmt: skip
        """A send or receive; `ends` is (source, destination)."""
        node = self.add(kind, f"COMM_{kind.name}_NODE_{name}", deps)
        node.source, node.destination = ends
        node.size_bytes = size
        node.tag = tag
        return node.node_id

    def collective(self, row: Row, name: str, after: int) -> None:
        """A collective; the next compute node follows it."""
        deps = (after,) if after >= 0 else tuple(self.entry)
        node = self.add(NodeKind.COLL, f"COMM_COLL_NODE_{name}_{row.comm}", deps)
        node.collective = COMM_TYPES[row.comm]
        node.size_bytes = row.comm_bytes
        node.involved = row.involved
        self.tail = node.node_id

    def row(self, row: Row, name: str) -> None:
        """One row of the trace."""
        if row.marker is not Marker.NONE:
            self.mark(row, name)
        elif not self.is_mine:
            return
        elif self.in_pim:
            self.piece(row, name)
        else:
            self.layer(row, name)

    def mark(self, row: Row, name: str) -> None:
        """A marker row."""
        if row.marker is Marker.EXPERT:
            if not self.in_expert and row.comm != "NONE" and row.comm_bytes > 0:
                self.collective(row, name, self.computed)
            elif self.in_expert and self.loses_dispatch:
                self.tail = self.computed
            self.in_expert = True
            self.is_mine = self.rank == row.index % self.per_stage
        elif row.marker is Marker.EXPERT_END:
            self.in_expert, self.is_mine = False, True
            if row.comm != "NONE" and row.comm_bytes > 0:
                self.collective(row, name, self.computed)
        elif row.marker is Marker.PIM:
            self.in_pim = True
            self.is_mine = self.per_stage == 1 or self.rank == row.index % self.per_stage
        else:
            self.in_pim, self.is_mine = False, True
            self.after_pim = True

    def piece(self, row: Row, name: str) -> None:
        """Part of an attention that runs in memory."""
        deps = (self.computed,) if self.computed >= 0 else tuple(self.entry)
        node = self.add(NodeKind.PIM_COMP, f"PIM_COMP_NODE_{name}_PIM", deps)
        node.duration_ns = row.comp_ns
        node.size_bytes = row.input_bytes + row.output_bytes
        node.place = row.input_place
        self.pieces.append(node.node_id)

    def layer(self, row: Row, name: str) -> None:
        """A row that computes: weight load, compute node, collective."""
        deps: list[int] = []
        if row.weight_bytes > 0 and (self.offload or row.weight_place is not LOCAL):
            waits = (self.computed,) if self.in_expert and self.computed >= 0 else ()
            load = self.memory(
                NodeKind.MEM_LOAD, f"{name}_WEIGHT", row.weight_place, row.weight_bytes, waits
            )
            deps.append(load)
        if row.comp_ns:
            due = self.due_pieces(row)
            if due is not None:
                deps += due
            if self.tail >= 0 and (due is None or not self.loses_chain):
                deps.insert(0, self.tail)
            if self.computed < 0:
                deps[:0] = self.entry
            node = self.add(NodeKind.COMP, f"COMP_NODE_{name}", deps)
            node.duration_ns = row.comp_ns
            self.computed = self.tail = node.node_id
        if row.comm != "NONE" and self.per_stage > 1:
            self.collective(row, name, self.computed)

    def due_pieces(self, row: Row) -> list[int] | None:
        """PIM nodes that this compute node must wait for; None = it follows no PIM section."""
        if row.batch == 0:
            if not self.after_pim:
                return None
            self.after_pim = False
            due, self.pieces = self.pieces, []
            return due
        if row.batch == self.batch:
            return None
        # The other sub-batch's turn: what it left running is waited for now, what this one has
        # just left runs on until its next turn.
        self.batch = row.batch
        due, self.earlier_pieces, self.pieces = self.earlier_pieces, self.pieces, []
        return due


def convert(
    trace: Trace,
    first_npu: int,
    num_npus: int,
    *,
    local_offloading: bool = False,
    named: bool = True,
    quirks: Sequence[str] = (),
) -> list[Graph]:
    """Graphs of all NPUs of one replica (for a prefill replica, of its receivers too).

    `num_npus` counts the NPUs that compute. `local_offloading` also loads weights that lie in
    the NPU's own memory. Without `named` nodes have no names, which is faster. `quirks` are names
    of `QUIRKS`.
    """
    per_stage = num_npus // trace.stages
    tags = Tags()
    graphs: list[Graph] = []
    receivers: list[Graph] = []
    next_id = 0
    for stage in range(trace.stages):
        section = _Section(trace, stage)
        for rank in range(per_stage):
            npu = first_npu + stage * per_stage + rank
            writer = _Writer(
                npu, rank, per_stage, next_id, offload=local_offloading, named=named, quirks=quirks
            )
            phantom = None
            if trace.kind == "PREFILL":
                phantom = _Writer(
                    npu + num_npus, rank, per_stage, 0, offload=False, named=named, quirks=()
                )
                receivers.append(phantom.graph)
            _write_npu(writer, section, tags, phantom)
            next_id = writer.next_id
            graphs.append(writer.graph)
    return graphs + receivers


def _write_npu(writer: _Writer, section: _Section, tags: Tags, phantom: _Writer | None) -> None:
    npu, per_stage = writer.graph.npu, writer.per_stage
    for index, row in enumerate(section.kv_rows):
        kind = NodeKind.MEM_LOAD if row.name.startswith("kv_load") else NodeKind.MEM_STORE
        name = f"{row.name}_{index}"
        writer.entry.append(writer.memory(kind, name, row.weight_place, row.weight_bytes, ()))
    first, last = section.rows[0], section.rows[-1]
    base = section.first + section.offset
    name = f"{first.name}_{base}_INPUT"
    if section.first == 0:
        entry = writer.memory(NodeKind.MEM_LOAD, name, first.input_place, first.input_bytes, ())
    else:
        ends = (npu - per_stage, npu)
        tag = tags.of(*ends, _P2P_ROW)
        entry = writer.message(NodeKind.RECV, name, ends, section.received_bytes, tag, ())
    writer.entry.append(entry)
    for index, row in enumerate(section.rows):
        name = f"{row.name}_{base + index}" if writer.named else ""
        writer.row(row, name)
        if phantom is not None and _KV_SOURCE in row.name and row.comm_bytes > 0:
            deps = (writer.computed,) if writer.computed >= 0 else tuple(writer.entry)
            _send_to_phantom(writer, phantom, name, row.comm_bytes, tags, index, deps)
    deps = (writer.tail,) if writer.tail >= 0 else tuple(writer.entry)
    name = f"{last.name}_{base + len(section.rows) - 1}_OUTPUT"
    if section.after is not None:
        ends = (npu, npu + per_stage)
        tag = tags.of(*ends, _P2P_ROW)
        writer.message(NodeKind.SEND, name, ends, section.sent_bytes, tag, deps)
    elif phantom is not None:
        _send_to_phantom(writer, phantom, name, last.output_bytes, tags, _P2P_ROW, deps)
    else:
        writer.memory(NodeKind.MEM_STORE, name, last.output_place, last.output_bytes, deps)


def _send_to_phantom(
    writer: _Writer, phantom: _Writer, name: str, size: int, tags: Tags, row: int,
    deps: Sequence[int],
) -> None:  # fmt: skip
    ends = (writer.graph.npu, phantom.graph.npu)
    tag = tags.of(*ends, row)
    writer.message(NodeKind.SEND, name, ends, size, tag, deps)
    phantom.message(NodeKind.RECV, name, ends, size, tag, ())
