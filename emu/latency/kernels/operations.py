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
    Expert,
    block_rows,
    even_padded_rows,
    grouped_s,
    met_experts,
    padded_rows,
)
from emu.latency.kernels.factors import Factor, factors_named
from emu.latency.kernels.products import TILE_STEP, arithmetic_s, soft_max

if TYPE_CHECKING:
    from emu.latency.moe_gate import Gate


_SAMPLER_KERNELS: Final = 10
_SINGLE_FLOPS: Final = 128 * 2 * 1.8e9 * 0.8
"""Of one processor in 32 bits: 128 lanes at the clock that it keeps, of which libraries reach four
fifths."""
_PRODUCT_TABLES: Final = {
    "float16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
}
"""Types of weights -> the surface of dense products."""
_EXPERT_TABLES: Final = {
    "float16": ("bfloat16",),
    "bfloat16": ("bfloat16",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8_block",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "int4": ("int4_wo",),
    "int4_g32": ("int4_wo",),
}
"""Types of weights -> surfaces of experts, the kernels that a server prefers first."""
_EIGHT_BITS: Final = ("fp8", "fp8_block", "nvfp4")
_GENERATED_FP8: Final = {"blackwell": 300e12 / 4500e12}
"""By architecture: the part of the peak in 8 bits that TensorRT-LLM's generated kernel of
block-scaled products reaches, which scales partial sums on the plain units. Fitted to DeepSeek-R1
on 8 B200 (SGLang without drafts, 7 rows: the median error of TTFT falls from 25 to 8 %) and judged
on 4 B200 (4 rows, 35 to 4 %). Experts of the same family reach 180 to 600 TFLOP/s in measured
tables."""
_EVEN_EXPERTS: Final = 16
"""Up to so many experts, routers are trained to an even load (Mixtral's is, in its publication);
the skewed tables, in which loads lie a hundred times apart, are for more."""


def _product_family(dtype: str, units: str) -> str:
    """The surface of products; empty for types that are widened to others."""
    name = _PRODUCT_TABLES.get(dtype, "")
    return f"products-{name}" if name and (units != "half" or name == "bfloat16") else ""


@final
class _Matrix:
    """Weights that rows are multiplied with."""

    __slots__ = (
        "factor",
        "input_s",
        "kernel",
        "launch_s",
        "least_s",
        "peak",
        "product_s",
        "read_s",
        "row_s",
    )

    def __init__(
        self,
        kernel: Products,
        launch_s: float,
        read_s: float,
        row_s: float,
        input_s: float,
        peak: float,
        factor: Factor,
        least_s: float,
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
        self.factor = factor
        """Measured over formula."""
        self.least_s = least_s
        """A row at least."""
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
        self.factors = factors_named(kernels.surfaces)
        """Measured over formula, where the engine's kernels were measured."""
        self._matrices: dict[tuple[int, int, str], _Matrix] = {}

    def _matrix(self, columns: int, inner: int, dtype: str) -> _Matrix:
        units = self.gpu.units(dtype)
        kernel = self.kernels.product(dtype, units)
        rate = self.memory_rate * kernel.memory
        return _Matrix(
            kernel,
            kernel.launch_us * 1e-6,
            sizes.weight_bytes(columns * inner, dtype) / rate,
            (kernel.writes * columns + inner) * self.activation_bytes / rate,
            inner * kernel.quantize / self.memory_rate,
            self.gpu.unit_flops(units),
            self.factors.line(_product_family(dtype, units), (columns, inner)),
            self._generated_s(columns, inner, dtype),
        )

    def _generated_s(self, columns: int, inner: int, dtype: str) -> float:
        """A row of a product in TensorRT-LLM's generated kernel; 0 = another kernel runs it."""
        part = _GENERATED_FP8.get(self.gpu.architecture)
        if not self.kernels.generated or dtype != "fp8_block" or part is None:
            return 0.0
        return 2.0 * columns * inner / (part * self.gpu.unit_flops("fp8"))

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
        product_s += rows * matrix.input_s
        return max(product_s * matrix.factor.at(rows), rows * matrix.least_s)

    def single_s(self, rows: int, columns: int, inner: int) -> float:
        """rows x inner times inner x columns in 32 bits, without tensor cores; inputs widened."""
        flops = _SINGLE_FLOPS * max(1, self.gpu.sm_count)
        widened_s = self.elementwise_s(6.0 * rows * inner)
        read_s = 4.0 * (columns * inner + rows * (columns + inner)) / self.memory_rate
        return widened_s + self.element_s + max(read_s, 2.0 * rows * columns * inner / flops)

    def elementwise_s(self, traffic: float) -> float:
        """A kernel that only moves bytes. `traffic` counts bytes."""
        return traffic / self._element_rate + self.element_s

    def _expert(self, hidden: int, ffn: int, matrices: int, dtype: str) -> Expert:
        """An expert of `matrices` of hidden x ffn."""
        _, units = self.kernels.expert(dtype, self.gpu.units(dtype))
        params = matrices * hidden * ffn
        return Expert(
            params,
            sizes.weight_bytes(params, dtype),
            float(self.activation_bytes * (2 * hidden + matrices * ffn)),
            self.gpu.unit_flops(units),
        )

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
        shared: int = 0,
    ) -> float:
        """Routed experts of one layer on the slowest of `ep` ranks.

        An expert has `matrices` of hidden x ffn. Without a gate, ranks are alike and experts as
        popular as `met_experts` says. A gate says how many tokens each expert computes. `shared`
        experts more are met by every token.
        """
        kernel, units = self.kernels.expert(dtype, self.gpu.units(dtype))
        each = self._expert(hidden, ffn, matrices, dtype)
        rows = tokens * per_token
        block = block_rows(kernel, rows, count)
        if gate is None:
            met = max(1.0, met_experts(tokens, count, per_token) / ep)
            loads = [(met, rows / ep, even_padded_rows(rows / ep, met, block))]
        else:
            loads = _rank_loads(gate, tokens, ep, block)
        shape = (hidden, ffn, per_token, count, ep)
        is_skewed = gate is None and count > _EVEN_EXPERTS
        family = self._expert_family(dtype, units, "skewed" if is_skewed else "even")
        factor = self.factors.of(family, shape, tokens)
        return factor * max(
            grouped_s(
                kernel,
                each,
                met=met + shared,
                rows=routed + shared * tokens,
                padded=padded + shared * -(-tokens // block) * block,
                memory_rate=self.memory_rate,
            )
            for met, routed, padded in loads
        )

    def _expert_family(self, dtype: str, units: str, routing: str) -> str:
        """The surface of experts of a type: the first of its kernels that was measured."""
        names = _EXPERT_TABLES.get(self.kernels.expert_type(dtype), ())
        if self.kernels.cutlass and dtype == "nvfp4":
            names = ("nvfp4_cutlass", *names)
        if units == "half" and dtype in _EIGHT_BITS:
            names = ()  # widened: no table
        wanted = [f"experts-{name}-{routing}" for name in names]
        return next((name for name in wanted if self.factors.has(name)), "")

    def rank_experts_s(
        self,
        rows: float,
        *,
        met: float,
        count: int,
        slots: int,
        hidden: int,
        ffn: int,
        matrices: int,
        dtype: str,
    ) -> float:
        """The same for a rank that is known to compute so many rows, and to read `met` experts.

        `count` experts lie in `slots` slots of each rank; `met` 0 = as popular as `met_experts`
        says.
        """
        kernel, _ = self.kernels.expert(dtype, self.gpu.units(dtype))
        if not met:
            met = max(1.0, met_experts(rows * count / slots, count, 1) * slots / count)
        each = self._expert(hidden, ffn, matrices, dtype)
        padded = even_padded_rows(rows, met, block_rows(kernel, rows, slots))
        rate = self.memory_rate
        return grouped_s(kernel, each, met=met, rows=rows, padded=padded, memory_rate=rate)

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
