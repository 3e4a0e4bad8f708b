"""The text trace of an iteration: one row per layer, before it becomes graphs.

Owns the rows, their text form (11 columns and marker rows) and its reading. One trace describes
one replica's iteration, all pipeline stages. Sizes are bytes, times ns. Source: ASTRA-Sim as
LLMServingSim drives it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from emu.errors import InputError
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

TraceKind = Literal["COLOCATED", "PREFILL", "DECODE", "EVENT"]

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


def event_trace(duration_ns: int) -> Trace:
    """The start trace: every NPU computes for so long."""
    return Trace("EVENT", [Row("event", duration_ns)])


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
    head: str = trace.kind
    if trace.kind != "EVENT":
        head += f"\t\tmodel_parallel_NPU_group: {trace.stages}"
        if trace.stages > 1:
            head += f"\t\tpp_stage_boundaries: {','.join(map(str, trace.boundaries))}"
    lines = [head, str(len(trace.rows)), _line(_COLUMNS)]
    lines += [_line(_cells(row, index)) for index, row in enumerate(trace.rows)]
    return "\n".join(lines) + "\n"


# --- reading ------------------------------------------------------------------------------------


def parse_trace(text: str, source: str = "trace") -> Trace:
    """Read the text form back. Raises InputError with the line."""
    lines = text.splitlines()
    if len(lines) < 3:
        raise InputError(source, len(lines) or 1, "", "a trace has three lines before its rows")
    kind, *options = lines[0].split("\t\t")
    if kind not in get_args(TraceKind):
        problem = f"{kind!r} is not one of {', '.join(get_args(TraceKind))}"
        raise InputError(source, 1, "", problem)
    trace = Trace(kind, [])  # type: ignore[arg-type]
    for option in options:
        key, _, value = option.partition(":")
        if key == "model_parallel_NPU_group":
            trace.stages = _number(value, source, 1, key)
        elif key == "pp_stage_boundaries":
            trace.boundaries = tuple(_number(v, source, 1, key) for v in value.split(","))
        else:
            raise InputError(source, 1, key, "unknown option")
    count = _number(lines[1], source, 2, "rows")
    body = [(number, line) for number, line in enumerate(lines[3:], start=4) if line.strip()]
    if len(body) != count:
        raise InputError(source, 2, "rows", f"{count} are announced, {len(body)} follow")
    trace.rows = [_parse_row(line.split(), source, number) for number, line in body]
    return trace


def _number(text: str, source: str, line: int, field: str) -> int:
    if not text.strip().isdecimal():
        raise InputError(source, line, field, f"{text.strip()!r} is not a count")
    return int(text)


def parse_place(text: str, source: str = "place", line: int | None = None) -> Place:
    """LOCAL, REMOTE:node, REMOTE:node.channel or CXL:device."""
    name, _, rest = text.partition(":")
    if name not in Location.__members__:
        raise InputError(source, line, "location", f"{text!r} is not a memory")
    if name == "LOCAL":
        return LOCAL
    device, _, channel = rest.partition(".")
    at = line or 0
    return Place(
        Location[name],
        _number(device, source, at, "device"),
        _number(channel, source, at, "channel") if channel else 0,
    )


def _parse_comm(text: str, source: str, line: int) -> tuple[str, tuple[bool, ...] | None]:
    name, colon, flags = text.partition(":")
    if name != "NONE" and name not in COMM_TYPES:
        raise InputError(source, line, "comm_type", f"{name!r} is not a collective")
    return name, tuple(flag == "1" for flag in flags.split(",")) if colon else None


def _parse_row(cells: list[str], source: str, line: int) -> Row:
    if cells[0] in ("EXPERT", "PIM"):
        return _parse_marker(cells, source, line)
    if len(cells) != len(_COLUMNS):
        raise InputError(source, line, "", f"{len(cells)} fields instead of {len(_COLUMNS)}")
    name, number = cells[0], [0] * len(cells)
    for column in (1, 3, 5, 7, 9):
        number[column] = _number(cells[column], source, line, _COLUMNS[column])
    comm, involved = _parse_comm(cells[8], source, line)
    return Row(
        name.rpartition("_")[0] or name,
        number[1],
        parse_place(cells[2], source, line),
        number[3],
        parse_place(cells[4], source, line),
        number[5],
        parse_place(cells[6], source, line),
        number[7],
        comm,
        number[9],
        involved,
        int(cells[10].removeprefix("BATCH_")) if cells[10] != "NONE" else 0,
    )


def _parse_marker(cells: list[str], source: str, line: int) -> Row:
    is_expert, is_end = cells[0] == "EXPERT", cells[1] == "END"
    if len(cells) != (4 if is_expert else 2):
        raise InputError(source, line, cells[0], "wrong number of fields in a marker")
    row = Row(cells[0])
    row.index = 0 if is_end else _number(cells[1], source, line, cells[0])
    if is_expert:
        row.marker = Marker.EXPERT_END if is_end else Marker.EXPERT
        row.comm, row.involved = _parse_comm(cells[2], source, line)
        row.comm_bytes = _number(cells[3], source, line, "comm_size")
    else:
        row.marker = Marker.PIM_END if is_end else Marker.PIM
    return row
