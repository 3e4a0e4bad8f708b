"""Chakra execution traces on disk: writing, reading, printing `.et` files.

Owns the record stream (varint length, then one protobuf message) and the attributes that
ASTRA-Sim reads from a node. Two dialects differ in the numbers of node types and in the unit of
durations: the fork of LLMServingSim (nanoseconds) and the published program (microseconds; see
`inputs.py` for how nanoseconds survive there). Malformed files are InputErrors that name the
byte. Source: ASTRA-Sim as LLMServingSim drives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError

from emu.backends.astra.chakra import GlobalMetadata, NodeProto
from emu.backends.astra.graph import FORK_TYPES, UPSTREAM_TYPES, Graph, Node, NodeKind
from emu.backends.astra.inputs import UPSTREAM_SCALE
from emu.config.input_files import read_input
from emu.errors import InputError

Dialect = Literal["fork", "upstream"]
SCHEMA_VERSION: Final = "1.0.2-chakra.0.0.4"
CLOSING: Final = "after_the_last_send"
"""Name of a node that is in files for the published program only."""

_MEMORY: Final = (NodeKind.MEM_LOAD, NodeKind.MEM_STORE, NodeKind.PIM_COMP)
_COMM: Final = (NodeKind.COLL, NodeKind.SEND, NodeKind.RECV)
_VARINT_BYTES_MAX: Final = 10


def encode_graph(graph: Graph, dialect: Dialect = "fork", trace_text: str = "") -> bytes:
    """The whole `.et` file of one NPU. `trace_text` is kept in it for people to read."""
    metadata = GlobalMetadata()
    for name, text in (("schema", SCHEMA_VERSION), ("input_file", trace_text)):
        attribute = metadata.attr.add(name=name)
        attribute.string_val = text
    parts: list[bytes] = []
    _append(parts, metadata)
    types = FORK_TYPES if dialect == "fork" else UPSTREAM_TYPES
    nodes = graph.nodes if dialect == "fork" else [*graph.nodes, *_closing(graph)]
    for node in nodes:
        _append(parts, _to_message(node, types))
    return b"".join(parts)


def _closing(graph: Graph) -> list[Node]:
    """A node of no duration behind a graph that ends with sends, for the published program.

    Its statistics do not know memory nodes and throw when an NPU ends. Behind any other node the
    program catches that; behind a send it aborts, and the other NPUs never report.
    """
    followed = {dep for node in graph.nodes for dep in node.deps}
    last = [n.node_id for n in graph.nodes if n.kind is NodeKind.SEND and n.node_id not in followed]
    if not last:
        return []
    return [Node(max(node.node_id for node in graph.nodes) + 1, NodeKind.COMP, CLOSING, last)]


def write_graph(path: Path, graph: Graph, dialect: Dialect = "fork", trace_text: str = "") -> None:
    """Write one NPU's file."""
    path.write_bytes(encode_graph(graph, dialect, trace_text))


def _append(parts: list[bytes], message: Any) -> None:
    body: bytes = message.SerializeToString(deterministic=True)
    parts.append(_varint(len(body)))
    parts.append(body)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _to_message(node: Node, types: Mapping[NodeKind, int]) -> Any:
    if node.kind not in types:
        problem = f"{node.kind.name} cannot be expressed for the published ASTRA-Sim"
        raise InputError(node.name or "graph", None, "type", problem)
    message = NodeProto(
        id=node.node_id,
        name=node.name,
        type=types[node.kind],
        data_deps=node.deps,
        duration_micros=node.duration_ns,
    )
    attributes = message.attr
    attributes.add(name="is_cpu_op").bool_val = False
    if node.kind in _MEMORY:
        scale = UPSTREAM_SCALE if types is UPSTREAM_TYPES else 1
        attributes.add(name="tensor_size").uint64_val = node.size_bytes * scale
        attributes.add(name="tensor_loc").uint32_val = node.place.location
        attributes.add(name="tensor_device").uint32_val = node.place.device
        attributes.add(name="tensor_channel").uint32_val = node.place.channel
    elif node.kind in _COMM:
        attributes.add(name="comm_type").int64_val = node.collective
        attributes.add(name="comm_size").int64_val = node.size_bytes
        if node.kind is NodeKind.COLL:
            if node.involved is not None:
                attributes.add(name="involved_dim").bool_list.values.extend(node.involved)
        else:
            attributes.add(name="comm_src").int32_val = node.source
            attributes.add(name="comm_dst").int32_val = node.destination
            attributes.add(name="comm_tag").int32_val = node.tag
    return message


def read_records(data: bytes, source: str) -> Iterator[bytes]:
    """The messages of a file, one after another. Raises InputError where the stream breaks."""
    position = 0
    while position < len(data):
        start, length = position, 0
        for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
            if position >= len(data):
                raise InputError(source, None, f"byte {start}", "the file ends inside a length")
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise InputError(source, None, f"byte {start}", "not a length: too many bytes")
        if position + length > len(data):
            left = len(data) - position
            problem = f"a record of {length} bytes is announced, {left} are left"
            raise InputError(source, None, f"byte {start}", problem)
        yield data[position : position + length]
        position += length


def _parse(kind: Any, body: bytes, source: str, index: int) -> Any:
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InputError(
            source, None, f"record {index}", f"not a Chakra message: {error}"
        ) from None
    return message


def read_messages(path: Path) -> tuple[Any, list[Any]]:
    """Metadata and nodes of a file as protobuf messages, whatever its dialect."""
    source = str(path)
    data = read_input(path)
    records = list(read_records(data, source))
    if not records:
        raise InputError(source, None, "", "the file is empty; a metadata record is missing")
    metadata = _parse(GlobalMetadata, records[0], source, 0)
    nodes = [_parse(NodeProto, body, source, i) for i, body in enumerate(records[1:], start=1)]
    return metadata, nodes


def attribute_value(attribute: Any) -> Any:
    """The value of an attribute as a Python object (a list for the list kinds)."""
    which = attribute.WhichOneof("value")
    if which is None:
        return None
    value = getattr(attribute, which)
    return list(value.values) if which.endswith("_list") else value


def describe_file(path: Path, dialect: Dialect = "fork") -> Iterator[str]:
    """Lines that show a file to people: one for the metadata, one for each node."""
    metadata, messages = read_messages(path)
    shown = {a.name: attribute_value(a) for a in metadata.attr if a.name != "input_file"}
    yield f"# {path.name}: {len(messages)} nodes, version {metadata.version!r}, {shown}"
    types = FORK_TYPES if dialect == "fork" else UPSTREAM_TYPES
    names = {number: kind.name for kind, number in types.items()}
    for message in messages:
        parts = [f"{message.id:6d} {names.get(message.type, f'type={message.type}'):9s}"]
        parts.append(message.name)
        if message.duration_micros:
            parts.append(f"duration={message.duration_micros}")
        if message.ctrl_deps:
            parts.append(f"ctrl={list(message.ctrl_deps)}")
        if message.data_deps:
            parts.append(f"deps={list(message.data_deps)}")
        parts += [f"{a.name}={attribute_value(a)}" for a in message.attr]
        yield " ".join(parts)
