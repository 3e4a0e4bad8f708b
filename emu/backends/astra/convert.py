"""From rows to nodes: the graphs of all NPUs of one replica for one iteration.

Owns the dependencies: layers in a chain, collectives behind the layer that they belong to, weight
loads that wait for nothing, expert and PIM sections, transfers between pipeline stages, and the
receivers of a prefill replica's KV. Source: ASTRA-Sim as LLMServingSim drives it.

NPU numbering: stage s, rank o of a replica that starts at NPU f is f + s * n + o, with n NPUs per
stage. A prefill replica owns twice as many: NPU i + num_npus only receives what NPU i sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.backends.astra.graph import COMM_TYPES, LOCAL, Graph, Node, NodeKind, Place
from emu.backends.astra.trace import Marker, Row, Trace

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
