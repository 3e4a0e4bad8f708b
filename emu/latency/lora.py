"""The cost of LoRA adapters in an iteration: loads, and two thin products beside each matrix.

Owns sizes and costs. Memory is taken at start for every slot, whatever is loaded: for each matrix
`rank` x (inputs + outputs) at 16 bits. A step with adapted requests computes, for each matrix, rows
times inputs x rank and rank x outputs; the weights of every adapter in the batch are read. Ranks
below the greatest one compute as the greatest. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.catalogue.model import ModelSpec
from emu.latency.base import BatchShape, LatencyBackend, stepped_decode_run
from emu.latency.roofline.ops import Ops
from emu.units import NS_PER_S, ceil_div

ADAPTER_BYTES = 2
"""Of one weight of an adapter."""


class LoraPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about adapters on one kind of replica."""

    rank: int
    host_ns: int
    """From host memory to the GPU, one adapter."""
    cold_ns: int
    """From the disk to host memory and to the GPU."""


def adapted_matrices(spec: ModelSpec, tp: int) -> list[tuple[int, int, int]]:
    """(inputs, outputs, how many of them in the model) of one rank's adapted matrices."""
    found: dict[tuple[int, int], int] = {}

    def add(inputs: int, outputs: int, count: int = 1) -> None:
        found[inputs, outputs] = found.get((inputs, outputs), 0) + count

    hidden = spec.hidden
    for index in range(spec.layers):
        layer = spec.layer(index)
        part = layer.attention
        assert part is not None, "adapters of attention without heads of its own"
        heads, kv_heads = ceil_div(part.heads, tp), max(1, ceil_div(part.kv_heads, tp))
        add(hidden, heads * part.head_dim)
        add(hidden, kv_heads * part.head_dim)
        add(hidden, kv_heads * part.value_dim)
        add(heads * part.value_dim, hidden)
        assert layer.mlp is not None, "adapters of experts"
        width = ceil_div(layer.mlp.width, tp)
        add(hidden, width, 2 if layer.mlp.gated else 1)
        add(width, hidden)
    return [(inputs, outputs, count) for (inputs, outputs), count in found.items()]


def slot_bytes(spec: ModelSpec, tp: int, rank: int) -> int:
    """Bytes of one slot on one rank."""
    weights = sum(count * (i + o) for i, o, count in adapted_matrices(spec, tp))
    return rank * weights * ADAPTER_BYTES


class LoraBackend:
    """Implements `LatencyBackend` for a replica with adapters, on one stage."""

    foreign = False
    monotone_decode = False

    def __init__(
        self,
        inner: LatencyBackend,
        plan: LoraPlan,
        ops: Ops,
        matrices: Sequence[tuple[int, int, int]],
    ) -> None:
        """`matrices`: as `adapted_matrices`."""
        self.inner = inner
        self.name = inner.name
        self.plan = plan
        self.first_use_ns = getattr(inner, "first_use_ns", ())
        self._ops = ops
        self._matrices = tuple(matrices)
        self._known: dict[tuple[int, int], int] = {}

    def lora_ns(self, shape: BatchShape) -> int:
        """Loads and products of the adapters of a batch."""
        lora = shape.lora
        if lora is None or not lora.adapters:
            return 0
        return (
            lora.cold_loads * self.plan.cold_ns
            + lora.host_loads * self.plan.host_ns
            + self._products_ns(lora.tokens, lora.adapters)
        )

    def _products_ns(self, tokens: int, adapters: int) -> int:
        found = self._known.get((tokens, adapters))
        if found is None:
            rank, ops, seconds = self.plan.rank, self._ops, 0.0
            for inputs, outputs, count in self._matrices:
                more_bytes = (adapters - 1) * rank * (inputs + outputs) * ADAPTER_BYTES
                seconds += count * (
                    ops.gemm_s(tokens, rank, inputs, "bfloat16")
                    + ops.gemm_s(tokens, outputs, rank, "bfloat16")
                    + more_bytes / ops.memory_rate
                )
            found = self._known[tokens, adapters] = round(seconds * NS_PER_S)
        return found

    def iteration_ns(self, shape: BatchShape) -> int:
        """The iteration without adapters, and what they add."""
        return self.inner.iteration_ns(shape) + self.lora_ns(shape)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations without adapters, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The components without adapters, and `lora`."""
        return {**self.inner.components_ns(shape), "lora": self.lora_ns(shape)}
