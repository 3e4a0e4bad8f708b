"""Latency with weights or attention outside the GPU, on top of any backend.

Owns the sum: iteration = what the backend says, with decode attention taken out and PIM's put in
(PIM), plus the stall for weights that are elsewhere (`placement.py`). Where the backend knows
its rows one by one (`rows_ns`), stalls are found row by row; else layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.latency.base import COMPONENTS, BatchShape, LatencyBackend, stepped_decode_run
from emu.latency.moe_gate import Routing
from emu.latency.placement import RowTime, WeightLoads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# Sub-batch interleaving: two halves of a batch take turns on the GPU.
#
# While one half's decodes attend in memory, the other half's rows run on the GPU. Order:
# both halves up to their first attention; then, layer by layer and half by half, the rows from one
# attention to the next; at last the head. A half goes on when its own attention is over. Each half
# reads all weights, so this pays only where attention in memory takes longer than the rows.
#
# Rules: LLMServingSim 2.0. A batch is split by the tokens of its members, the largest first, to the
# lighter half. Single histories are not known here: the decodes of a half share them evenly, and
# the longest may be in either.


class HalfCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one half, ns; those of a layer are of each layer."""

    before: int
    """Before the first layer."""
    enter: int
    """From a layer's start to its attention."""
    in_memory: int
    """Attention of decodes."""
    on_gpu: int
    """Attention of prompts, after that in memory."""
    leave: int
    """From attention to the layer's end."""
    after: int
    """After the last layer."""


def half_costs(rows: Sequence[RowTime], *, in_memory: int, on_gpu: int) -> HalfCosts:
    """Sort the rows of an iteration by where they stand; the attention row itself is replaced.

    `in_memory` and `on_gpu` are ns of attention.
    """
    parts = dict.fromkeys(("before", "enter", "leave", "after"), 0)
    part = "before"
    for name, layer, ns in rows:
        if layer > 0:
            continue  # all layers are alike
        if layer == 0 and part == "before":
            part = "enter"
        elif layer < 0 and part != "before":
            part = "after"
        if name == "attention":
            part = "leave"
        else:
            parts[part] += ns
    return HalfCosts(in_memory=in_memory, on_gpu=on_gpu, **parts)


def interleaved_ns(halves: Sequence[HalfCosts], layers: int) -> int:
    """Duration of an iteration."""
    now_ns = 0
    ready_ns: list[int] = []
    for half in halves:
        now_ns += half.before + half.enter
        ready_ns.append(now_ns + half.in_memory)
    for layer in range(layers):
        for index, half in enumerate(halves):
            now_ns = max(now_ns, ready_ns[index]) + half.on_gpu + half.leave
            now_ns += half.after if layer == layers - 1 else half.enter
            ready_ns[index] = now_ns + half.in_memory
    return now_ns


def split_shape(shape: BatchShape) -> tuple[BatchShape, BatchShape]:
    """Two halves of a batch with two members or more."""
    halves = (BatchShape(), BatchShape())
    tokens = [0, 0]
    chunks = zip(shape.prefill_new, shape.prefill_context, strict=True)
    for new, context in sorted(chunks, key=lambda chunk: -chunk[0]):
        side = int(tokens[1] < tokens[0])
        halves[side].prefill_new.append(new)
        halves[side].prefill_context.append(context)
        tokens[side] += new
    count = shape.decode_count
    # Decodes of one token each fill the lighter half, then alternate, the first half first.
    to_second = min(count, max(0, (tokens[0] - tokens[1] + count) // 2))
    counts = (count - to_second, to_second)
    for half, decodes in zip(halves, counts, strict=True):
        if decodes:
            half.decode_count = decodes
            half.decode_context_sum = shape.decode_context_sum * decodes // count
            half.decode_context_max = shape.decode_context_max
            half.decode_context_min = shape.decode_context_min
        half.sequences = decodes + len(half.prefill_new)
    return halves


# --------------------------------------------------------------------------------------------------
# Decode attention in memory (PIM): devices, and how long a layer's attention takes there.
#
# Owns the figures of a memory with attention units and the linear model of it: one request on one
# channel takes (slope x tokens + intercept) / split, where `split` = min(channels, KV heads) pieces
# of a request run side by side. Pieces go to the least loaded channels, longest first, so a layer
# takes as long as the longest request or as all work spread over the channels, whichever is more.
#
# The length that counts is the tokens whose KV exists. LLMServingSim takes the length of the prompt
# and never adds the output (LLMServingSim 2.0, defect 8).


class PimDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of memory."""

    channel_gib: float
    idle_w: float
    """Of one channel."""
    peak_w: float
    slope_ns: float
    """For each token, with 4 query heads to a KV head."""
    intercept_ns: float
    """For 4096 query elements."""


DEVICES: Final = {
    "DDR4_8GB_3200": PimDevice(
        channel_gib=8, idle_w=0.623, peak_w=3.803, slope_ns=333.2538, intercept_ns=30675.2739
    ),
    "HBM2_1GB_2000": PimDevice(
        channel_gib=1, idle_w=0.16, peak_w=0.76, slope_ns=242.0548, intercept_ns=14513.5015
    ),
    "LPDDR4X_2GB_4266": PimDevice(
        channel_gib=2, idle_w=0.07, peak_w=0.771, slope_ns=432.4458, intercept_ns=33918.1734
    ),
    "LPDDR5_2GB_6400": PimDevice(
        channel_gib=2, idle_w=0.071, peak_w=0.877, slope_ns=282.4338, intercept_ns=15996.7018
    ),
}
"""Published figures and fits (LLMServingSim 2.0)."""


def pim_device(name: str, source: str, key: str) -> PimDevice:
    """A device by name, or from an INI file that is named after one. Raises InputError."""
    stem = Path(name).stem.removesuffix("_pim")
    known = DEVICES.get(stem)
    if known is None:
        problem = f"no attention figures for {stem!r}; known: {', '.join(DEVICES)}"
        raise InputError(source, None, key, problem)
    return _read_ini(Path(name), known) if name.endswith(".ini") else known


def _read_ini(path: Path, known: PimDevice) -> PimDevice:
    """Capacity and power from a DRAM simulator's file; the fit stays that of the name."""
    import configparser  # no other run needs it

    parser = configparser.ConfigParser(inline_comment_prefixes=("#", ";"))
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
        dram, system, other = parser["dram_structure"], parser["system"], parser["other"]
        width, bus = float(dram["device_width"]), float(system["bus_width"])
        bank_mib = float(dram["columns"]) * width / 8 * float(dram["rows"]) / 2**20
        banks = float(dram["bankgroups"]) * float(dram["banks_per_group"])
        rank_mib = bank_mib * banks * (bus / width)
        ranks = max(1.0, float(system["channel_size"]) // rank_mib)
        return msgspec.structs.replace(
            known,
            channel_gib=ranks * rank_mib / 1024,
            idle_w=float(other["idle_power"]) / 1000,
            peak_w=float(other["peak_power"]) / 1000,
        )
    except OSError as error:
        raise InputError(str(path), None, "", error.strerror or str(error)) from None
    except KeyError as error:
        raise InputError(str(path), None, str(error.args[0]), "missing") from None
    except (configparser.Error, ValueError) as error:
        raise InputError(str(path), None, "", str(error).splitlines()[0]) from None


class PimAttention:
    """Decode attention of one kind of replica in the memory of its machine."""

    def __init__(self, device: PimDevice, memory_gib: float, model: ModelSpec) -> None:
        self.channels = max(1, int(memory_gib // device.channel_gib))
        self.split = min(self.channels, model.kv_heads)
        self._slope = device.slope_ns * (model.heads / model.kv_heads) / 4
        self._intercept = device.intercept_ns * model.heads * model.head_dim / 4096

    def piece_ns(self, tokens: int) -> int:
        """One piece of one request."""
        return int((self._slope * tokens + self._intercept) / self.split)

    def layer_ns(self, count: int, context_sum: int, context_max: int) -> int:
        """One layer's attention of `count` decodes. `context_sum` counts their tokens."""
        if not count:
            return 0
        work = self._slope * context_sum + self._intercept * count
        return max(self.piece_ns(context_max), int(work / self.channels))

    def work_ns(self, count: int, context_sum: int) -> int:
        """Time of all channels together, for energy. `context_sum` counts the decodes' tokens."""
        return int(self._slope * context_sum + self._intercept * count)


# --- Latency with weights or attention outside the GPU --------------------------------------------


class OffloadedBackend:
    """Implements `LatencyBackend`."""

    foreign = False

    def __init__(
        self,
        inner: LatencyBackend,
        layers: int,
        *,
        loads: WeightLoads | None = None,
        pim: PimAttention | None = None,
        interleaves: bool = False,
    ) -> None:
        assert not inner.foreign
        self.name = inner.name
        self.inner = inner
        self.loads = loads
        self.pim = pim
        self._layers = layers
        self._interleaves = interleaves

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration in ns, all stages."""
        return sum(self.stage_ns(shape))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage; every stage loads its own weights from when a batch enters it."""
        if self._interleaves and shape.sequences > 1 and shape.decode_count:
            return (self._interleaved_ns(shape),)
        stages = list(self.inner.stage_ns(shape))
        change_ns = self._attention_change_ns(shape)
        each, more = divmod(change_ns, len(stages))
        stages = [max(1, ns + each + (i < more)) for i, ns in enumerate(stages)]
        if self.loads is not None:
            rows = self._rows(shape)
            for index, part in enumerate(_cut(rows, len(stages))):
                stages[index] += self.loads.stall_ns(part) if part else 0
        return tuple(stages)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends, one after another."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """Attention in memory counts as decode attention, stalls as memory."""
        parts = {**dict.fromkeys(COMPONENTS, 0), **self.inner.components_ns(shape)}
        parts["attention_decode"] += self._attention_change_ns(shape)
        parts["memory"] += self.iteration_ns(shape) - sum(parts.values())
        return parts

    def expert_loads(self, shape: BatchShape) -> Routing | None:
        """The backend's loads."""
        found: Routing | None = self.inner.expert_loads(shape)  # type: ignore[attr-defined]
        return found

    def _attention_change_ns(self, shape: BatchShape) -> int:
        if self.pim is None or not shape.decode_count:
            return 0
        layer_ns = self.pim.layer_ns(
            shape.decode_count, shape.decode_context_sum, shape.decode_context_max
        )
        layers = self._layers if shape.layers < 0 else shape.layers
        return layers * layer_ns - self.inner.components_ns(shape)["attention_decode"]

    def _interleaved_ns(self, shape: BatchShape) -> int:
        halves = [half for half in split_shape(shape) if half.sequences]
        stalls = sum(self.loads.stall_ns(self._rows(half)) for half in halves) if self.loads else 0
        return stalls + interleaved_ns([self._half(half) for half in halves], self._layers)

    def _half(self, shape: BatchShape) -> HalfCosts:
        assert self.pim is not None
        rows = self._rows(shape)
        parts = self.inner.components_ns(shape)
        if all(name != "attention" for name, _, _ in rows):
            # Blocks in one piece: what stands before attention is not known apart.
            attention_ns = parts["attention_prefill"] + parts["attention_decode"]
            each = attention_ns // self._layers
            rows = [row if row[1] < 0 else (row[0], row[1], row[2] - each) for row in rows]
        in_memory = self.pim.layer_ns(
            shape.decode_count, shape.decode_context_sum, shape.decode_context_max
        )
        on_gpu = parts["attention_prefill"] // self._layers
        return half_costs(rows, in_memory=in_memory, on_gpu=on_gpu)

    def _rows(self, shape: BatchShape) -> list[RowTime]:
        if shape.start_layer == 0 and shape.layers < 0:
            exact = getattr(self.inner, "rows_ns", None)
            if exact is not None:
                rows: list[RowTime] = exact(shape)
                return rows
        parts = self.inner.components_ns(shape)
        outer = {"embedding": parts.get("embedding", 0), "lm_head": parts.get("lm_head", 0)}
        head_ns = parts.get("sampler", 0)
        first = shape.start_layer
        count = self._layers - first if shape.layers < 0 else shape.layers
        inner_ns = sum(parts.values()) - sum(outer.values()) - head_ns
        each, more = divmod(max(0, inner_ns), max(1, count))
        found: list[RowTime] = [("embedding", -1, outer["embedding"])] if first == 0 else []
        found += [("block", first + i, each + (i < more)) for i in range(count)]
        if first + count == self._layers:
            found += [("lm_head", -1, outer["lm_head"]), ("sampler", -1, head_ns)]
        return found


def _cut(rows: list[RowTime], stages: int) -> list[list[RowTime]]:
    """Rows of each pipeline stage, layers spread as in `stage_bounds`."""
    if stages == 1:
        return [rows]
    from emu.latency.profile.backend import stage_bounds

    layers = 1 + max(layer for _, layer, _ in rows)
    bounds = stage_bounds(layers, stages)
    parts: list[list[RowTime]] = [[] for _ in range(stages)]
    seen = -1
    for row in rows:
        seen = max(seen, row[1])
        layer = row[1] if row[1] >= 0 else (0 if seen < 0 else layers - 1)
        stage = next(i for i in range(stages) if layer < bounds[i + 1])
        parts[stage].append(row)
    return parts
