"""The roofline backend: iteration cost of any model on any GPU, from published figures alone.

Owns the composition of an iteration from operations. What depends on the number of tokens (or
of logit rows) only is computed once for each number and kept; attention over context is a closed
formula. An iteration costs a few look-ups.

Attention of decodes is affine in the summed context: KV bytes (or, for latent attention, the
arithmetic if that is longer) at a fixed rate. The coefficient is a binary fixed-point number and
all arithmetic is on integers, hence a leap over many steps equals stepping bit for bit. In
sliding-window layers the sum over members of min(context, window) is bounded by min(summed
context, members x window), which is exact unless the batch has members on both sides.

Attention of prompt chunks counts query-key pairs under the causal mask (and the window); a chunk
that is too short to fill the GPU takes as long as its longest tile.

Not modelled: imbalance between experts, overlap of collectives with computation, re-expansion of
cached latent KV in later chunks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.latency.base import BatchShape
from emu.latency.engine_steps import EngineSteps
from emu.latency.host import FIRST_USE_NS
from emu.latency.roofline.layers import HeadCost, LayerCosts, Part, TokenCost
from emu.latency.roofline.ops import CollectiveNs, Efficiency, Ops, default_collective
from emu.units import NS_PER_S, ceil_div

_SHIFT: Final = 20
_COEFFICIENT_BITS: Final = 26
_right_shift: Final = np.right_shift
_accumulate: Final = np.add.accumulate
_QUERY_TILE: Final = 64
"""Query rows that one processor keeps (flash attention over paged KV)."""


class RooflineBackend:
    """Implements `LatencyBackend` for one kind of replica."""

    name = "roofline"
    foreign = False
    monotone_decode = True
    """No step of a decode run is shorter than the one before it."""

    def __init__(
        self,
        spec: ModelSpec,
        gpu: GpuSpec,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 0,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        efficiency: Efficiency | None = None,
        engine: EngineSteps | None = None,
        is_warm: bool = True,
        collective_ns: CollectiveNs | None = None,
        round_tokens_to: int = 1,
    ) -> None:
        """`ep` 0 = `tp`; above `tp` = ranks of the data-parallel group that share the experts.

        `collective_ns` answers (kind, bytes, ranks), see `roofline_ops`; None = rings over the
        GPU's own links. `engine`: what happens between kernels; None = nothing. `is_warm`: the
        process has used its kernels before it serves.
        """
        self.spec = spec
        self.efficiency = efficiency or Efficiency()
        self.engine = engine
        self.first_use_ns = () if engine is None or is_warm else FIRST_USE_NS
        self.round_tokens_to = round_tokens_to
        plain = sizes.activation_dtype(spec, dtype)
        ops = Ops(gpu, self.efficiency, sizes.weight_bytes(1, plain))
        collective_ns = collective_ns or default_collective(gpu, self.efficiency)
        self.costs = LayerCosts(spec, ops, collective_ns, tp, ep or tp, dtype)
        self.stage_ranges = sizes.stage_layers(spec, pp)
        self.parts = tuple(self._part(0, spec.layers, index) for index in range(pp))
        self._tokens: dict[int, tuple[tuple[TokenCost, int], ...]] = {}
        # The same for batches that run a part of the layers: (start, count), and with tokens.
        self._cut_parts: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._cut_tokens: dict[tuple[int, int, int], tuple[tuple[TokenCost, int], ...]] = {}
        self._heads: dict[int, tuple[HeadCost, int]] = {}
        # A pass over all layers on one stage: what tokens cost, and what rows of logits do
        # (with the engine's part of a step).
        self._is_one_stage = len(self.parts) == 1
        self._slope = 0
        """Of one stage without windows: what a token of context costs, in fixed point."""
        self._of_tokens: dict[int, int] = {}
        self._of_rows: dict[int, int] = {}
        self._set_attention(gpu, tp, sizes.kv_dtype(spec, dtype, kv_cache_dtype))

    def _set_attention(self, gpu: GpuSpec, tp: int, kv_dtype: str) -> None:
        spec, eff = self.spec, self.efficiency
        heads = ceil_div(spec.heads, tp)
        kv_bytes = sizes.kv_bytes_per_token_layer(spec, kv_dtype, tp)
        self._kv_s = kv_bytes / (gpu.memory_gbytes_per_s * 1e9 * eff.kv_memory)
        rate = gpu.peak_flops("bfloat16") * eff.attention_compute
        mla = spec.latent
        # One query against one key, and the value weighted: FLOPs of one head.
        head_flops = 4.0 * spec.head_dim
        decode_flops = head_flops
        if mla is not None:
            head_flops = 2.0 * (mla.qk_head_dim + mla.v_head_dim)
            decode_flops = 2.0 * (mla.kv_width + mla.kv_lora_rank)  # in the latent space
        self._pair_s = heads * head_flops / rate
        self._tile_pair_s = head_flops / rate * (gpu.sm_count or 1)
        self._is_tiled = gpu.sm_count > 0
        context_s = max(self._kv_s, heads * decode_flops / rate)
        # A slow custom GPU gets fewer fraction bits, so that products stay within 64 bits.
        bits = int(context_s * NS_PER_S).bit_length()
        self._shift = max(0, min(_SHIFT, _COEFFICIENT_BITS - bits))
        self._context_fixed = round(context_s * NS_PER_S * (1 << self._shift))
        if self._is_one_stage and not self.parts[0].window:
            self._slope = self.parts[0].full * self._context_fixed
        self._shift_array = np.array(self._shift)  # numpy converts a plain integer at each call

    def _part(self, start: int, end: int, stage: int) -> Part:
        spec = self.spec
        own = self.stage_ranges[stage]
        layers = range(max(start, own.start), min(end, own.stop))
        moe = sum(spec.is_moe_layer(index) for index in layers)
        window = sum(spec.is_window_layer(index) for index in layers)
        count = len(layers)
        is_last = stage == len(self.stage_ranges) - 1
        return Part(
            dense=count - moe,
            moe=moe,
            full=count - window,
            window=window,
            has_embedding=stage == 0 and start == 0,
            has_head=is_last and end == spec.layers,
            sends=not is_last and end > own.stop > start,
        )

    # --- what depends on tokens or rows only ----------------------------------------------------

    def _terms(self, tokens: int, part: Part) -> list[tuple[int, TokenCost]]:
        """What T tokens cost on a stage: how often, and what."""
        costs = self.costs
        terms = []
        if part.dense:
            terms.append((part.dense, costs.layer(tokens, False)))
        if part.moe:
            terms.append((part.moe, costs.layer(tokens, True)))
        if part.has_embedding:
            terms.append((1, costs.embedding(tokens)))
        if part.has_head:
            terms.append((1, costs.final_norm(tokens)))
        if part.sends:
            terms.append((1, costs.send(tokens)))
        return terms

    def _token_cost(self, tokens: int, part: Part) -> tuple[TokenCost, int]:
        cost = TokenCost()
        for times, term in self._terms(tokens, part):
            cost = cost.plus(term, times)
        return cost, sum(cost)

    def _token_ns(self, tokens: int) -> int:
        """The sum of `_token_cost` on the one stage, without its components."""
        known = self._tokens.get(tokens)
        if known is not None:
            return known[0][1]
        return sum(times * sum(cost) for times, cost in self._terms(tokens, self.parts[0]))

    def _tokens_of(self, shape: BatchShape) -> int:
        """Tokens that all products of an iteration are computed for."""
        tokens = max(1, sum(shape.prefill_new) + shape.decode_count, shape.padded_tokens)
        if self.engine is not None:
            tokens = self.engine.tokens(tokens)
        step = self.round_tokens_to
        return ceil_div(tokens, step) * step if step > 1 else tokens

    def _token_costs(self, shape: BatchShape) -> tuple[tuple[TokenCost, int], ...]:
        tokens = self._tokens_of(shape)
        if shape.layers >= 0 or shape.start_layer:
            key = (tokens, shape.start_layer, shape.layers)
            cut = self._cut_tokens.get(key)
            if cut is None:
                cut = tuple(self._token_cost(tokens, part) for part in self._parts(shape))
                self._cut_tokens[key] = cut
            return cut
        found = self._tokens.get(tokens)
        if found is None:
            found = tuple(self._token_cost(tokens, part) for part in self.parts)
            self._tokens[tokens] = found
        return found

    def _parts(self, shape: BatchShape) -> tuple[Part, ...]:
        if shape.layers < 0 and not shape.start_layer:
            return self.parts
        start = shape.start_layer
        found = self._cut_parts.get((start, shape.layers))
        if found is None:
            end = self.spec.layers if shape.layers < 0 else start + shape.layers
            found = tuple(self._part(start, end, index) for index in range(len(self.parts)))
            self._cut_parts[start, shape.layers] = found
        return found

    def _head(self, rows: int) -> tuple[HeadCost, int]:
        found = self._heads.get(rows)
        if found is None:
            cost = self.costs.head(max(1, rows))
            if self.engine is not None:
                cost = cost._replace(sampler=self.engine.sampler.gpu_ns(max(1, rows)))
            found = self._heads[rows] = (cost, sum(cost))
        return found

    # --- attention over context -----------------------------------------------------------------

    def _decode_attention_ns(self, shape: BatchShape, part: Part) -> int:
        count = shape.decode_count
        seen = shape.decode_context_sum + count
        keys = part.full * seen
        if part.window:
            keys += part.window * min(seen, count * self.spec.window)
        return keys * self._context_fixed >> self._shift

    def _prefill_attention_ns(self, shape: BatchShape, part: Part) -> int:
        seconds = 0.0
        if part.full:
            seconds += part.full * self._prefill_layer_s(shape, 0)
        if part.window:
            seconds += part.window * self._prefill_layer_s(shape, self.spec.window)
        return round(seconds * NS_PER_S)

    def _prefill_layer_s(self, shape: BatchShape, window: int) -> float:
        pairs = keys = longest = 0
        for at, new in enumerate(shape.prefill_new):
            context = shape.prefill_context[at]
            reach = new + context
            if window and reach > window:
                pairs += _window_pairs(new, context, window)
                reach = min(reach, window + _QUERY_TILE)
            else:
                pairs += new * context + new * (new + 1) // 2
            keys += reach
            if reach > longest:
                longest = reach
        seconds = pairs * self._pair_s
        memory_s = keys * self._kv_s
        if memory_s > seconds:
            seconds = memory_s
        if self._is_tiled:
            tile_s = longest * _QUERY_TILE * self._tile_pair_s
            if tile_s > seconds:
                seconds = tile_s
        return seconds

    @staticmethod
    def _is_cut(shape: BatchShape) -> bool:
        """A part of the layers runs."""
        return shape.layers >= 0 or bool(shape.start_layer)

    def _layer_count(self, shape: BatchShape) -> int:
        left = self.spec.layers - shape.start_layer
        return min(shape.layers, left) if shape.layers >= 0 else left

    # --- the protocol ---------------------------------------------------------------------------

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage; host time is counted on the first, the head on the last."""
        stages = []
        parts = self._parts(shape)
        engine = self.engine
        for part, (_, total) in zip(parts, self._token_costs(shape), strict=True):
            if shape.decode_count:
                total += self._decode_attention_ns(shape, part)
            if shape.prefill_new:
                total += self._prefill_attention_ns(shape, part)
            if part.has_head:
                total += self._head(shape.sequences)[1]
            stages.append(total)
        if engine is not None:
            stages[0] += engine.step_ns(self._layer_count(shape))
            if not self._is_cut(shape):
                least_ns, exposed_ns = engine.host_bounds_ns(shape)
                stages[0] = max(stages[0], least_ns)
                stages[-1] += exposed_ns
        stages[-1] = max(stages[-1], 1)
        return tuple(stages)

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration over all stages."""
        if not self._is_one_stage or self._is_cut(shape):
            return sum(self.stage_ns(shape))
        total = self._fixed_ns(shape)
        count = shape.decode_count
        if self._slope:
            total += self._slope * (shape.decode_context_sum + count) >> self._shift
        elif count:
            total += self._decode_attention_ns(shape, self.parts[0])
        if shape.prefill_new:
            total += self._prefill_attention_ns(shape, self.parts[0])
        if self.engine is not None:
            least_ns, exposed_ns = self.engine.host_bounds_ns(shape)
            total = (total if total > least_ns else least_ns) + exposed_ns
        return total if total > 0 else 1

    def _fixed_ns(self, shape: BatchShape) -> int:
        """GPU time of an iteration on one stage that does not depend on context."""
        prompts = shape.prefill_new
        tokens = shape.decode_count
        if prompts:
            tokens += sum(prompts)
        if shape.padded_tokens > tokens:
            tokens = shape.padded_tokens
        by_rows = self._of_rows
        try:
            return self._of_tokens[tokens] + by_rows[shape.sequences]
        except KeyError:
            self._of_tokens[tokens] = self._token_ns(self._tokens_of(shape))
            rows_ns = self._head(shape.sequences)[1]
            if self.engine is not None:
                rows_ns += self.engine.step_ns(self.spec.layers)
            by_rows[shape.sequences] = rows_ns
        return self._of_tokens[tokens] + by_rows[shape.sequences]

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        costs = self._decode_costs_ns(shape, steps)
        ends: NDArray[np.int64] = _accumulate(costs)
        return ends

    def decode_run_ns_after(
        self, shape: BatchShape, steps: int, first_ns: int
    ) -> NDArray[np.int64]:
        """The same after an iteration of `first_ns`, whose end is the first element."""
        costs = self._decode_costs_ns(shape, steps, 1)
        costs[0] = first_ns
        ends: NDArray[np.int64] = _accumulate(costs)
        return ends

    def _decode_costs_ns(self, shape: BatchShape, steps: int, before: int = 0) -> NDArray[np.int64]:
        """Of successive decode iterations, behind room for those `before` them."""
        slope = self._slope
        if slope and shape.layers < 0 and not shape.start_layer:
            base = self._fixed_ns(shape)
            if base > 0:
                # An arithmetic series in fixed point, each term rounded down, then summed.
                growth = slope * shape.decode_count
                start = slope * shape.decode_context_sum + growth + (base << self._shift)
                end = start + growth * steps
                costs = np.arange(start - growth * before, end, growth, dtype=np.int64)
                _right_shift(costs, self._shift_array, costs)
                if self.engine is not None:
                    least_ns, exposed_ns = self.engine.host_bounds_ns(shape)
                    if costs.item(before) < least_ns:  # the others are longer than the first
                        np.maximum(costs, least_ns, out=costs)
                    if exposed_ns:
                        costs += exposed_ns
                return costs
        costs = self._added_costs_ns(shape, steps)
        return np.concatenate((np.zeros(before, dtype=np.int64), costs))

    def _added_costs_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same, stage by stage and window by window."""
        count, window = shape.decode_count, self.spec.window
        first = shape.decode_context_sum + count
        parts = self._parts(shape)
        engine = self.engine
        least_ns = exposed_ns = 0
        if engine is not None and not self._is_cut(shape):
            least_ns, exposed_ns = engine.host_bounds_ns(shape)
        ramp = np.arange(steps, dtype=np.int64)
        costs = np.zeros(steps, dtype=np.int64)
        is_whole = self._is_one_stage and parts is self.parts
        for index, (part, (_, base)) in enumerate(
            zip(parts, self._token_costs(shape), strict=True)
        ):
            if is_whole:
                base = self._fixed_ns(shape)
            else:
                base += self._head(shape.sequences)[1] if part.has_head else 0
                if index == 0 and engine is not None:
                    base += engine.step_ns(self._layer_count(shape))
            if part.window and first + (steps - 1) * count > count * window:
                seen = ramp * count + first
                keys = part.full * seen + part.window * np.minimum(seen, count * window)
                stage = keys * self._context_fixed
            else:
                slope = (part.full + part.window) * self._context_fixed
                stage = ramp * (slope * count)
                stage += slope * first
            stage >>= self._shift
            stage += base
            if index == 0 and least_ns:
                np.maximum(stage, least_ns, out=stage)
            if index == len(parts) - 1:
                stage += exposed_ns
                np.maximum(stage, 1, out=stage)
            costs += stage
        return costs

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The duration split by component."""
        total = TokenCost()
        prefill = decode = 0
        parts = self._parts(shape)
        for part, (cost, _) in zip(parts, self._token_costs(shape), strict=True):
            total = total.plus(cost)
            decode += self._decode_attention_ns(shape, part) if shape.decode_count else 0
            prefill += self._prefill_attention_ns(shape, part) if shape.prefill_new else 0
        head = HeadCost(0, 0, 0)
        if parts[-1].has_head:
            head = self._head(shape.sequences)[0]
        if shape.prefill_new:  # one call serves both; its fixed part is counted once
            prefill += total.attention_fixed
        else:
            decode += total.attention_fixed
        found = {
            "attention_prefill": prefill,
            "attention_decode": decode,
            "dense": total.dense,
            "moe": total.moe,
            "norm": total.norm,
            "rotary": total.rotary,
            "embedding": total.embedding,
            "lm_head": head.lm_head,
            "sampler": head.sampler,
            "collectives": total.collectives + head.collectives,
            "pipeline": total.pipeline,
            "cpu_overhead": 0,
        }
        # What a step adds to its kernels, and what the GPU waits for the host.
        found["cpu_overhead"] = self.iteration_ns(shape) - sum(found.values())
        return found


def _window_pairs(new: int, context: int, window: int) -> int:
    """Sum over i = 1..new of min(context + i, window)."""
    growing = max(0, min(new, window - context))
    return growing * context + growing * (growing + 1) // 2 + (new - growing) * window
