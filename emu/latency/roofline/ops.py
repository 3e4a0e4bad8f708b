"""What single GPU operations cost under a roofline, in seconds.

Composes the formulas of the kernel families (`products.py`, `experts.py`, `links.py`) with a GPU's
peaks and its architecture's coefficients; `layers.py` composes a model's layers of operations.
What does not depend on the number of rows is computed once for each matrix and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from emu.catalogue import sizes
from emu.catalogue.lookup import GpuSpec
from emu.latency.roofline.coefficients import Kernels, Products
from emu.latency.roofline.experts import (
    block_rows,
    even_padded_rows,
    grouped_s,
    met_experts,
    padded_rows,
)
from emu.latency.roofline.links import collective_s
from emu.latency.roofline.products import TILE_STEP, arithmetic_s, soft_max
from emu.units import NS_PER_S, gbps_to_bytes_per_s

if TYPE_CHECKING:
    from emu.latency.moe_gate import Gate

CollectiveNs = Callable[[str, int, int], int]
"""(kind, bytes, ranks) -> ns. Kinds: all-reduce (bytes of the whole vector), all-gather (bytes
that one rank contributes), reduce-scatter (bytes of the whole vector), send (one message)."""

_WEIGHT_ONLY: Final = ("int4", "int4_g32", "mxfp4")
_SAMPLER_KERNELS: Final = 10
_NVLINK_STEP_NS: Final = 1_000
_PCIE_STEP_NS: Final = 4_000


@final
class _Matrix:
    """Weights that rows are multiplied with."""

    __slots__ = ("kernel", "launch_s", "peak", "product_s", "read_s", "row_s")

    def __init__(
        self, kernel: Products, launch_s: float, read_s: float, row_s: float, peak: float
    ) -> None:
        self.kernel = kernel
        self.launch_s = launch_s
        self.read_s = read_s
        """Reading the weights."""
        self.row_s = row_s
        """What a row adds to the traffic."""
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
        kernel = self.kernels.product(dtype)
        rate = self.memory_rate * kernel.memory
        return _Matrix(
            kernel,
            kernel.launch_us * 1e-6,
            sizes.weight_bytes(columns * inner, dtype) / rate,
            (columns + inner) * self.activation_bytes / rate,
            self.gpu.peak_flops(dtype),
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
        return soft_max(memory_s, compute_s, matrix.kernel.softness) + matrix.launch_s

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
        kernel = self.kernels.expert(dtype)
        params = matrices * hidden * ffn
        # Four-bit experts of released models multiply in 16 bits (gpt-oss, AWQ, GPTQ).
        peak = self.gpu.peak_flops("bfloat16" if dtype in _WEIGHT_ONLY else dtype)
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


def machine_collective(
    gpu: GpuSpec,
    kernels: Kernels,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    send_ns: CollectiveNs | None = None,
) -> CollectiveNs:
    """Collectives inside a machine as engines run them, over NVLink, or PCIe without it.

    `send_ns` answers for messages between stages; None = at the links' rate.
    """
    nvlink = gpu.nvlink_gbps if nvlink_gbps is None else nvlink_gbps
    is_pcie = nvlink <= 0
    links = kernels.pcie if is_pcie else kernels.nvlink
    gbps = (gpu.pcie_gbps if pcie_gbps is None else pcie_gbps) if is_pcie else nvlink
    rate = gbps_to_bytes_per_s(gbps)
    step_ns = _PCIE_STEP_NS if is_pcie else _NVLINK_STEP_NS

    def collective_ns(kind: str, size_bytes: int, ranks: int) -> int:
        if kind == "send":
            if send_ns is not None:
                return send_ns(kind, size_bytes, ranks)
            return step_ns + round(size_bytes / (rate * links.large_rate) * NS_PER_S)
        seconds = collective_s(
            links, kind=kind, size_bytes=size_bytes, ranks=ranks, bytes_per_s=rate, is_pcie=is_pcie
        )
        return round(seconds * NS_PER_S)

    return collective_ns
