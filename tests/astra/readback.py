"""Reads traces and graphs back from the files that emu writes for ASTRA-Sim."""

from pathlib import Path

from emu.backends.astra.etfile import CLOSING, Dialect, attribute_value, read_messages
from emu.backends.astra.graph import (
    FORK_TYPES,
    LOCAL,
    UPSTREAM_TYPES,
    Graph,
    Location,
    Node,
    NodeKind,
    Place,
)
from emu.backends.astra.inputs import UPSTREAM_SCALE
from emu.backends.astra.trace import Marker, Row, Trace

MEMORY = (NodeKind.MEM_LOAD, NodeKind.MEM_STORE, NodeKind.PIM_COMP)


def parse_trace(text: str) -> Trace:
    """The trace that `format_trace` wrote."""
    lines = text.splitlines()
    kind, *options = lines[0].split("\t\t")
    trace = Trace(kind, [_row(line.split()) for line in lines[3:]])
    assert len(trace.rows) == int(lines[1])
    for option in options:
        key, _, value = option.partition(": " if ": " in option else ":")
        if key == "model_parallel_NPU_group":
            trace.stages = int(value)
        else:
            assert key == "pp_stage_boundaries"
            trace.boundaries = tuple(map(int, value.split(",")))
    return trace


def _place(text: str) -> Place:
    name, _, rest = text.partition(":")
    device, _, channel = rest.partition(".")
    return LOCAL if name == "LOCAL" else Place(Location[name], int(device), int(channel or 0))


def _comm(text: str) -> tuple[str, tuple[bool, ...] | None]:
    name, colon, flags = text.partition(":")
    return name, tuple(flag == "1" for flag in flags.split(",")) if colon else None


def _row(cells: list[str]) -> Row:
    if cells[0] in ("EXPERT", "PIM"):
        is_end = cells[1] == "END"
        row = Row(cells[0], index=0 if is_end else int(cells[1]))
        row.marker = Marker[f"{cells[0]}_END" if is_end else cells[0]]
        if cells[0] == "EXPERT":
            row.comm, row.involved = _comm(cells[2])
            row.comm_bytes = int(cells[3])
        return row
    assert len(cells) == 11
    comm, involved = _comm(cells[8])
    return Row(
        cells[0].rpartition("_")[0],
        *(int(cells[1]), _place(cells[2]), int(cells[3]), _place(cells[4]), int(cells[5])),
        *(_place(cells[6]), int(cells[7]), comm, int(cells[9]), involved),
        0 if cells[10] == "NONE" else int(cells[10].removeprefix("BATCH_")),
    )


def read_graph(path: Path, npu: int = 0, dialect: Dialect = "fork") -> Graph:
    """The graph of one NPU's file, in emu's units."""
    types = FORK_TYPES if dialect == "fork" else UPSTREAM_TYPES
    kinds = {number: kind for kind, number in types.items()}
    nodes = [_node(message, kinds) for message in read_messages(path)[1]]
    nodes = [node for node in nodes if node.name != CLOSING]
    for node in nodes:
        if dialect == "upstream" and node.kind in MEMORY:
            node.size_bytes //= UPSTREAM_SCALE
    return Graph(npu, nodes)


def _node(message, kinds) -> Node:
    node = Node(
        message.id,
        kinds[message.type],
        message.name,
        deps=tuple(message.ctrl_deps) + tuple(message.data_deps),
        duration_ns=message.duration_micros,
    )
    found = {attribute.name: attribute_value(attribute) for attribute in message.attr}
    if node.kind in MEMORY:
        node.size_bytes = found.get("tensor_size", 0)
        location = Location(found.get("tensor_loc", int(Location.LOCAL)))
        node.place = Place(location, found.get("tensor_device", 0), found.get("tensor_channel", 0))
    elif node.kind in (NodeKind.COLL, NodeKind.SEND, NodeKind.RECV):
        node.size_bytes = found.get("comm_size", 0)
        node.collective = found.get("comm_type", 0)
        node.involved = tuple(found["involved_dim"]) if "involved_dim" in found else None
        node.source = found.get("comm_src", -1)
        node.destination = found.get("comm_dst", -1)
        node.tag = found.get("comm_tag", 0)
    return node
