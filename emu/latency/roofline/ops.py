"""What single GPU operations cost under a roofline, in seconds.

Owns the efficiencies and the cost of each kind of operation; `roofline.py` composes iterations
of them. An operation takes the longer of its arithmetic and its memory traffic, plus a fixed time
for filling and draining the machine. The longer is meant softly (`_overlapped_s`): where the two
are near, loads and products of a kernel get into each other's way. One set of constants serves
all GPUs and models. Each lies in a range argued below; where in it (`memory`, the softness, and
the query tile in `roofline.py`) was settled once against all the measured cases together that
`tests/latency/test_roofline_measured.py` lists, for none of them in particular. Known to be off
by most: a GPU that holds its boost clock under load (RTX 4090: products reach 98 % of the quoted
peak, prompts come out 20 to 30 % too slow); `latency.compute_efficiency` is for such cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.units import ceil_div, gbps_to_bytes_per_s

CollectiveNs = Callable[[str, int, int], int]
"""(kind, bytes, ranks) -> ns. Kinds: all-reduce (bytes of the whole vector), all-gather (bytes
that one rank contributes), reduce-scatter (bytes of the whole vector), send (one message)."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of a GPU's peaks its kernels reach."""

    compute: float = 0.80
    """Large dense products, inner loop: CUTLASS and cuBLAS report 70 to 85 % of the dense peak
    on A100 and H100 (the peak assumes the boost clock, which power limits lower)."""
    memory: float = 0.82
    """Reading weights: copies reach 90 to 94 % of the pin rate, the skinny products of a decode
    less. One sequence decoded by an 8B model implies 74 to 80 % on A100 and H100 (published
    rates, launch gaps included), 80 % on an RTX PRO 6000, 92 % on an RTX 4090; the middle."""
    attention_compute: float = 0.60
    """Flash attention spends part of its time in softmax: 50 to 73 % of peak (Flash-Attention 2
    and 3 papers, forward, head dimension 128)."""
    kv_memory: float = 0.85
    """Paged KV is read in blocks of a few KiB, found through a table."""
    expert_compute: float = 0.60
    """Grouped products have ragged edges and gather their rows."""
    expert_memory: float = 0.80
    """Each expert's matrix is short, and its readers start and end apart."""
    kernel_s: float = 2e-6
    """Start, fill and drain of a kernel inside a CUDA graph; small kernels take 2 us anywhere."""
    attention_s: float = 8e-6
    """Fixed part of attention in one layer: KV write, the kernel's serial walk, the reduction
    over splits (three dependent kernels)."""
    sampler_kernels: int = 10
    link: float = 0.80
    """Part of a link's rate that a collective's payload reaches (NCCL's bus bandwidth)."""


def efficiency(compute: float = 0.0, memory: float = 0.0) -> Efficiency:
    """The constants with a given `compute` or `memory` part (0 = default).

    The parts for attention and experts keep their ratio to the given one, at most 1.
    """
    default = Efficiency()
    more_compute = compute / default.compute if compute else 1.0
    more_memory = memory / default.memory if memory else 1.0
    return Efficiency(
        compute=compute or default.compute,
        attention_compute=min(1.0, default.attention_compute * more_compute),
        expert_compute=min(1.0, default.expert_compute * more_compute),
        memory=memory or default.memory,
        kv_memory=min(1.0, default.kv_memory * more_memory),
        expert_memory=min(1.0, default.expert_memory * more_memory),
    )


# Tiles of the output that one processor computes at a time, with the relative speed of their
# inner loop: a smaller tile reuses less of what it loads (CUTLASS's tile shapes).
_TILES: Final = ((128, 256, 1.0), (128, 128, 0.97), (64, 128, 0.85), (64, 64, 0.75), (16, 64, 0.4))
_TILE_STEP: Final = 16
"""Rows of all tiles are multiples of this: the time of a product changes with every 16th row."""
_SPLITS: Final = (1, 2, 4)
"""A short grid may cut the inner dimension and reduce afterwards (split-K)."""


def _overlapped_s(memory_s: float, compute_s: float) -> float:
    """Cubic mean: 26 % above either where both are equal, 4 % where one is twice the other."""
    return math.cbrt(memory_s**3 + compute_s**3)


class _Matrix(msgspec.Struct):
    """Weights that rows are multiplied with."""

    weight_bytes: int
    row_bytes: int
    """What a row adds to the traffic."""
    peak: float
    product_s: dict[int, float] = {}
    """Arithmetic by tiles of rows, as far as it has been asked for."""


class Ops:
    """Costs of operations on one kind of GPU with weights of one type."""

    def __init__(self, gpu: GpuSpec, efficiency: Efficiency, activation_bytes: int) -> None:
        self.gpu = gpu
        self.eff = efficiency
        self.activation_bytes = activation_bytes
        self.processors = gpu.sm_count or 1
        self.memory_rate = gpu.memory_gbytes_per_s * 1e9
        self.half_peak = gpu.peak_flops("bfloat16")
        self._weight_rate = self.memory_rate * self.eff.memory
        self._matrices: dict[tuple[int, int, str], _Matrix] = {}

    def gemm_s(self, rows: int, columns: int, inner: int, dtype: str) -> float:
        """rows x inner times inner x columns; the second matrix is weights of a type."""
        matrix = self._matrices.get((columns, inner, dtype))
        if matrix is None:
            matrix = self._matrices[columns, inner, dtype] = _Matrix(
                sizes.weight_bytes(columns * inner, dtype),
                (columns + inner) * self.activation_bytes,
                self.gpu.peak_flops(dtype),
            )
        memory_s = (matrix.weight_bytes + rows * matrix.row_bytes) / self._weight_rate
        tile = -(-rows // _TILE_STEP) if self.gpu.sm_count else rows
        compute_s = matrix.product_s.get(tile)
        if compute_s is None:
            compute_s = self._product_s(rows, columns, inner, matrix.peak)
            matrix.product_s[tile] = compute_s
        return _overlapped_s(memory_s, compute_s) + self.eff.kernel_s

    def _product_s(self, rows: int, columns: int, inner: int, peak: float) -> float:
        """Arithmetic of a product: whole waves of whole tiles, best of the tile shapes."""
        if not self.gpu.sm_count:
            return 2.0 * rows * columns * inner / (peak * self.eff.compute)
        processors = self.processors
        rate = peak / processors * self.eff.compute
        best = math.inf
        for tile_rows, tile_columns, speed in _TILES:
            tiles = ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns)
            tile_s = 2.0 * tile_rows * tile_columns * inner / (rate * speed)
            for split in _SPLITS:
                best = min(best, ceil_div(tiles * split, processors) / split * tile_s)
                if tiles >= 8 * processors:
                    break  # many waves: the rest of the last one hardly counts
        return best

    def elementwise_s(self, traffic: float) -> float:
        """A kernel that only moves bytes."""
        return traffic / self._weight_rate + self.eff.kernel_s

    def experts_s(
        self, tokens: int, count: int, per_token: int, params: int, dtype: str, ep: int
    ) -> float:
        """Routed experts of one layer on one of `ep` ranks; `params` weights in each.

        Balanced routing: of `count` experts 1 - (1 - k/E)^T are met by at least one of T tokens;
        the rows of each are padded to the 16 of a matrix instruction.
        """
        met = (
            count * -math.expm1(tokens * math.log1p(-per_token / count))
            if per_token < count
            else count
        )
        here = max(1.0, met / ep)
        rows = tokens * per_token / ep / here
        padded = 16 * math.ceil(rows / 16)
        compute_s = (
            2.0 * here * padded * params / (self.gpu.peak_flops(dtype) * self.eff.expert_compute)
        )
        traffic = here * sizes.weight_bytes(params, dtype)
        memory_s = traffic / (self.memory_rate * self.eff.expert_memory)
        return _overlapped_s(memory_s, compute_s) + 3 * self.eff.kernel_s

    def sampler_s(self, rows: int, vocab: int) -> float:
        """Logits are widened to 32 bits, penalised and searched: 2 + 4 + 4 bytes for each."""
        traffic = 10.0 * rows * vocab
        fixed = (self.eff.sampler_kernels - 1) * self.eff.kernel_s
        return self.elementwise_s(traffic) + fixed


def default_collective(
    gpu: GpuSpec, efficiency: Efficiency, nvlink_gbps: float = -1.0
) -> CollectiveNs:
    """Rings over NVLink, or over PCIe where there is none. For use without a network model.

    Every step of a ring pays a latency (1 us between NVLink peers, 4 us through the host
    bridge), every collective a launch of 8 us, which is what NCCL shows for small vectors.
    """
    gbps = gpu.nvlink_gbps if nvlink_gbps < 0 else nvlink_gbps
    step_ns, gbps = (1_000, gbps) if gbps > 0 else (4_000, gpu.pcie_gbps)
    bytes_per_ns = gbps_to_bytes_per_s(gbps) * efficiency.link / 1e9

    def collective_ns(kind: str, size_bytes: int, ranks: int) -> int:
        if kind == "send":
            return step_ns + round(size_bytes / bytes_per_ns)
        if ranks <= 1:
            return 0
        if kind == "all-reduce":
            steps, moved = 2 * (ranks - 1), 2 * (ranks - 1) * size_bytes / ranks
        elif kind == "all-gather":
            steps, moved = ranks - 1, (ranks - 1) * float(size_bytes)
        else:
            steps, moved = ranks - 1, (ranks - 1) * size_bytes / ranks
        return 8_000 + steps * step_ns + round(moved / bytes_per_ns)

    return collective_ns
