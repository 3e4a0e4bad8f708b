"""Latency with weights or attention outside the GPU, on top of any backend.

Owns the sum: what the backend says, with decode attention taken out and that in memory put in
(`pim.py`), plus the stall for weights (`weights.py`). Where the backend knows its rows one by one
(`rows_ns`), stalls are found row by row; else layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.latency.abilities import Abilities, abilities_of
from emu.latency.base import COMPONENTS, BatchShape, LatencyBackend, stepped_decode_run
from emu.latency.offload.interleaving import HalfCosts, half_costs, interleaved_ns, split_shape
from emu.latency.offload.pim import PimAttention
from emu.latency.offload.weights import RowTime, WeightLoads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        self._able = abilities_of(inner)
        self.loads = loads
        self.pim = pim
        self._layers = layers
        self._interleaves = interleaves

    def abilities(self) -> Abilities:
        """What does not depend on how long an iteration takes."""
        return Abilities(expert_loads=self._able.expert_loads, beyond=self._able.beyond)

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
        if shape.start_layer == 0 and shape.layers < 0 and self._able.rows_ns is not None:
            return self._able.rows_ns(shape)
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
