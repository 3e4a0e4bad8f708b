"""What single GPU operations cost under a roofline, in seconds.

Owns the formulas of the kernel families (products, routed experts, collectives inside a machine,
attention over context), and `Ops`, which puts a GPU's peaks and its architecture's coefficients
into them. `roofline.py` composes a model's layers of these operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from emu.catalogue import sizes
from emu.catalogue.lookup import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.latency.coefficients import Decodes, Experts, Kernels, Links, Products, Prompts
from emu.units import NS_PER_S, ceil_div, gbps_to_bytes_per_s

if TYPE_CHECKING:
    from emu.latency.moe_gate import Gate


# --------------------------------------------------------------------------------------------------
# Dense products and element-wise kernels.
#
# A product takes the longer of its memory traffic and its arithmetic, softly (loads and products of
# a kernel get into each other's way where both are near), plus launch. Arithmetic comes in whole
# tiles of the output, dealt to the processors in whole waves; a small tile reuses less of what it
# loads, and each tile fills and drains its pipeline. The best of some tile shapes counts, as
# libraries choose it, with the inner dimension cut where the grid is short (split-K).


# Rows and columns of the tiles that CUTLASS and cuBLAS choose among.
_TILES: Final = ((128, 256), (256, 128), (128, 128), (64, 128), (64, 64), (16, 64))
TILE_STEP: Final = 16
"""Rows of all tiles are multiples of this: the time of a product changes with every 16th row."""
_SPLITS: Final = (1, 2, 4)


def soft_max(first_s: float, second_s: float, softness: float) -> float:
    """Mean of a power: near the larger where they differ, above both where they are equal.

    `softness` is the power's exponent.
    """
    large, small = (first_s, second_s) if first_s > second_s else (second_s, first_s)
    if not large:
        return 0.0
    return large * math.pow(1.0 + math.pow(small / large, softness), 1.0 / softness)


def arithmetic_s(
    kernel: Products, peak: float, processors: int, rows: int, columns: int, inner: int
) -> float:
    """Arithmetic of rows x inner times inner x columns: whole waves of whole tiles.

    `peak` is in FLOP/s.
    """
    if processors <= 1:
        return 2.0 * rows * columns * inner / (peak * kernel.compute)
    rate = peak / processors * kernel.compute
    best = math.inf
    for tile_rows, tile_columns in _TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        reach = tile_rows * tile_columns / (tile_rows + tile_columns)
        element_s = 2.0 * tile_rows * tile_columns * (1.0 + kernel.reuse / reach) / rate
        for split in _SPLITS:
            waves = -(-tiles * split // processors)
            tile_s = waves * (inner / split + kernel.prologue) * element_s
            if tile_s < best:
                best = tile_s
            if tiles >= processors:
                break  # the grid is full as it is
    return best


# --------------------------------------------------------------------------------------------------
# Grouped products of routed experts.
#
# Tokens are sorted by expert and each expert's count is padded to a block of rows, which is small
# where tokens are few. The weights of every expert that is met are read once.


_LEAST_ROWS: Final = 16
"""Rows of a matrix instruction."""
_POPULARITY: Final = 16.0
"""How much more often the most popular expert is chosen than the least. The measured tables draw
loads up to a few hundred times apart, large batches more; published routers less."""
_CLASSES: Final = 8


def _shares() -> tuple[float, ...]:
    """Popularity of classes of experts, in units of the mean."""
    drawn = [_POPULARITY ** ((at + 0.5) / _CLASSES) for at in range(_CLASSES)]
    return tuple(share * _CLASSES / sum(drawn) for share in drawn)


_SHARES: Final = _shares()


def met_experts(tokens: float, count: int, per_token: int) -> float:
    """Experts that at least one of so many tokens chooses.

    No router is even: popularity is spread over `_POPULARITY`, evenly in the logarithm.
    """
    if per_token >= count:
        return float(count)
    met = 0.0
    for share in _SHARES:
        chance = per_token / count * share
        met += 1.0 if chance >= 1.0 else -math.expm1(tokens * math.log1p(-chance))
    return max(1.0, count * met / len(_SHARES))


def padded_rows(counts: Sequence[float], block: float) -> float:
    """Rows that are computed when each expert's are padded."""
    return sum(math.ceil(count / block) * block for count in counts if count > 0)


def even_padded_rows(rows: float, met: float, block: float) -> float:
    """The same for rows that fall evenly on the experts that are met.

    Counts scatter about the mean, so that an expert's last block is half full on average.
    """
    mean = rows / met
    if mean <= 1.0:
        return met * block
    return met * max(block, mean + 0.5 * block)


def block_rows(kernel: Experts, rows: float, experts: int) -> float:
    """The block that is chosen for a mean number of rows of each expert."""
    mean = rows / experts
    return min(kernel.block, max(_LEAST_ROWS, 2.0 ** math.ceil(math.log2(max(1.0, mean)))))


def grouped_s(
    kernel: Experts,
    *,
    met: float,
    rows: float,
    padded: float,
    params: int,
    weight_bytes: int,
    row_bytes: float,
    peak: float,
    memory_rate: float,
) -> float:
    """All experts of one layer on one rank.

    `met` experts of `params` weights (`weight_bytes`) each read; `rows` routed rows of
    `row_bytes` move, `padded` are computed.
    `peak` is in FLOP/s.
    """
    compute_s = 2.0 * padded * params / (peak * kernel.compute)
    traffic = (met + kernel.few) * weight_bytes + rows * row_bytes * kernel.row
    memory_s = traffic / (memory_rate * kernel.memory)
    return soft_max(memory_s, compute_s, kernel.softness) + kernel.launch_us * 1e-6


# --------------------------------------------------------------------------------------------------
# Collectives inside a machine, as engines run them.
#
# A small all-reduce is one kernel that reads the peers' memory: at once (every rank reads all) or
# in two shots (reduce-scatter and all-gather in one kernel). A large one is NCCL's. Between more
# than two GPUs on PCIe, peers are not reached directly: everything goes through the host, whose
# links all ranks share.


_ONE_SHOT_BYTES: Final = {2: 1 << 62, 4: 512 << 10, 8: 256 << 10}
_HOST_SMALL_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 8 << 20
"""Limit of the engine's own kernel."""


def collective_s(
    links: Links, *, kind: str, size_bytes: int, ranks: int, bytes_per_s: float, is_pcie: bool
) -> float:
    """One collective; sizes as in `ops.CollectiveNs`. `bytes_per_s` is the link's rate."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks
    extra = ranks - 2
    if is_pcie and ranks > 2:
        rate = bytes_per_s * links.large_rate * links.host_rate
        rate *= (4.0 / ranks) ** links.host_fade
        if size_bytes <= _HOST_SMALL_BYTES:
            rate *= links.host_small
        fixed_us = links.host_rank_us * ranks
    else:
        rate = bytes_per_s * links.large_rate
        fixed_us = links.large_us + links.large_rank_us * extra
    if kind == "all-gather":
        return 0.5e-6 * fixed_us + share * ranks * size_bytes / rate
    if kind == "reduce-scatter":
        return 0.5e-6 * fixed_us + share * size_bytes / rate
    assert kind == "all-reduce"
    large_s = fixed_us * 1e-6 + 2.0 * share * size_bytes / rate
    if size_bytes > _SMALL_BYTES or (is_pcie and ranks > 2):
        return large_s
    limit = _ONE_SHOT_BYTES[2 if ranks == 2 else 4 if ranks <= 4 else 8]
    shots = 1 if size_bytes <= limit else 2
    moved = (ranks - 1) * size_bytes if shots == 1 else 2.0 * share * size_bytes
    fixed_us = links.small_us + links.small_rank_us * extra * shots
    return min(large_s, fixed_us * 1e-6 + moved / (bytes_per_s * links.small_rate))


# --------------------------------------------------------------------------------------------------
# Attention over context: decodes as a straight line, prompts by query-key pairs.
#
# Decodes of a batch: one block for each sequence and KV head, dealt to the processors. Blocks cost
# time of their own, as do a sequence's tables and its heads' queries; KV is read at a part of the
# memory's rate, less where few blocks run. The cost of a layer is a line in the summed context,
# whose coefficients depend on the number of sequences only; hence a leap over many steps can be
# computed exactly.
#
# Latent attention has one KV head of a large width; its arithmetic in the latent space may take
# longer than reading.
#
# Prompts: a tile of 128 queries of one head walks over its keys. What counts is the sum over all
# tiles, or the longest tile where tiles are fewer than processors.


QUERY_TILE = 128
"""Query rows that one processor keeps (flash attention over paged KV)."""


class Line(NamedTuple):
    """A layer's decode attention in seconds: start + slope x summed context."""

    start: float
    slope: float


class AttentionCost:
    """Attention of one layer of a model on one of `tp` ranks."""

    def __init__(
        self,
        spec: ModelSpec,
        gpu: GpuSpec,
        decodes: Decodes,
        prompts: Prompts,
        tp: int,
        kv_dtype: str,
    ) -> None:
        self.decodes = decodes
        self.prompts = prompts
        self._processors = gpu.sm_count or 1
        self._is_tiled = gpu.sm_count > 0
        heads = ceil_div(spec.heads, tp)
        self._heads = heads
        peak = gpu.peak_flops("bfloat16")
        kv_bytes = sizes.kv_bytes_per_token_layer(spec, kv_dtype, tp)
        self._kv_ideal_s = kv_bytes / (gpu.memory_gbytes_per_s * 1e9)
        if sizes.weight_bytes(1, kv_dtype) == 1:
            self._kv_ideal_s *= decodes.narrow
        mla = spec.latent
        # One query against one key, and the value weighted: FLOPs of one head.
        head_flops = decode_flops = 4.0 * spec.head_dim
        self._kv_heads = sizes.kv_heads_per_rank(spec, tp)
        if mla is not None:
            head_flops = 2.0 * (mla.qk_head_dim + mla.v_head_dim)
            decode_flops = 2.0 * (mla.kv_width + mla.kv_lora_rank)  # in the latent space
            self._kv_heads = 1
        moved = 2 * 2 * (heads + self._kv_heads) * (mla.v_head_dim if mla else spec.head_dim)
        self._token_s = prompts.traffic * moved / (gpu.memory_gbytes_per_s * 1e9)
        head_flops += 4.0 * prompts.softmax
        rate = peak * prompts.compute
        self._arithmetic_s = heads * decode_flops / rate
        self._pair_s = heads * head_flops / rate
        self._tile_key_s = prompts.chain * QUERY_TILE * head_flops / rate * self._processors

    def decode_line(self, count: int) -> Line:
        """Costs of a batch of so many sequences, without the launch."""
        kernel = self.decodes
        sequences = max(1, count) / self._processors
        waves = sequences * self._kv_heads
        rows_us = kernel.row_us * self._heads
        start = 1e-6 * (kernel.wave_us * waves + (kernel.sequence_us + rows_us) * sequences)
        slope = self._kv_ideal_s / kernel.memory
        if self._is_tiled:
            slope *= 1.0 + kernel.ramp / waves
        return Line(start, max(slope, self._arithmetic_s))

    def verify_line(self, count: int, queries: int) -> Line:
        """Costs of sequences of several new tokens, `queries` in all: KV is read once for them.

        A block holds the query heads of a KV head for all new tokens of a sequence, as long as
        they fit into a tile; arithmetic grows with the queries.
        """
        if not count:
            return Line(0.0, 0.0)
        line = self.decode_line(count)
        mean = max(1.0, queries / count)
        tiles = max(1.0, mean * self._heads / self._kv_heads / QUERY_TILE)
        return Line(line.start * tiles, max(line.slope, self._arithmetic_s * mean))

    def prompt_s(self, prefill_new: list[int], prefill_context: list[int], window: int) -> float:
        """Seconds for the chunks of a batch, without the launch.

        `window` counts tokens; 0 = the whole context.
        """
        pairs = keys = longest = tiles = tokens = 0
        for at, new in enumerate(prefill_new):
            context = prefill_context[at]
            reach = new + context
            if window and reach > window:
                pairs += window_pairs(new, context, window)
                reach = min(reach, window + QUERY_TILE)
            else:
                pairs += new * context + new * (new + 1) // 2
            keys += reach
            tokens += new
            tiles += -(-new // QUERY_TILE)
            if reach > longest:
                longest = reach
        row_s = self.prompts.row_us * 1e-6
        seconds = pairs * self._pair_s
        if self._is_tiled:
            seconds += tiles * self._heads / self._processors * row_s
            tile_s = longest * self._tile_key_s + row_s
            if tile_s > seconds:
                seconds = tile_s
        memory_s = keys * self._kv_ideal_s / self.decodes.memory
        return (memory_s if memory_s > seconds else seconds) + tokens * self._token_s


def window_pairs(new: int, context: int, window: int) -> int:
    """Sum over i = 1..new of min(context + i, window)."""
    growing = max(0, min(new, window - context))
    return growing * context + growing * (growing + 1) // 2 + (new - growing) * window


# --------------------------------------------------------------------------------------------------
# Operations of one GPU. What does not depend on the number of rows is computed once for each
# matrix and kept.


CollectiveNs = Callable[[str, int, int], int]
"""(kind, bytes, ranks) -> ns. Kinds: all-reduce (bytes of the whole vector), all-gather (bytes
that one rank contributes), reduce-scatter (bytes of the whole vector), send (one message)."""

_SAMPLER_KERNELS: Final = 10
_NVLINK_STEP_NS: Final = 1_000
_PCIE_STEP_NS: Final = 4_000


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
