"""The operations of one GPU: its peaks and its architecture's coefficients put into the formulas.

What does not depend on the number of rows is computed once for each matrix and kept.
`emu/latency/roofline.py` composes a model's layers of these operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.latency.coefficients import Kernels, Products
from emu.latency.kernels.experts import (
    block_rows,
    even_padded_rows,
    grouped_s,
    met_experts,
    padded_rows,
)
from emu.latency.kernels.products import TILE_STEP, arithmetic_s, soft_max

if TYPE_CHECKING:
    from emu.latency.moe_gate import Gate


_SAMPLER_KERNELS: Final = 10


@final
class _Matrix:
    """Weights that rows are multiplied with."""

    __slots__ = ("input_s", "kernel", "launch_s", "peak", "product_s", "read_s", "row_s")

    def __init__(
        self,
        kernel: Products,
        launch_s: float,
        read_s: float,
        row_s: float,
        input_s: float,
        peak: float,
    ) -> None:
        self.kernel = kernel
        self.launch_s = launch_s
        self.read_s = read_s
        """Reading the weights."""
        self.row_s = row_s
        """What a row adds to the traffic."""
        self.input_s = input_s
        """Turning a row of the input into the type of the weights, before the product."""
        self.peak = peak
        self.product_s: dict[int, float] = {}
        """Arithmetic by tiles of rows, as far as it has been asked for."""


class Ops:
    """Costs of operations on one kind of GPU with activations of one type."""

    def __init__(self, gpu: GpuSpec, kernels: Kernels, activation_bytes: int) -> None:
        self.gpu = gpu
        self.kernels = kernels
        self.activation_bytes = activation_bytes
        self.memory_rate = gpu.memory_gbytes_per_s * 1e9
        self.element_s = kernels.element_us * 1e-6
        self._element_rate = self.memory_rate * kernels.element_memory
        self._matrices: dict[tuple[int, int, str], _Matrix] = {}

    def _matrix(self, columns: int, inner: int, dtype: str) -> _Matrix:
        units = self.gpu.units(dtype)
        kernel = self.kernels.product(dtype, units)
        rate = self.memory_rate * kernel.memory
        return _Matrix(
            kernel,
            kernel.launch_us * 1e-6,
            sizes.weight_bytes(columns * inner, dtype) / rate,
            (columns + inner) * self.activation_bytes / rate,
            inner * kernel.quantize / self.memory_rate,
            self.gpu.unit_flops(units),
        )

    def gemm_s(self, rows: int, columns: int, inner: int, dtype: str) -> float:
        """rows x inner times inner x columns; the second matrix is weights of a type."""
        matrix = self._matrices.get((columns, inner, dtype))
        if matrix is None:
            matrix = self._matrices[columns, inner, dtype] = self._matrix(columns, inner, dtype)
        memory_s = matrix.read_s + rows * matrix.row_s
        processors = self.gpu.sm_count
        tile = -(-rows // TILE_STEP) * TILE_STEP if processors else rows
        compute_s = matrix.product_s.get(tile)
        if compute_s is None:
            compute_s = arithmetic_s(matrix.kernel, matrix.peak, processors, tile, columns, inner)
            matrix.product_s[tile] = compute_s
        product_s = soft_max(memory_s, compute_s, matrix.kernel.softness) + matrix.launch_s
        return product_s + rows * matrix.input_s

    def elementwise_s(self, traffic: float) -> float:
        """A kernel that only moves bytes. `traffic` counts bytes."""
        return traffic / self._element_rate + self.element_s

    def experts_s(
        self,
        tokens: int,
        *,
        count: int,
        per_token: int,
        hidden: int,
        ffn: int,
        matrices: int,
        dtype: str,
        ep: int,
        gate: Gate | None = None,
    ) -> float:
        """Routed experts of one layer on the slowest of `ep` ranks.

        An expert has `matrices` of hidden x ffn. Without a gate, ranks are alike and experts as
        popular as `met_experts` says. A gate says how many tokens each expert computes.
        """
        kernel, units = self.kernels.expert(dtype, self.gpu.units(dtype))
        params = matrices * hidden * ffn
        peak = self.gpu.unit_flops(units)
        rows = tokens * per_token
        block = block_rows(kernel, rows, count)
        if gate is None:
            met = max(1.0, met_experts(tokens, count, per_token) / ep)
            loads = [(met, rows / ep, even_padded_rows(rows / ep, met, block))]
        else:
            loads = _rank_loads(gate, tokens, ep, block)
        return max(
            grouped_s(
                kernel,
                met=met,
                rows=routed,
                padded=padded,
                params=params,
                weight_bytes=sizes.weight_bytes(params, dtype),
                row_bytes=float(self.activation_bytes * (2 * hidden + matrices * ffn)),
                peak=peak,
                memory_rate=self.memory_rate,
            )
            for met, routed, padded in loads
        )

    def sampler_s(self, rows: int, vocab: int) -> float:
        """Logits are widened to 32 bits, penalized and searched: 2 + 4 + 4 bytes for each."""
        return self.elementwise_s(10.0 * rows * vocab) + (_SAMPLER_KERNELS - 1) * self.element_s


def _rank_loads(gate: Gate, tokens: int, ep: int, block: float) -> list[tuple[float, float, float]]:
    """(experts that are met, their rows, rows with padding) of each rank."""
    counts = gate.route(tokens, tokens).expert_tokens
    experts = len(counts)
    loads = []
    for rank in range(ep):
        here = [load for at, load in enumerate(counts) if min(at * ep // experts, ep - 1) == rank]
        met = sum(load > 0 for load in here)
        if met:
            loads.append((float(met), float(sum(here)), padded_rows(here, block)))
    return loads or [(1.0, 1.0, block)]
