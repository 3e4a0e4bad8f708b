"""The text trace of an iteration, one row per layer.

Owns the rows and their text form (11 columns and marker rows). One trace describes one replica's
iteration, all pipeline stages. Sizes are bytes, times ns. Source: ASTRA-Sim as LLMServingSim drives
it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from emu.backends.astra.graph import LOCAL, Place

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
