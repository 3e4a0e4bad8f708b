"""The roofline of a model whose layers differ: states, sparse attention, unlike heads or parts.

Owns the cost of each kind of layer of such a model, composed of the same operations as a plain
model's: products over the batch's tokens, attention by what a layer reads (all context, a window,
the tokens that an indexer chose), and for a state its traffic for each sequence and the recurrence
over the tokens. Layers are counted by kind. An iteration is the sum over the kinds; leaps are
computed step by step.

Formulas without measurements behind them (states, indexers): the bytes that must move and the
operations of the published modeling code, at the rates that the GPU's other kernels reach. The
delta rule over prompts was measured (`kernels/recurrence.py`).
"""

from __future__ import annotations

from array import array
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.layers import Indexer, Layer, StateSpace
from emu.latency.base import BatchShape, next_decode_shape
from emu.latency.ends import Ends
from emu.latency.kernels.attention import AttentionCost
from emu.latency.kernels.recurrence import chunked_s
from emu.latency.layer_costs import TokenCost
from emu.latency.roofline import Part, RooflineBackend, queries_of, sequences_of
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from emu.latency.experts.parts import LayerParts


_SCALED: Final = 128
"""Columns of a block of scales: a narrower product stays in 16 bits."""


@final
class _Kind:
    """Equal layers of a model."""

    layer: Layer
    indices: tuple[int, ...]
    """Of these layers in the model."""
    attention: AttentionCost | None
    """What its softmax attention costs; None without any."""
    window_tokens: int
    """Tokens that a query reads at most; 0 = all."""
    state_bytes: int
    """Of one sequence on one rank."""

    __slots__ = ("attention", "indices", "layer", "state_bytes", "window_tokens")

    def __init__(
        self,
        layer: Layer,
        indices: tuple[int, ...],
        attention: AttentionCost | None,
        window_tokens: int,
        state_bytes: int,
    ) -> None:
        self.layer = layer
        self.indices = indices
        self.attention = attention
        self.window_tokens = window_tokens
        self.state_bytes = state_bytes


class MixedRooflineBackend(RooflineBackend):
    """Implements `LatencyBackend` for a model with `ModelSpec.special_layers`."""

    monotone_decode = False

    def _set_up_attention(self, gpu: GpuSpec, dtype: str, kv_dtype: str) -> None:
        super()._set_up_attention(gpu, dtype, kv_dtype)
        self._tp, self._ep = self.costs.tp, self.costs.ep
        self._architecture = gpu.architecture
        self._ops = self.costs.ops
        self._linear_rate = gpu.peak_flops("bfloat16") * self.kernels.prompts.compute
        self._indexer_rate = gpu.peak_flops("fp8") * self.kernels.prompts.compute
        self._read_rate = self._ops.memory_rate * self.kernels.decodes.memory
        self._kinds = self._found_kinds(gpu, dtype, kv_dtype)
        self._is_plain = False
        self._layer_costs: dict[tuple[int, int], TokenCost] = {}
        self._kinds_on: dict[range, list[tuple[int, _Kind]]] = {}

    def _found_kinds(self, gpu: GpuSpec, dtype: str, kv_dtype: str) -> list[_Kind]:
        alike: dict[Layer, list[int]] = {}
        for index, layer in enumerate(self.spec.special_layers):
            alike.setdefault(layer, []).append(index)
        kinds = []
        for layer, indices in alike.items():
            window = 0
            if layer.attention is not None:
                window = layer.attention.window_tokens or layer.attention.chunk_tokens
            elif layer.indexer is not None:
                window = layer.indexer.topk_tokens
            state_bytes = sizes.layer_state_bytes(self.spec, layer, dtype, self._tp)
            attention = self._attention_of(layer, gpu, kv_dtype)
            kinds.append(_Kind(layer, tuple(indices), attention, window, state_bytes))
        return kinds

    def _on(self, part: Part) -> list[tuple[int, _Kind]]:
        """How many layers of each kind a run of layers has."""
        found = self._kinds_on.get(part.layers)
        if found is None:
            counted = [
                (sum(index in part.layers for index in kind.indices), kind) for kind in self._kinds
            ]
            found = self._kinds_on[part.layers] = [one for one in counted if one[0]]
        return found

    def _attention_of(self, layer: Layer, gpu: GpuSpec, kv_dtype: str) -> AttentionCost | None:
        """The cost of one layer's attention, by a plain model that has nothing else."""
        if layer.attention is None and layer.latent is None:
            return None
        part = layer.attention
        plain = msgspec.structs.replace(
            self.spec,
            special_layers=(),
            unquantized=(),
            moe_layers=(),
            window_layers=(),
            latent=layer.latent,
            heads=layer.latent_heads if part is None else part.heads,
            kv_heads=1 if part is None else part.kv_heads,
            # Keys and values of unlike widths: their mean moves the same bytes.
            head_dim=self.spec.head_dim if part is None else (part.head_dim + part.value_dim) // 2,
        )
        kernels = self.kernels
        return AttentionCost(
            plain,
            gpu,
            kernels.decodes,
            kernels.prompts,
            self._tp,
            kv_dtype,
            self.costs.ops.factors,
        )

    def _terms(self, tokens: int, part: Part) -> list[tuple[int, TokenCost]]:
        terms = [(count, self._layer_of_kind(tokens, kind)) for count, kind in self._on(part)]
        if part.has_embedding:
            terms.append((1, self.costs.embedding(tokens)))
        if part.has_head:
            terms.append((1, self.costs.final_norm(tokens)))
        if part.sends:
            terms.append((1, self.costs.send(tokens)))
        return terms

    def moe_layer_ns(self, tokens: int) -> int:
        """A layer with experts, the mean of all kinds."""
        kinds = [kind for kind in self._kinds if kind.layer.experts]
        total = sum(len(kind.indices) * sum(self._layer_of_kind(tokens, kind)) for kind in kinds)
        return total // max(1, sum(len(kind.indices) for kind in kinds))

    def layer_parts(self, tokens: int, mean: int = 0, largest: int = 0) -> LayerParts:
        """The same in parts; what surrounds attention is halved."""
        from emu.latency.experts.parts import LayerParts  # only where something overlaps

        costs, routed = self.costs, self.costs.routed
        assert routed is not None
        times, shared_s = routed.times(self._ops, tokens), costs.shared_s(tokens, costs.kept)
        moved_s = times.exchange_s if routed.exchanges else 0.0
        around_s = self.moe_layer_ns(tokens) / NS_PER_S - times.experts_s - shared_s - moved_s
        times, carried = routed.of_group(self._ops, tokens, mean, largest)
        return LayerParts(
            before_s=around_s / 2,
            after_s=around_s / 2,
            shared_s=shared_s,
            experts_s=times.experts_s,
            dispatch_s=carried.dispatch_s,
            combine_s=carried.combine_s,
            processors=times.processors,
        )

    def _group_ns(self, shape: BatchShape, part: Part) -> tuple[int, int]:
        experts_ns = exchange_ns = 0
        for count, kind in self._on(part):
            if kind.layer.experts is not None:
                more = self._more_of_group(shape, partial(self._routed_s, kind.layer))
                experts_ns += count * more[0]
                exchange_ns += count * more[1]
        return experts_ns, exchange_ns

    def _layer_of_kind(self, tokens: int, kind: _Kind) -> TokenCost:
        key = (tokens, kind.indices[0])
        found = self._layer_costs.get(key)
        if found is None:
            found = self._layer_costs[key] = self._layer_cost(tokens, kind.layer)
        return found

    def _layer_cost(self, tokens: int, layer: Layer) -> TokenCost:
        """All of one layer but attention over context and traffic of states."""
        costs, ops, hidden = self.costs, self._ops, self.spec.hidden
        stream = tokens * hidden * costs.element
        norms = max(1, layer.norm_params // hidden)
        dense_s = self._mixer_s(tokens, layer)
        moe_s, rotary_s = 0.0, 0.0
        if layer.attention is not None:
            part = layer.attention
            width = ceil_div(part.heads, self._tp) + max(1, ceil_div(part.kv_heads, self._tp))
            moved = 2 * tokens * width * part.head_dim * costs.element
            # Queries apart from their gate, the gate's copy, its sigmoid, the product.
            kernels = 1 + (part.norm_params > 0) + 4 * part.output_gate
            rotary_s = kernels * ops.elementwise_s(moved)
        if layer.mlp is not None:
            dtype = costs.stored("mlp", layer.unquantized)
            dense_s += self._mlp_s(tokens, layer.mlp.width, dtype, gated=layer.mlp.gated)
        if layer.experts is not None:
            moe_s = self._experts_s(tokens, layer)
        reduces = (layer.attention or layer.latent or layer.state) is not None
        reduce_ns = 0
        if self._tp > 1:
            reduce_ns = costs.collective_ns("all-reduce", stream, self._tp)
        shares = layer.experts is not None and self._ep > self._tp
        exchange_ns = costs.exchange_ns(tokens) if shares else 0
        is_reduced = layer.mlp is not None or (layer.experts is not None and not shares)
        parts = int(reduces) + int(is_reduced)
        return TokenCost(
            dense=_ns(dense_s),
            moe=_ns(moe_s),
            norm=_ns(norms * ops.elementwise_s(4 * stream)),
            rotary=_ns(rotary_s),
            collectives=parts * reduce_ns + exchange_ns,
        )

    def _mixer_s(self, tokens: int, layer: Layer) -> float:
        """Projections of attention and states, and the recurrence of a state."""
        hidden, gemm, total = self.spec.hidden, self._ops.gemm_s, 0.0
        dtype = self.costs.stored("mixer", layer.unquantized)
        part = layer.attention
        if part is not None:
            heads = ceil_div(part.heads, self._tp)
            kv_heads = max(1, ceil_div(part.kv_heads, self._tp))
            width = heads * part.head_dim * (2 if part.output_gate else 1)
            width += kv_heads * (part.head_dim + part.value_dim)
            total += gemm(tokens, width, hidden, dtype)
            total += gemm(tokens, hidden, heads * part.value_dim, dtype)
        mla = layer.latent
        if mla is not None:
            heads = ceil_div(layer.latent_heads, self._tp)
            total += gemm(tokens, mla.kv_width + mla.q_lora_rank, hidden, dtype)
            total += gemm(tokens, heads * mla.qk_head_dim, mla.q_lora_rank or hidden, dtype)
            expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
            total += gemm(tokens, expanded, mla.kv_lora_rank, dtype)
            last = self.costs.stored("output", layer.unquantized)
            total += gemm(tokens, hidden, heads * mla.v_head_dim, last)
            if layer.indexer is not None and layer.indexer.owns_keys:
                total += self._indexer_products_s(tokens, layer.indexer, mla.q_lora_rank, dtype)
        if layer.state is not None:
            total += self._state_tokens_s(tokens, layer.state, dtype)
        return total

    def _indexer_products_s(
        self, tokens: int, indexer: Indexer, q_lora_rank: int, dtype: str
    ) -> float:
        wide = self._ops.gemm_s(tokens, indexer.heads * indexer.head_dim, q_lora_rank, dtype)
        narrow = indexer.head_dim + indexer.heads
        return wide + self._ops.gemm_s(tokens, narrow, self.spec.hidden, dtype)

    def _state_tokens_s(self, tokens: int, state: StateSpace, dtype: str) -> float:
        """Projections in and out, the convolution, and the recurrence."""
        hidden, ops, element = self.spec.hidden, self._ops, self.costs.element
        if state.inputs:
            joins = self.engine is None or self.engine.model.joins_projections
            groups = [(sum(group),) if joins else group for group in state.inputs]
            widths = [ceil_div(width, self._tp) for group in groups for width in group]
            total = sum(
                ops.gemm_s(tokens, width, hidden, dtype if width >= _SCALED else self.costs.plain)
                for width in widths
            )
            channels = ceil_div(state.output_width, self._tp)
            total += ops.gemm_s(tokens, hidden, channels, dtype)
            total += ops.elementwise_s(3 * tokens * channels * element)  # norm and output gate
        else:
            columns = ceil_div(state.matrix_params, self._tp) // hidden
            total = ops.gemm_s(tokens, columns, hidden, dtype)
        if state.conv_channels:
            channels = ceil_div(state.conv_channels, self._tp)
            total += ops.elementwise_s(2 * tokens * channels * element)
        flops = tokens * ceil_div(state.flops_per_token, self._tp)
        return total + flops / self._linear_rate + ops.element_s

    def _mlp_s(self, tokens: int, width: int, dtype: str, *, gated: bool) -> float:
        hidden, ops = self.spec.hidden, self._ops
        width = ceil_div(width, self._tp)
        parts = 2 if gated else 1
        return (
            ops.gemm_s(tokens, parts * width, hidden, dtype)
            + ops.elementwise_s((parts + 1) * tokens * width * self.costs.element)
            + ops.gemm_s(tokens, hidden, width, dtype)
        )

    def _experts_s(self, tokens: int, layer: Layer) -> float:
        hidden, ops, moe = self.spec.hidden, self._ops, layer.experts
        assert moe is not None
        total = ops.gemm_s(tokens, moe.count, hidden, self.costs.plain)
        total += self._routed_s(layer, tokens)
        dtype = self.costs.stored("shared", layer.unquantized)
        if moe.hidden:  # to the experts' width and back
            total += 2 * ops.gemm_s(tokens, moe.hidden, hidden, dtype)
        if moe.shared_ffn:
            total += self._mlp_s(tokens, moe.shared_ffn, dtype, gated=layer.experts_gated)
            if moe.shared_gate:
                total += self.costs.shared_gate_s(tokens)
        return total

    def _routed_s(self, layer: Layer, tokens: int) -> float:
        costs, moe = self.costs, layer.experts
        assert moe is not None
        dtype = costs.plain if "experts" in layer.unquantized else costs.expert
        inner = moe.hidden or self.spec.hidden
        return costs.routed_s(tokens, moe, dtype, inner, gated=layer.experts_gated)

    def _decode_attention_ns(self, shape: BatchShape, part: Part) -> int:
        count, context = sequences_of(shape)
        queries, seconds = count, 0.0
        if shape.verify is not None:
            queries = queries_of(shape)
        pairs = context * queries // count if count else 0
        for layers, kind in self._on(part):
            if kind.attention is not None:
                seen = min(context, count * kind.window_tokens) if kind.window_tokens else context
                if shape.verify is None:
                    line = kind.attention.decode_line(count)
                else:
                    line = kind.attention.verify_line(count, queries)
                seconds += layers * (line.start + line.slope * seen)
                seconds += layers * self._choosing_s(kind.layer, context, pairs)
            if kind.state_bytes:
                # Read once for each sequence, written after each token that may be the last.
                seconds += layers * self._state_traffic_s(kind, count)
                seconds += layers * self._state_traffic_s(kind, queries - count) / 2
        return self._beside(shape, round(seconds * NS_PER_S))

    def _prefill_attention_ns(self, shape: BatchShape, part: Part) -> int:
        new, before = shape.prefill_new, shape.prefill_context
        keys = sum(new) + sum(before)
        pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(new, before, strict=True))
        seconds = 0.0
        for count, kind in self._on(part):
            if kind.attention is not None:
                seconds += count * kind.attention.prompt_s(new, before, kind.window_tokens)
                seconds += count * self._choosing_s(kind.layer, keys, pairs)
            if kind.state_bytes:
                seconds += count * self._state_traffic_s(kind, len(new))
            state = kind.layer.state
            if state is not None and state.kind == "gated_delta":
                channels = ceil_div(state.output_width, self._tp)
                seconds += count * chunked_s(self._architecture, sum(new), max(new), channels)
        return round(seconds * NS_PER_S)

    def _choosing_s(self, layer: Layer, keys: int, pairs: int) -> float:
        """An indexer scores all keys of a query, in 8 bits."""
        indexer = layer.indexer
        if indexer is None or not indexer.owns_keys:
            return 0.0
        read_s = keys * indexer.bytes_per_token / self._read_rate
        return max(read_s, 2.0 * pairs * indexer.heads * indexer.head_dim / self._indexer_rate)

    def _state_traffic_s(self, kind: _Kind, sequences: int) -> float:
        """States are read and written once for each sequence of a step."""
        return 2 * sequences * kind.state_bytes / self._read_rate

    def _launches_ns(self, shape: BatchShape, part: Part) -> int:
        calls = sum(count for count, kind in self._on(part) if kind.attention is not None)
        return calls * self._launch_ns[1 if shape.prefill_new else 0]

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """`attention_ns` of each of so many decode iterations in a row, one by one."""
        import numpy as np

        each = [self.attention_ns(next_decode_shape(shape, step)) for step in range(steps)]
        return np.array(each, dtype=np.int64)

    def decode_ends(self, shape: BatchShape, steps: int, first_ns: int) -> Ends:
        """Ends of successive decode iterations, one by one, after one of `first_ns` (-1 = none)."""
        costs = [self.iteration_ns(next_decode_shape(shape, step)) for step in range(steps)]
        return array("q", accumulate([first_ns, *costs] if first_ns >= 0 else costs))


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
