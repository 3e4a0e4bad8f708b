"""The roofline backend: iteration cost of any model on any GPU, from figures alone.

Owns the composition of an iteration: the token-wise part of its layers (`layer_costs.py`), and
attention over context. What depends on the number of tokens (or of logit rows) only is computed
once for each number and kept. An iteration costs a few look-ups.

Attention of decodes is a line in the summed context, whose coefficients depend on the number of
sequences only. They are binary fixed-point numbers and all arithmetic is on integers, hence a leap
over many steps equals stepping bit for bit. In sliding-window layers the sum over members of
min(context, window) is bounded by min(summed context, members x window), which is exact unless the
batch has members on both sides.

Not modeled: overlap of collectives with computation, re-expansion of cached latent KV in later
chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mypy_extensions import mypyc_attr

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.latency.base import BatchShape, StageLines
from emu.latency.coefficients import Kernels, kernels_of
from emu.latency.ends import LOOP_MAX, PACKS, Ends, packed, series, unpacked
from emu.latency.engine_steps import EngineSteps
from emu.latency.host_costs import FIRST_USE_NS
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.machine import CollectiveNs, machine_collective
from emu.latency.kernels.operations import Ops
from emu.latency.layer_costs import HeadCost, LayerCosts, TokenCost
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from emu.latency.abilities import FirstSize
    from emu.latency.experts.parts import LayerParts
    from emu.latency.experts.routed import RoutedExperts
    from emu.latency.moe_gate import Gate, Routing


class Part(NamedTuple):
    """A run of layers on one pipeline stage."""

    kinds: tuple[tuple[int, bool, frozenset[str]], ...]
    """Layers whose products are alike: how many, with experts or without, and the parts of them
    that a quantized checkpoint keeps wide."""
    full: int
    """Layers whose attention sees the whole context."""
    window: int
    """Layers whose attention sees the window only."""
    has_embedding: bool
    has_head: bool
    sends: bool
    layers: range
    """Their indices."""


_SHIFT: Final = 20
_COEFFICIENT_BITS: Final = 26

_Line = tuple[int, int]


@mypyc_attr(allow_interpreted_subclasses=True)
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
        kernels: Kernels | None = None,
        gate: Gate | None = None,
        engine: EngineSteps | None = None,
        is_warm: bool = True,
        collective_ns: CollectiveNs | None = None,
        round_tokens_to: int = 1,
        routed: RoutedExperts | None = None,
        fuses_shared: bool = False,
        first_sizes: tuple[FirstSize, ...] = (),
    ) -> None:
        """`ep` 0 = every expert is split over the `tp` ranks (what engines do unless told
        otherwise); above `tp` = ranks of the data-parallel group that share the experts.

        `kernels` None = those of the GPU's architecture. `gate` None = experts are chosen evenly.
        `collective_ns` None = over the GPU's own links.
        `routed`: experts that several replicas share, as `[engine]` says; None = plainly.
        `fuses_shared`: the shared expert runs in the kernels of the routed ones.
        `engine`: what happens between kernels; None = nothing. `is_warm`: the process has used its
        kernels before it serves; else `first_sizes` are left to compile.
        """
        self.spec = spec
        self.kernels = kernels or kernels_of(gpu)
        self.engine = engine
        self.first_use_ns = () if engine is None or is_warm else FIRST_USE_NS
        self.first_sizes = first_sizes
        self.round_tokens_to = round_tokens_to
        plain = sizes.activation_dtype(spec, dtype)
        ops = Ops(gpu, self.kernels, sizes.weight_bytes(1, plain))
        collective_ns = collective_ns or machine_collective(gpu, self.kernels)
        self.costs = LayerCosts(
            spec, ops, collective_ns, tp, ep or 1, dtype, gate, routed, fuses_shared=fuses_shared
        )
        self.costs.sums_groups = engine is not None and engine.model.sums_groups
        self.stage_ranges = sizes.stage_layers(spec, pp)
        self.parts = tuple(self._part(0, spec.layers, index) for index in range(pp))
        self._is_one_stage = len(self.parts) == 1
        self._is_plain = self._is_one_stage and not self.parts[0].window
        """All layers are on one stage, without windows."""
        self._has_lines = not spec.special_layers
        """Decode attention of every layer is a line over the tokens that it reads."""
        self._set_up_memory()
        self._set_up_attention(gpu, dtype, sizes.kv_dtype(spec, dtype, kv_cache_dtype))

    def _set_up_memory(self) -> None:
        """What is kept once worked out."""
        self._tokens: dict[int, tuple[tuple[TokenCost, int], ...]] = {}
        # The same for batches that run a part of the layers: (start, count), and with tokens.
        self._cut_parts: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._cut_tokens: dict[tuple[int, int, int], tuple[tuple[TokenCost, int], ...]] = {}
        self._heads: dict[int, tuple[HeadCost, int]] = {}
        # A pass over all layers on one stage: what tokens cost, and what rows of logits do
        # (with the engine's part of a step), in batches without and with prompts.
        self._of_tokens: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._of_rows: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._lines: dict[int, _Line] = {}
        self._plain_lines: dict[int, _Line] = {}
        """The same for all layers of one stage without windows."""
        self._runs: dict[int, tuple[int, int, int, int]] = {}
        """Of decode batches that are not padded, by their sequences (see `_run`)."""
        self._decode_stages: dict[tuple[int, int, int], tuple[tuple[int, ...], int, int]] = {}
        """By (decodes, padded tokens, sequences): each stage without attention, and host bounds."""
        self._components: dict[tuple[int, int, int], dict[str, int]] = {}
        """Of steps of decodes alone, by (decodes, padded tokens, rows of logits)."""

    def _set_up_attention(self, gpu: GpuSpec, dtype: str, kv_dtype: str) -> None:
        """What attention costs. `dtype`: as configured."""
        kernels = self.kernels
        self.attention = AttentionCost(
            self.spec,
            gpu,
            kernels.decodes,
            kernels.prompts,
            self.costs.tp,
            kv_dtype,
            self.costs.ops.factors,
        )
        self._beside_permille = round(kernels.decodes.beside_prompts * 1000)
        self._launch_ns = (
            round(kernels.decodes.launch_us * 1000),
            round(kernels.prompts.launch_us * 1000),
        )
        # A slow custom GPU gets fewer fraction bits, so that products stay within 64 bits.
        slope_ns = self.attention.decode_line(1).slope * NS_PER_S
        self._shift = max(0, min(_SHIFT, _COEFFICIENT_BITS - int(slope_ns).bit_length()))

    def _part(self, start: int, end: int, stage: int) -> Part:
        spec = self.spec
        own = self.stage_ranges[stage]
        layers = range(max(start, own.start), min(end, own.stop))
        is_last = stage == len(self.stage_ranges) - 1
        return Part(
            kinds=self._kinds_of(layers),
            full=sum(not spec.is_window_layer(index) for index in layers),
            window=sum(spec.is_window_layer(index) for index in layers),
            has_embedding=stage == 0 and start == 0,
            has_head=is_last and end == spec.layers,
            sends=not is_last and end > own.stop > start,
            layers=layers,
        )

    def _kinds_of(self, layers: range) -> tuple[tuple[int, bool, frozenset[str]], ...]:
        """How many layers there are of each kind, in the order in which they come first."""
        spec = self.spec
        counts: dict[tuple[bool, frozenset[str]], int] = {}
        for index in layers:
            kind = spec.is_moe_layer(index), spec.kept_wide(index)
            counts[kind] = counts.get(kind, 0) + 1
        return tuple((count, *kind) for kind, count in counts.items())

    def _terms(self, tokens: int, part: Part) -> list[tuple[int, TokenCost]]:
        """What T tokens cost on a stage: how often, and what."""
        costs = self.costs
        terms = [(count, self._layer(tokens, is_moe, kept)) for count, is_moe, kept in part.kinds]
        if part.has_embedding:
            terms.append((1, costs.embedding(tokens)))
        if part.has_head:
            terms.append((1, costs.final_norm(tokens)))
        if part.sends:
            terms.append((1, costs.send(tokens)))
        return terms

    def _layer(self, tokens: int, is_moe: bool, kept: frozenset[str]) -> TokenCost:
        cost = self.costs.layer(tokens, is_moe, kept)
        stream_bytes = tokens * self.spec.hidden * self.costs.element
        if self.engine is not None and stream_bytes <= self.engine.fused_bytes_max:
            # The norms behind the all-reduces are in their kernels.
            norms_ns = self.spec.norms_per_layer * self.costs.final_norm(tokens).norm
            cost = cost._replace(norm=max(0, cost.norm - norms_ns))
        return cost

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
        total = 0
        for times, cost in self._terms(tokens, self.parts[0]):
            total += times * sum(cost)
        return total

    def tokens_of(self, shape: BatchShape) -> int:
        """Tokens that all products of an iteration are computed for."""
        tokens = max(1, shape.new_tokens, shape.padded_tokens)
        if self.engine is not None:
            verify = shape.verify
            tokens = self.engine.tokens(
                tokens,
                has_prompts=bool(shape.prefill_new),
                verifying=0 if verify is None else shape.decode_count + verify.count,
            )
        step = self.round_tokens_to
        return ceil_div(tokens, step) * step if step > 1 else tokens

    def moe_layer_ns(self, tokens: int) -> int:
        """A layer with experts for so many tokens, the mean of all, without core attention and
        without overlap."""
        kinds = self._kinds_of(range(self.spec.layers))
        mixtures = [(count, kept) for count, is_moe, kept in kinds if is_moe]
        total = sum(count * sum(self._layer(tokens, True, kept)) for count, kept in mixtures)
        return total // max(1, sum(count for count, _ in mixtures))

    def layer_parts(self, tokens: int, mean: int = 0, largest: int = 0) -> LayerParts:
        """The same in the order in which it is computed. `mean`, `largest`: tokens of the members
        of a group that is not padded."""
        return self.costs.layer_parts(tokens, mean, largest)

    def group_ns(self, shape: BatchShape) -> tuple[int, int]:
        """(experts, exchange) of a group that is not padded, beside those of one whose members all
        have the tokens of this batch."""
        if not shape.group_tokens:
            return 0, 0
        parts = [self._group_ns(shape, part) for part in self._parts(shape)]
        return sum([experts for experts, _ in parts]), sum([moved for _, moved in parts])

    def _group_ns(self, shape: BatchShape, part: Part) -> tuple[int, int]:
        experts_ns = exchange_ns = 0
        for count, is_moe, kept in part.kinds:
            if is_moe:
                routed_s = partial(self.costs.plain_routed_s, kept=kept)
                experts, moved = self._more_of_group(shape, routed_s)
                experts_ns += count * experts
                exchange_ns += count * moved
        return experts_ns, exchange_ns

    def _more_of_group(
        self, shape: BatchShape, routed_s: Callable[[int], float]
    ) -> tuple[int, int]:
        from emu.latency.experts.group import group_ns  # a run without such groups needs it not

        own, mean, largest = self.tokens_of(shape), shape.group_tokens, shape.group_tokens_max
        return group_ns(self.costs, own, mean, largest, routed_s)

    def _token_costs(self, shape: BatchShape) -> tuple[tuple[TokenCost, int], ...]:
        tokens = self.tokens_of(shape)
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

    def _decode_line(self, count: int) -> _Line:
        """Decode attention of a layer for so many sequences, in fixed point."""
        found = self._lines.get(count)
        if found is None:
            scale = NS_PER_S * (1 << self._shift)
            start, slope = self.attention.decode_line(count)
            found = self._lines[count] = (round(start * scale), max(1, round(slope * scale)))
        return found

    def _stage_line(self, count: int) -> _Line:
        """The same for all layers of the one stage without windows."""
        found = self._plain_lines.get(count)
        if found is None:
            layers = self.parts[0].full
            start, slope = self._decode_line(count)
            found = self._plain_lines[count] = (layers * start, layers * slope)
        return found

    def _decode_attention_ns(self, shape: BatchShape, part: Part) -> int:
        count, seen = sequences_of(shape)
        if shape.verify is None:
            start, slope = self._decode_line(count)
        else:
            scale = NS_PER_S * (1 << self._shift)
            line = self.attention.verify_line(count, queries_of(shape))
            start, slope = round(line.start * scale), round(line.slope * scale)
        total = part.full * (start + slope * seen)
        if part.window:
            seen = min(seen, count * self.spec.window)
            total += part.window * (start + slope * seen)
        return self._beside(shape, total >> self._shift)

    def _beside(self, shape: BatchShape, decodes_ns: int) -> int:
        """What attention of decodes takes, from what it takes without prompts in the step."""
        if shape.prefill_new and self._beside_permille != 1000:
            return decodes_ns * self._beside_permille // 1000
        return decodes_ns

    def attention_ns(self, shape: BatchShape) -> int:
        """All attention of an iteration, without projections."""
        total = 0
        for part in self._parts(shape):
            total += self._launches_ns(shape, part)
            if shape.decode_count or shape.verify is not None:
                total += self._decode_attention_ns(shape, part)
            if shape.prefill_new:
                total += self._prefill_attention_ns(shape, part)
        return total

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """`attention_ns` of each of so many decode iterations in a row."""
        import numpy as np

        full, inside = self._attention_lines(shape, steps)
        costs = np.zeros(steps, dtype=np.int64)
        for part in self._parts(shape):
            costs += (part.full * full + part.window * inside) >> self._shift
            costs += self._launches_ns(shape, part)
        return costs

    def _attention_lines(
        self, shape: BatchShape, steps: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Attention of a layer in fixed point, decode by decode: in full, and in a window."""
        import numpy as np

        count, window = shape.decode_count, self.spec.window
        seen = np.arange(steps, dtype=np.int64)
        seen *= count
        seen += shape.decode_context_sum + count
        start, slope = self._decode_line(count)
        full: NDArray[np.int64] = start + slope * seen
        if not window:
            return full, full
        np.minimum(seen, count * window, out=seen)
        return full, start + slope * seen

    def _launches_ns(self, shape: BatchShape, part: Part) -> int:
        """Fixed time of attention: one call for a layer, whatever the batch has."""
        return (part.full + part.window) * self._launch_ns[1 if shape.prefill_new else 0]

    def _prefill_attention_ns(self, shape: BatchShape, part: Part) -> int:
        seconds = 0.0
        attention, new, context = self.attention, shape.prefill_new, shape.prefill_context
        if part.full:
            seconds += part.full * attention.prompt_s(new, context, 0)
        if part.window:
            seconds += part.window * attention.prompt_s(new, context, self.spec.window)
        return round(seconds * NS_PER_S)

    @staticmethod
    def _is_cut(shape: BatchShape) -> bool:
        """A part of the layers runs."""
        return shape.layers >= 0 or bool(shape.start_layer)

    def _layer_count(self, shape: BatchShape) -> int:
        left = self.spec.layers - shape.start_layer
        return min(shape.layers, left) if shape.layers >= 0 else left

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage; host time is counted on the first, the head on the last."""
        if (
            self._has_lines
            and shape.decode_count
            and not (shape.prefill_new or shape.start_layer)
            and shape.verify is None
            and shape.layers < 0
            and not shape.group_tokens
        ):
            return self._decode_stage_ns(shape)
        stages = []
        parts = self._parts(shape)
        engine = self.engine
        for part, (_, total) in zip(parts, self._token_costs(shape), strict=True):
            total += self._launches_ns(shape, part)
            if shape.decode_count or shape.verify is not None:
                total += self._decode_attention_ns(shape, part)
            if shape.prefill_new:
                total += self._prefill_attention_ns(shape, part)
            if part.has_head:
                total += self._head(shape.logit_rows)[1]
            if shape.group_tokens:
                total += sum(self._group_ns(shape, part))
            stages.append(total)
        if engine is not None:
            stages[0] += engine.step_ns(self._layer_count(shape))
            if not self._is_cut(shape):
                least_ns, exposed_ns = engine.host_bounds_ns(shape)
                stages[0] = max(stages[0], least_ns)
                stages[-1] += exposed_ns
        stages[-1] = max(stages[-1], 1)
        return tuple(stages)

    def _decode_stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The same for decodes alone in all layers: of two such steps only attention differs."""
        count, parts = shape.decode_count, self.parts
        found = self._stage_bases(shape)
        seen = shape.decode_context_sum + count
        start, slope = self._decode_line(count)
        full = inside = start + slope * seen
        if self.spec.window:
            inside = start + slope * min(seen, count * self.spec.window)
        stages = [
            base + ((part.full * full + part.window * inside) >> self._shift)
            for part, base in zip(parts, found[0], strict=True)
        ]
        stages[0] = max(stages[0], found[1])
        stages[-1] = max(stages[-1] + found[2], 1)
        return tuple(stages)

    def stage_lines(self, shape: BatchShape) -> StageLines | None:
        """`stage_ns` of decode iterations in a row, as lines; None where they are no lines."""
        if not self._has_lines or self.spec.window or self._is_cut(shape):
            return None
        count, shift = shape.decode_count, self._shift
        bases, least_ns, exposed_ns = self._stage_bases(shape)
        start, slope = self._decode_line(count)
        start += slope * (shape.decode_context_sum + count)
        slope *= count
        # Whole ns may be added before the shift, which leaves the fraction as it is.
        firsts = [
            part.full * start + (base << shift)
            for part, base in zip(self.parts, bases, strict=True)
        ]
        firsts[-1] += exposed_ns << shift
        growths = [part.full * slope for part in self.parts]
        leasts = [0] * len(firsts)
        leasts[-1] = 1
        leasts[0] = max(leasts[0], least_ns)
        return firsts, growths, leasts, shift

    def _stage_bases(self, shape: BatchShape) -> tuple[tuple[int, ...], int, int]:
        """Each stage of a decode iteration without its attention, and the host's bounds."""
        count, engine, parts = shape.decode_count, self.engine, self.parts
        key = (count, shape.padded_tokens, shape.sequences)
        found = self._decode_stages.get(key)
        if found is None:
            bases = []
            for part, (_, total) in zip(parts, self._token_costs(shape), strict=True):
                total += self._launches_ns(shape, part)
                bases.append(total + (self._head(shape.sequences)[1] if part.has_head else 0))
            least_ns = exposed_ns = 0
            if engine is not None:
                bases[0] += engine.step_ns(self.spec.layers)
                least_ns, exposed_ns = engine.host_bounds_ns(shape)
            found = self._decode_stages[key] = (tuple(bases), least_ns, exposed_ns)
        return found

    def expert_loads(self, shape: BatchShape) -> Routing | None:
        """Tokens of each expert and rank in this iteration; None where experts are chosen
        evenly."""
        if self.costs.gate is None:
            return None
        tokens = shape.group_tokens or max(1, sum(shape.prefill_new) + shape.decode_count)
        return self.costs.gate.route(tokens, tokens)

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration over all stages."""
        is_odd = not self._is_one_stage or self._is_cut(shape) or shape.group_tokens
        if is_odd or shape.verify is not None:
            return sum(self.stage_ns(shape))
        prompts, count = shape.prefill_new, shape.decode_count
        tokens = count
        if prompts:
            tokens += sum(prompts)
        if shape.padded_tokens > tokens:
            tokens = shape.padded_tokens
        total = self._fixed_ns(shape, tokens)
        if count:
            if self._is_plain:
                start, slope = self._plain_lines.get(count) or self._stage_line(count)
                decodes_ns = (start + slope * (shape.decode_context_sum + count)) >> self._shift
                total += self._beside(shape, decodes_ns) if prompts else decodes_ns
            else:
                total += self._decode_attention_ns(shape, self.parts[0])
        if prompts:
            total += self._prefill_attention_ns(shape, self.parts[0])
        if self.engine is not None:
            bounds = self.engine.bounds_ns(tokens, shape.sequences, len(prompts))
            if count and prompts:
                bounds = self.engine.mixed_ns(shape, bounds)
            least_ns, exposed_ns = bounds
            total = (total if total > least_ns else least_ns) + exposed_ns
        return total if total > 0 else 1

    def _fixed_ns(self, shape: BatchShape, tokens: int) -> int:
        """GPU time on one stage that does not depend on context, of so many tokens (padded)."""
        kind = 1 if shape.prefill_new else 0  # graphs of prompts may have other sizes
        of_tokens, by_rows = self._of_tokens[kind], self._of_rows[kind]
        try:
            return of_tokens[tokens] + by_rows[shape.sequences]
        except KeyError:
            of_tokens[tokens] = self._token_ns(self.tokens_of(shape))
            rows_ns = self._launches_ns(shape, self.parts[0])
            if self.engine is not None:
                rows_ns += self.engine.step_ns(self.spec.layers)
            by_rows[shape.sequences] = rows_ns + self._head(shape.sequences)[1]
        return of_tokens[tokens] + by_rows[shape.sequences]

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        return unpacked(self.decode_ends(shape, steps, -1))

    def decode_ends(self, shape: BatchShape, steps: int, first_ns: int) -> Ends:
        """The same after an iteration of `first_ns`, whose end is the first element; -1 = none."""
        count = shape.decode_count
        if shape.sequences == count and not shape.padded_tokens:
            run = self._runs.get(count) or self._run(shape)
        else:
            run = self._run(shape)
        start, slope, least_ns, exposed_ns = run
        if slope < 0 or shape.layers >= 0 or shape.start_layer:
            return _ends_of(self._added_costs_ns(shape, steps), first_ns)
        start += slope * (shape.decode_context_sum + count)
        if PACKS or steps <= LOOP_MAX or "numpy" not in sys.modules:
            return series(start, slope * count, self._shift, least_ns, exposed_ns, steps, first_ns)
        return self._long_series(start, slope * count, least_ns, exposed_ns, steps, first_ns)

    def _run(self, shape: BatchShape) -> tuple[int, int, int, int]:
        """Decode iterations of one stage as a line over the tokens that they read.

        Its start and slope in fixed point (-1: they are not one line), and the host's bounds.
        """
        count = shape.decode_count
        tokens = max(count, shape.padded_tokens)
        base = self._fixed_ns(shape, tokens) if self._is_plain else 0
        if base <= 0:
            return 0, -1, 0, 0
        start, slope = self._stage_line(count)
        start += base << self._shift
        least_ns = exposed_ns = 0
        if self.engine is not None:
            least_ns, exposed_ns = self.engine.bounds_ns(tokens, shape.sequences, 0)
        run = start, slope, least_ns, exposed_ns
        if shape.sequences == count and not shape.padded_tokens:
            self._runs[count] = run
        return run

    def _long_series(
        self, start: int, growth: int, least_ns: int, added_ns: int, steps: int, first_ns: int
    ) -> Ends:
        """`series` by numpy."""
        import numpy as np

        before = 1 if first_ns >= 0 else 0
        costs = np.arange(start - growth * before, start + growth * steps, growth, dtype=np.int64)
        costs >>= self._shift
        if costs.item(before) < least_ns:  # the others are longer than the first
            np.maximum(costs, least_ns, out=costs)
        if added_ns:
            costs += added_ns
        if before:
            costs[0] = first_ns
        return packed(np.add.accumulate(costs))

    def _added_costs_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same, stage by stage and window by window."""
        import numpy as np

        parts, engine = self._parts(shape), self.engine
        least_ns = exposed_ns = 0
        if engine is not None and not self._is_cut(shape):
            least_ns, exposed_ns = engine.host_bounds_ns(shape)
        full, inside = self._attention_lines(shape, steps)
        costs = np.zeros(steps, dtype=np.int64)
        for index, (part, (_, base)) in enumerate(
            zip(parts, self._token_costs(shape), strict=True)
        ):
            base += self._launches_ns(shape, part)
            if part.has_head:
                base += self._head(shape.sequences)[1]
            if index == 0 and engine is not None:
                base += engine.step_ns(self._layer_count(shape))
            stage = (part.full * full + part.window * inside) >> self._shift
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
        has_decodes = bool(shape.decode_count) or shape.verify is not None
        if shape.prefill_new or shape.verify is not None or self._is_cut(shape):
            found = self._token_components(shape)
        else:  # decodes alone: of two such steps only attention differs
            key = (shape.decode_count, shape.padded_tokens, shape.logit_rows)
            known = self._components.get(key)
            if known is None:
                known = self._components[key] = self._token_components(shape)
            found = dict(known)
        if shape.group_tokens:
            experts_ns, exchange_ns = self.group_ns(shape)
            found["moe"] += experts_ns
            found["collectives"] += exchange_ns
        for part in self._parts(shape):
            if has_decodes:
                found["attention_decode"] += self._decode_attention_ns(shape, part)
            if shape.prefill_new:
                found["attention_prefill"] += self._prefill_attention_ns(shape, part)
        # What a step adds to its kernels, and what the GPU waits for the host.
        found["cpu_overhead"] = self.iteration_ns(shape) - sum(found.values())
        return found

    def _token_components(self, shape: BatchShape) -> dict[str, int]:
        """The same without what attention takes beside its launches, and without the host."""
        parts = self._parts(shape)
        total = TokenCost()
        for cost, _ in self._token_costs(shape):
            total = total.plus(cost)
        launches = sum(self._launches_ns(shape, part) for part in parts)
        head = self._head(shape.logit_rows)[0] if parts[-1].has_head else HeadCost(0, 0, 0)
        return {  # one call of attention serves both; its fixed part is counted once
            "attention_prefill": launches if shape.prefill_new else 0,
            "attention_decode": 0 if shape.prefill_new else launches,
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


def sequences_of(shape: BatchShape) -> tuple[int, int]:
    """Sequences that decode or verify, and the tokens that their attention reads."""
    count = shape.decode_count
    seen = shape.decode_context_sum + count
    verify = shape.verify
    if verify is None:
        return count, seen
    return count + verify.count, seen + verify.context_sum + verify.tokens


def queries_of(shape: BatchShape) -> int:
    """New tokens of sequences that decode or verify."""
    return shape.decode_count + (0 if shape.verify is None else shape.verify.tokens)


def _ends_of(costs: NDArray[np.int64], first_ns: int) -> Ends:
    """Ends of these steps, behind one of `first_ns` (-1 = none)."""
    import numpy as np

    if first_ns >= 0:
        costs = np.concatenate((np.array([first_ns], dtype=np.int64), costs))
    return packed(np.cumsum(costs))
