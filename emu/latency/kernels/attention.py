"""Attention over context: decodes as a straight line, prompts by query-key pairs.

Decodes of a batch: one block for each sequence and KV head, dealt to the processors. Blocks cost
time of their own, as do a sequence's tables and its heads' queries; KV is read at a part of the
memory's rate, less where few blocks run. The cost of a layer is a line in the summed context,
whose coefficients depend on the number of sequences only; hence a leap over many steps can be
computed exactly.

Latent attention has one KV head of a large width; its arithmetic in the latent space may take
longer than reading.

Prompts: a tile of 128 queries of one head walks over its keys. What counts is the sum over all
tiles, or the longest tile where tiles are fewer than processors.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.latency.coefficients import Decodes, Prompts
from emu.latency.kernels.factors import Factors
from emu.latency.kernels.products import soft_max
from emu.units import ceil_div

_ELEMENT_MEMORY: Final = 0.8
"""Part of the memory's rate at which rows are read and written."""
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
        factors: Factors | None = None,
    ) -> None:
        """`factors`: measured over formula, where the engine's kernels were measured."""
        self.decodes, self.prompts = decodes, prompts
        self._launch_s = decodes.launch_us * 1e-6
        kind = "fp8" if sizes.weight_bytes(1, kv_dtype) == 1 else "bfloat16"
        family, decode_family = f"prompts-{kind}", f"decodes-{kind}"
        self._processors = gpu.sm_count or 1
        self._is_tiled = gpu.sm_count > 0
        self._rows = 1.0
        """Query rows that are computed for one that is there."""
        heads = self._heads = ceil_div(spec.heads, tp)
        kv_bytes = sizes.kv_bytes_per_token_layer(spec, kv_dtype, tp)
        self._kv_ideal_s = kv_bytes / (gpu.memory_gbytes_per_s * 1e9)
        if sizes.weight_bytes(1, kv_dtype) == 1:
            self._kv_ideal_s *= decodes.narrow
        mla = spec.latent
        # One query against one key, and the value weighted: FLOPs of one head.
        head_flops = decode_flops = 4.0 * spec.head_dim
        self._kv_heads = sizes.kv_heads_per_rank(spec, tp)
        shape = (heads, self._kv_heads, spec.head_dim)
        if mla is not None:
            family = decode_family = ""  # measured as whole modules only
            head_flops = 2.0 * (mla.qk_head_dim + mla.v_head_dim)
            decode_flops = 2.0 * (mla.kv_width + mla.kv_lora_rank)  # in the latent space
            self._kv_heads = 1
        factors = factors or Factors(None)
        self._factor = factors.line(family, shape)
        self._decode_factor = factors.line(decode_family, shape)
        moved = 2 * 2 * (heads + self._kv_heads) * (mla.v_head_dim if mla else spec.head_dim)
        self._token_s = prompts.traffic * moved / (gpu.memory_gbytes_per_s * 1e9)
        head_flops += 4.0 * prompts.softmax
        rate = gpu.peak_flops("bfloat16") * prompts.compute
        self._arithmetic_s = heads * decode_flops / rate
        self._memory, self._row_us = decodes.memory, decodes.row_us
        self._sequence_us, self._wave_us = decodes.sequence_us, decodes.wave_us
        self._batch_us = self._sequence_s = self._softness = self._dealing_s = 0.0
        self._dealt = 0
        """Shares of a batch that processors are dealt; 0 = none."""
        self.absorbed_s = 0.0
        """Of a sequence, beside the kernel."""
        if mla is not None:
            # Queries go into the latent space and outputs out of it by products of their own:
            # what they write and read there moves beside the kernel.
            absorbed = 2 * 2 * heads * mla.kv_lora_rank
            self.absorbed_s = absorbed / (gpu.memory_gbytes_per_s * 1e9 * _ELEMENT_MEMORY)
            self._take_latent(gpu, kind, heads * decode_flops)
        self._pair_s = heads * head_flops / rate
        self._tile_key_s = prompts.chain * QUERY_TILE * head_flops / rate * self._processors

    def _take_latent(self, gpu: GpuSpec, kind: str, flops: float) -> None:
        """What kernels of latent attention reach; `flops`: of a query against a key, all heads."""
        from emu.latency.kernels.latent import known_latent  # few models have it

        known = known_latent(gpu, self.decodes.latent)
        if known is None:
            return
        compute, memory = gpu.peak_flops("bfloat16") * known.compute, known.memory
        if kind == "fp8" and known.narrow_compute and gpu.tflops_fp8:
            compute = gpu.tflops_fp8 * 1e12 * known.narrow_compute
            memory = known.narrow_memory * self.decodes.narrow  # its bytes count that often
        self._arithmetic_s = flops / compute
        self._rows = max(1.0, known.tile_rows / self._heads)
        self._memory, self._row_us = memory, known.row_us
        self._sequence_us = known.sequence_us
        self._batch_us = known.batch_head_us * self._heads
        self._sequence_s = known.sequence_tokens * self._arithmetic_s * self._rows
        self._softness = known.softness
        if known.sequence_tokens:
            self._wave_us = 0.0  # in that
        if known.part_tokens:
            rows = self._heads * self._rows
            self._dealt = max(1, int(self._processors * known.tile_rows / rows))
            self._dealing_s = known.part_tokens * self._arithmetic_s * self._rows * self._dealt

    def decode_line(self, count: int) -> Line:
        """Costs of a batch of so many sequences, without the launch."""
        kernel = self.decodes
        sequences = max(1, count) / self._processors
        waves = sequences * self._kv_heads
        rows_us = self._row_us * self._heads
        start = 1e-6 * (self._wave_us * waves + (self._sequence_us + rows_us) * sequences)
        start += count * self.absorbed_s
        slope = self._kv_ideal_s / self._memory
        if self._is_tiled:
            slope *= 1.0 + kernel.ramp / waves
        slope = self._longer_s(slope, self._arithmetic_s * self._rows)
        start += count * self._sequence_s * self._shown(slope) + self._batch_s(count, slope)
        factor = self._decode_factor.at(count)
        # The launch was measured with the rest, and is counted elsewhere.
        return Line(start * factor + (factor - 1.0) * self._launch_s, slope * factor)

    def _shown(self, slope: float) -> float:
        """The part of time that is added to arithmetic which a batch takes longer for."""
        if not self._dealt:
            return 1.0
        return math.pow(self._arithmetic_s * self._rows / slope, self._softness - 1.0)

    def _batch_s(self, count: int, slope: float) -> float:
        """What a batch takes whatever its sequences compute: processors fill and empty, and add up
        what several of them have computed of one sequence, which is no more for more queries.

        Every border between two shares cuts a sequence, whose results are read as sums in 32 bits:
        as many bytes as its queries and outputs are in the latent space.
        """
        if not self._dealt:
            return 1e-6 * self._batch_us
        partials = 2 * (self._dealt - 1) if count >= self._dealt else self._dealt + count - 1
        added_s = partials * self.absorbed_s * _ELEMENT_MEMORY
        return self._dealing_s * self._shown(slope) + added_s

    def _longer_s(self, reading_s: float, arithmetic_s: float) -> float:
        """Time of a token of context, where both go on at once."""
        if self._softness:
            return soft_max(reading_s, arithmetic_s, self._softness)
        return max(reading_s, arithmetic_s)

    def whole_s(self, count: int, context: int) -> float:
        """Seconds of a layer for so many sequences with the launch; `context`: tokens of each."""
        line = self.decode_line(count)
        return self._launch_s + line.start + line.slope * max(1, count) * context

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
        rows = max(mean, self._rows)
        batch_s = self._batch_s(count, line.slope)
        start = (line.start - batch_s) * tiles + batch_s
        return Line(start, max(line.slope, self._arithmetic_s * rows))

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
        seconds = (memory_s if memory_s > seconds else seconds) + tokens * self._token_s
        return seconds * self._factor.at(longest)


def window_pairs(new: int, context: int, window: int) -> int:
    """Sum over i = 1..new of min(context + i, window)."""
    growing = max(0, min(new, window - context))
    return growing * context + growing * (growing + 1) // 2 + (new - growing) * window
