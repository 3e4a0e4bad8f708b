"""What single kernels take on a GPU: products, experts, attention, collectives. Seconds.

Restates the families of docs/lab/roofline.md. Coefficients, measured factors and the figures of
GPUs are data, and are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Final

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.layers import LatentAttention
from emu.catalogue.model import BITS_PER_1024
from emu.latency.coefficients import Kernels, Links, Products
from emu.latency.kernels.latent import known_latent
from emu.latency.surfaces import surface_file

_TILES: Final = ((128, 256), (256, 128), (128, 128), (64, 128), (64, 64), (16, 64))
_POPULARITIES: Final = [16 ** (at / 16) for at in range(1, 16, 2)]
"""Of eight classes of experts, the most popular sixteen times the least."""
_OWN_KERNEL_BYTES: Final = 8 << 20
"""Largest all-reduce of the kernel over peers' memory."""
_ONE_SHOT_BYTES: Final = {2: 1 << 62, 3: 512 << 10, 4: 512 << 10}
_BOARD_RANKS: Final = {"GB200": 4, "GB300": 4}
_PRODUCT_TABLES: Final = {
    "float16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
}
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
_TILE: Final = 128
"""Queries of a head that one processor keeps."""


def stored(count: int, dtype: str) -> int:
    """Bytes of so many weights."""
    return -(-count * BITS_PER_1024[dtype] // 8192)


def power_mean(one: float, other: float, power: float) -> float:
    """Near the longer of two times, `one` and `other`, and above both where they are alike.

    `power`: how soon the shorter one counts for nothing.
    """
    most = max(one, other)
    return most and float(most * ((one / most) ** power + (other / most) ** power) ** (1 / power))


@cache
def _line(name: str, family: str, shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """(logarithm of rows, measured over formula) of a shape; none if it was not measured."""
    surface = surface_file(name).surfaces.get(family) if name and family else None
    if surface is None:
        return []
    return list(zip(map(math.log, surface.rows), surface.line(shape), strict=True))


def _factor(kernels: Kernels, family: str, shape: tuple[int, ...], rows: float) -> float:
    """Measured over formula: a straight line in the logarithm of the rows, flat at its ends."""
    knots = _line(kernels.surfaces, family, shape)
    if not knots:
        return 1.0
    at = math.log(max(1.0, rows))
    for (left, low), (right, high) in pairwise(knots):
        if left <= at < right:
            return low + (high - low) * (at - left) / (right - left)
    return knots[0][1] if at < knots[0][0] else knots[-1][1]


class Operations:
    """Kernels of one GPU."""

    def __init__(self, gpu: GpuSpec, kernels: Kernels, element: int) -> None:
        """`element`: bytes of an activation."""
        self.gpu, self.kernels, self.element = gpu, kernels, element
        self.read = gpu.memory_gbytes_per_s * 1e9
        """Bytes of its memory in a second."""

    def moved(self, size: float) -> float:
        """A kernel that moves bytes only."""
        return 1e-6 * self.kernels.element_us + size / (self.read * self.kernels.element_memory)

    def product(self, rows: int, columns: int, inner: int, dtype: str) -> float:
        """Rows times a matrix of weights, with so many columns of `inner` elements."""
        units = self.gpu.units(dtype)
        kernel = self.kernels.product(dtype, units)
        table = _PRODUCT_TABLES.get(dtype, "")
        family = f"products-{table}" if table and (units != "half" or table == "bfloat16") else ""
        written = kernel.writes * columns
        traffic = stored(columns * inner, dtype) + rows * (written + inner) * self.element
        took = power_mean(
            traffic / (self.read * kernel.memory),
            self._arithmetic(kernel, self.gpu.unit_flops(units), rows, columns, inner),
            kernel.softness,
        )
        took += 1e-6 * kernel.launch_us + rows * inner * kernel.quantize / self.read
        return took * _factor(self.kernels, family, (columns, inner), rows)

    def _arithmetic(
        self, kernel: Products, peak: float, rows: int, columns: int, inner: int
    ) -> float:
        """Whole tiles in whole waves; the inner side is cut where tiles are few."""
        count = self.gpu.sm_count
        if count <= 1:
            return 2.0 * rows * columns * inner / (peak * kernel.compute)
        found = []
        for high, wide in _TILES:
            tiles = math.ceil(rows / high) * math.ceil(columns / wide)
            slower = 1.0 + kernel.reuse * (high + wide) / (high * wide)
            element = 2.0 * high * wide * slower * count / (peak * kernel.compute)
            for cuts in (1,) if tiles >= count else (1, 2, 4):
                waves = math.ceil(tiles * cuts / count)
                found.append(waves * (inner / cuts + kernel.prologue) * element)
        return min(found)

    def experts(
        self,
        tokens: int,
        *,
        count: int,
        chosen: int,
        hidden: int,
        ffn: int,
        matrices: int,
        dtype: str,
        ranks: int,
        shared: int = 0,
    ) -> float:
        """A layer's experts on one of so many ranks; each token is at `chosen` of `count`.

        `shared`: how many more each token passes.
        """
        kernel, units = self.kernels.expert(dtype, self.gpu.units(dtype))
        met = max(1.0, _met(tokens, count, chosen) / ranks)
        rows = tokens * chosen / ranks
        even = max(1.0, tokens * chosen / count)
        block = min(kernel.block, max(16.0, 2.0 ** math.ceil(math.log2(even))))
        padded = met * block if rows <= met else max(met * block, rows + met * block / 2)
        padded += shared * math.ceil(tokens / block) * block
        params = matrices * hidden * ffn
        traffic = (met + shared + kernel.few) * stored(params, dtype)
        each = self.element * (2 * hidden + matrices * ffn)
        traffic += (rows + shared * tokens) * each * kernel.row
        took = power_mean(
            traffic / (self.read * kernel.memory),
            2.0 * padded * params / (self.gpu.unit_flops(units) * kernel.compute),
            kernel.softness,
        )
        took += 1e-6 * kernel.launch_us
        family = self._expert_family(dtype, units, "skewed" if count > 16 else "even")
        shape = (hidden, ffn, chosen, count, ranks)
        return took * _factor(self.kernels, family, shape, tokens)

    def _expert_family(self, dtype: str, units: str, routing: str) -> str:
        names = list(_EXPERT_TABLES.get(self.kernels.expert_type(dtype), ()))
        if dtype == "nvfp4" and self.kernels.cutlass:
            names.insert(0, "nvfp4_cutlass")
        if units == "half" and dtype in ("fp8", "fp8_block", "nvfp4"):
            return ""
        there = surface_file(self.kernels.surfaces).surfaces if self.kernels.surfaces else {}
        wanted = [f"experts-{name}-{routing}" for name in names]
        return next((name for name in wanted if name in there), "")


def _met(tokens: int, count: int, chosen: int) -> float:
    """Experts that some of so many tokens choose."""
    if chosen >= count:
        return count
    mean = sum(_POPULARITIES) / len(_POPULARITIES)
    chances = [min(1.0, chosen / count * one / mean) for one in _POPULARITIES]
    missed = sum((1.0 - chance) ** tokens for chance in chances) / len(chances)
    return max(1.0, count * (1.0 - missed))


class Attention:
    """Softmax attention of one layer on one rank; `latent` where one vector serves all heads."""

    def __init__(
        self,
        ops: Operations,
        heads: int,
        kv_heads: int,
        width: int,
        kv_bytes: float,
        latent: LatentAttention | None = None,
        *,
        narrow: bool,
    ) -> None:
        """`width` of a head; `kv_bytes` of a token; `narrow`: KV has eight bits."""
        self._ops, self._heads, self._kv_heads = ops, heads, 1 if latent else kv_heads
        self._kernels = ops.kernels
        gpu, decodes, prompts = ops.gpu, self._kernels.decodes, self._kernels.prompts
        self._sms = max(1, gpu.sm_count)
        self._read_s = kv_bytes * (decodes.narrow if narrow else 1.0) / ops.read
        rate = gpu.peak_flops("bfloat16") * prompts.compute
        pair, absorbed = 4.0 * width, 0.0
        self._decode_s = heads * 4.0 * width / rate
        self._memory, self._rows, self._power = decodes.memory, 1.0, 0.0
        self._block_us, self._sequence_us = decodes.wave_us, decodes.sequence_us
        self._sequence_us += decodes.row_us * heads
        self._batch_us = self._more_s = self._partial_s = 0.0
        self._shares = 0
        shape = "fp8" if narrow else "bfloat16"
        self._families = (f"decodes-{shape}", f"prompts-{shape}")
        self._shape = (heads, self._kv_heads, width)
        if latent is not None:
            self._families = ("", "")
            pair = 2.0 * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
            flops = 2.0 * heads * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim)
            self._decode_s = flops / rate
            absorbed = 4 * heads * latent.kv_lora_rank / (ops.read * 0.8)
            self._partial_s = 4 * heads * latent.kv_lora_rank / ops.read
            self._take_latent(flops, narrow=narrow)
        self._more_s += absorbed
        self._pair_s = heads * (pair + 4.0 * prompts.softmax) / rate
        self._key_s = prompts.chain * _TILE * (pair + 4.0 * prompts.softmax) / rate * self._sms
        value = latent.v_head_dim if latent else width
        self._token_s = prompts.traffic * 4 * (heads + self._kv_heads) * value / ops.read

    def _take_latent(self, flops: float, *, narrow: bool) -> None:
        gpu, decodes = self._ops.gpu, self._kernels.decodes
        known = known_latent(gpu, decodes.latent)
        if known is None:
            return
        peak, self._memory = gpu.peak_flops("bfloat16") * known.compute, known.memory
        if narrow and known.narrow_compute and gpu.tflops_fp8:
            peak = gpu.tflops_fp8 * 1e12 * known.narrow_compute
            self._memory = known.narrow_memory * decodes.narrow
        self._decode_s = flops / peak
        self._rows = max(1.0, known.tile_rows / self._heads)
        self._sequence_us = known.sequence_us + known.row_us * self._heads
        self._batch_us = known.batch_head_us * self._heads
        self._more_s = known.sequence_tokens * self._decode_s * self._rows
        self._power = known.softness
        self._each_tokens, self._share_tokens = known.sequence_tokens, known.part_tokens
        if known.part_tokens:
            self._more_s = 0.0
            self._shares = max(1, int(self._sms / max(1.0, self._heads / known.tile_rows)))
        self._block_us = 0.0 if known.sequence_tokens else self._block_us

    def decodes(self, sequences: int, seen: int) -> float:
        """One query of each sequence, which read `seen` tokens together; without the launch."""
        each, whole, slope = self._parts(sequences)
        return each + whole + slope * seen

    def verifies(self, sequences: int, queries: int, seen: int) -> float:
        """Several queries of each sequence, whose `seen` tokens are read once for them."""
        start, whole, slope = self._parts(sequences)
        each = max(1.0, queries / sequences)
        tiles = max(1.0, each * self._heads / self._kv_heads / _TILE)
        slope = max(slope, self._decode_s * max(each, self._rows))
        return start * tiles + whole + slope * seen

    def _parts(self, sequences: int) -> tuple[float, float, float]:
        """Times of all sequences, of the batch whatever its queries, of a token that is read."""
        kernel = self._kernels.decodes
        blocks = sequences * self._kv_heads / self._sms
        start = 1e-6 * (self._block_us * blocks + self._sequence_us * sequences / self._sms)
        start += sequences * self._more_s
        whole = 1e-6 * self._batch_us
        slope = self._read_s / self._memory
        if self._ops.gpu.sm_count:
            slope *= 1.0 + kernel.ramp / blocks
        together = self._decode_s * self._rows
        slope = power_mean(slope, together, self._power) if self._power else max(slope, together)
        if shares := self._shares:
            token = together * (together / slope) ** (self._power - 1)
            start += sequences * self._each_tokens * token
            # A sequence's results come from one share more for each border that it lies across.
            cut = 2 * (shares - 1) if sequences >= shares else sequences + shares - 1
            whole += shares * self._share_tokens * token + cut * self._partial_s
        factor = _factor(self._kernels, self._families[0], self._shape, sequences)
        start = start * factor + (factor - 1.0) * 1e-6 * kernel.launch_us
        return start, whole * factor, slope * factor

    def prompts(self, chunks: Sequence[tuple[int, int]], window: int) -> float:
        """Chunks (tokens before, new tokens), which see `window` tokens back (0 = all)."""
        pairs = keys = tiles = longest = 0
        for before, new in chunks:
            ends = range(before + 1, before + new + 1)
            reach = before + new
            if window and reach > window:
                pairs += sum(min(end, window) for end in ends)
                reach = min(reach, window + _TILE)
            else:
                pairs += new * (ends[0] + ends[-1]) // 2
            keys += reach
            tiles += -(-new // _TILE)
            longest = max(longest, reach)
        row_s = 1e-6 * self._kernels.prompts.row_us
        took = pairs * self._pair_s
        if self._ops.gpu.sm_count:
            took += tiles * self._heads / self._sms * row_s
            took = max(took, longest * self._key_s + row_s)
        took = max(took, keys * self._read_s / self._kernels.decodes.memory)
        took += sum(new for _, new in chunks) * self._token_s
        return took * _factor(self._kernels, self._families[1], self._shape, longest)


class Peers:
    """Collectives between GPUs of one machine, as engines run them."""

    def __init__(
        self, gpu: GpuSpec, kernels: Kernels, nvlink_gbps: float, pcie_gbps: float
    ) -> None:
        self._gpu, self._kernels = gpu, kernels
        self._hosts = nvlink_gbps <= 0
        self._rate = (pcie_gbps if self._hosts else nvlink_gbps) * 1e9 / 8
        self._links: Links = kernels.pcie if self._hosts else kernels.nvlink

    def _ring(self, ranks: int, size: int) -> tuple[float, float]:
        """NCCL's fixed time, and its rate."""
        links = self._links
        if not (self._hosts and ranks > 2):
            fixed = links.large_us + links.large_rank_us * (ranks - 2)
            return 1e-6 * fixed, self._rate * links.large_rate
        rate = self._rate * links.large_rate * links.host_rate * (4 / ranks) ** links.host_fade
        return 1e-6 * links.host_rank_us * ranks, rate * (
            links.host_small if size <= 1 << 20 else 1
        )

    def gathered(self, size: int, ranks: int) -> float:
        """Every rank gets the bytes of all others, which have so many each."""
        fixed, rate = self._ring(ranks, size)
        return fixed / 2 + (ranks - 1) * size / rate

    def scattered(self, size: int, ranks: int) -> float:
        """Every rank gets its part of a sum of so many bytes."""
        fixed, rate = self._ring(ranks, size)
        return fixed / 2 + (ranks - 1) / ranks * size / rate

    def summed(self, size: int, ranks: int) -> float:
        """Every rank gets the sum of so many bytes."""
        fixed, rate = self._ring(ranks, size)
        took = fixed + 2 * (ranks - 1) / ranks * size / rate
        if size <= _OWN_KERNEL_BYTES and not (self._hosts and ranks > 2):
            links, shots = self._links, 2
            moved = 2 * (ranks - 1) / ranks * size
            if size <= _ONE_SHOT_BYTES.get(ranks, 256 << 10):
                shots, moved = 1, (ranks - 1) * size
            small = 1e-6 * (links.small_us + links.small_rank_us * (ranks - 2) * shots)
            took = min(took, small + moved / (self._rate * links.small_rate))
        took *= _factor(self._kernels, "all-reduce", (ranks,), size)
        is_beyond = ranks > _BOARD_RANKS.get(self._gpu.kind, ranks)
        return took + (6.5e-6 if is_beyond and size <= _OWN_KERNEL_BYTES else 0.0)
