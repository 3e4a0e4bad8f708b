"""Steps of models whose layers differ: states, indexers, heads and parts of each layer's own.

Restates docs/lab/models.md for the roofline: each layer has the kernels of the parts that it has; a
query reads all context, a window, or what an indexer chose, whose keys it scores in eight bits; a
state is read and written once for each sequence.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from emu.apps.chaos.truth.kernel_times import Attention, stored
from emu.apps.chaos.truth.step_times import StepTimes, latent_products
from emu.apps.chaos.truth.steps import Step
from emu.catalogue.layers import Layer, StateSpace


class UnlikeSteps(StepTimes):
    """One kind of replica."""

    def _layers(self, layers: range, tokens: int, step: Step) -> float:
        kinds = Counter(self._spec.special_layers[at] for at in layers)
        beside = self._kernels.decodes.beside_prompts if step.prompts else 1.0
        total = 0.0
        for layer, count in kinds.items():
            took = self._computes(layer, tokens) + beside * self._decodes(layer, step)
            total += count * (took + self._prompts(layer, step))
            if layer.experts is not None and step.mean:
                others = self._of_experts(layer, step.mean) - self._of_experts(layer, tokens)
                others += self._met(step.mean, is_padded=False) - self._met(tokens)
                total += count * others
        return 1e9 * total

    def _computes(self, layer: Layer, tokens: int) -> float:
        """All but what a layer reads of earlier tokens."""
        hidden = self._spec.hidden
        norms = max(1, layer.norm_params // hidden)
        total = norms * self._ops.moved(4 * self._stream(tokens)) + self._mixes(layer, tokens)
        if layer.mlp is not None:
            dtype = self._kept("mlp", layer.unquantized)
            total += self._mlp(tokens, layer.mlp.width, dtype, is_gated=layer.mlp.gated)
        if layer.experts is not None:
            total += self._routes(layer, tokens)
        group = self._ep // self._tp
        if layer.attention or layer.latent or layer.state:
            total += self._summed(self._stream(tokens))
        if layer.experts is not None and group > 1:
            total += self._met(tokens)
        elif layer.experts is not None or layer.mlp is not None:
            total += self._summed(self._stream(tokens))
        return total

    def _mixes(self, layer: Layer, tokens: int) -> float:
        """Projections of attention and states, rotary, and the recurrence."""
        hidden, ops, total = self._spec.hidden, self._ops, 0.0
        dtype = self._kept("mixer", layer.unquantized)
        part, latent, state = layer.attention, layer.latent, layer.state
        if part is not None:
            heads, kv_heads = self._heads(layer)
            wide = heads * part.head_dim * (1 + part.output_gate)
            wide += kv_heads * (part.head_dim + part.value_dim)
            total += ops.product(tokens, wide, hidden, dtype)
            total += ops.product(tokens, hidden, heads * part.value_dim, dtype)
            # Norms of queries and keys are a kernel, a gate of the output is four.
            kernels = 1 + (part.norm_params > 0) + 4 * part.output_gate
            wide = 2 * tokens * (heads + kv_heads) * part.head_dim
            total += kernels * ops.moved(wide * self._element)
        if latent is not None:
            heads, indexer = self._heads(layer)[0], layer.indexer
            last = self._kept("output", layer.unquantized)
            total += latent_products(latent, heads, hidden, tokens, (dtype, last), ops.product)
            if indexer is not None and indexer.owns_keys:
                wide = indexer.heads * indexer.head_dim
                total += ops.product(tokens, wide, latent.q_lora_rank, dtype)
                total += ops.product(tokens, indexer.head_dim + indexer.heads, hidden, dtype)
        if state is not None:
            total += self._state_products(state, tokens, dtype)
            if state.conv_channels:
                channels = -(-state.conv_channels // self._tp)
                total += ops.moved(2 * tokens * channels * self._element)
            flops = tokens * -(-state.flops_per_token // self._tp)
            rate = ops.gpu.peak_flops("bfloat16") * self._kernels.prompts.compute
            total += flops / rate + 1e-6 * self._kernels.element_us
        return total

    def _state_products(self, state: StateSpace, tokens: int, dtype: str) -> float:
        """Into a state and out of it: one product for all, or each by itself."""
        hidden, ops = self._spec.hidden, self._ops
        if not state.inputs:
            return ops.product(tokens, -(-state.matrix_params // self._tp) // hidden, hidden, dtype)
        out = -(-state.output_width // self._tp)
        total = ops.product(tokens, hidden, out, dtype)
        total += ops.moved(3 * tokens * out * self._element)
        engine = self._context.engine
        joins = engine is None or engine.joins_projections
        for group in state.inputs:
            # Most engines make one product of a group.
            for width in [sum(group)] if joins else group:
                mine = -(-width // self._tp)
                total += ops.product(tokens, mine, hidden, dtype if mine >= 128 else self._plain)
        return total

    def _heads(self, layer: Layer) -> tuple[int, int]:
        part = layer.attention
        if part is None:
            return -(-layer.latent_heads // self._tp), 1
        return -(-part.heads // self._tp), max(1, -(-part.kv_heads // self._tp))

    def _routes(self, layer: Layer, tokens: int) -> float:
        moe, hidden = layer.experts, self._spec.hidden
        assert moe is not None
        total = self._ops.product(tokens, moe.count, hidden, self._plain)
        total += self._of_experts(layer, tokens)
        wide = layer.unquantized
        if moe.hidden:
            total += 2 * self._ops.product(tokens, moe.hidden, hidden, self._kept("shared", wide))
        return total + self._shared(moe, tokens, wide, is_gated=layer.experts_gated)

    def _of_experts(self, layer: Layer, tokens: int) -> float:
        moe = layer.experts
        assert moe is not None
        return self._ops.experts(
            tokens * max(1, self._ep // self._tp),
            count=moe.count,
            chosen=moe.per_token,
            hidden=moe.hidden or self._spec.hidden,
            ffn=-(-moe.ffn // max(1, self._tp // self._ep)),
            matrices=3 if layer.experts_gated else 2,
            dtype=self._plain if "experts" in layer.unquantized else self._expert,
            ranks=self._ep,
        )

    @cache  # noqa: B019 - as many as a model has layers
    def _attention_of(self, layer: Layer) -> Attention | None:
        part, latent = layer.attention, layer.latent
        if part is None and latent is None:
            return None
        heads, kv_heads = self._heads(layer)
        width = self._spec.head_dim if part is None else (part.head_dim + part.value_dim) // 2
        kept = 2 * kv_heads * width
        if latent is not None:
            kept = latent.kv_lora_rank + latent.qk_rope_head_dim
        size, is_narrow = stored(kept, self._kv), stored(1, self._kv) == 1
        return Attention(self._ops, heads, kv_heads, width, size, latent, narrow=is_narrow)

    def _reach(self, layer: Layer) -> int:
        """Tokens that a query reads; 0 = all."""
        if layer.attention is not None:
            return layer.attention.window_tokens or layer.attention.chunk_tokens
        return 0 if layer.indexer is None else layer.indexer.topk_tokens

    def _state_s(self, layer: Layer, sequences: float) -> float:
        """States that are read and written."""
        state = layer.state
        if state is None:
            return 0.0
        size = 0
        if state.conv_channels:
            size = -(-state.conv_channels // self._tp) * (state.conv_kernel - 1) * self._element
        each = stored(1, state.state_dtype) if state.state_dtype else self._element
        size += -(-state.state_elements // self._tp) * each
        return 2 * sequences * size / self._read()

    def _read(self) -> float:
        return self._ops.read * self._kernels.decodes.memory

    def _chooses(self, layer: Layer, keys: int, pairs: int) -> float:
        """An indexer scores so many keys."""
        indexer = layer.indexer
        if indexer is None or not indexer.owns_keys:
            return 0.0
        rate = self._ops.gpu.peak_flops("fp8") * self._kernels.prompts.compute
        each = indexer.head_dim + 4 * -(-indexer.head_dim // 128)
        flops = 2.0 * pairs * indexer.heads * indexer.head_dim
        return max(keys * each / self._read(), flops / rate)

    def _decodes(self, layer: Layer, step: Step) -> float:
        count, attention, took = step.decodes, self._attention_of(layer), 0.0
        if not count:
            return 0.0
        if attention is not None:
            reach = self._reach(layer)
            seen = min(step.seen, count * reach) if reach else step.seen
            if step.verifying:
                took += attention.verifies(count, step.queries, seen)
            else:
                took += attention.decodes(count, seen)
            took += self._chooses(layer, step.seen, step.seen * step.queries // count)
        return took + self._state_s(layer, count + (step.queries - count) / 2)

    def _prompts(self, layer: Layer, step: Step) -> float:
        """Those of attention with the launch, whatever the step has."""
        attention, took = self._attention_of(layer), 0.0
        if attention is not None:
            kernel = self._kernels.prompts if step.prompts else self._kernels.decodes
            took += 1e-6 * kernel.launch_us
        if not step.prompts:
            return took
        if attention is not None:
            took += attention.prompts(step.prompts, self._reach(layer))
            keys = sum(before + new for before, new in step.prompts)
            pairs = sum(new * before + new * (new + 1) // 2 for before, new in step.prompts)
            took += self._chooses(layer, keys, pairs)
        return took + self._state_s(layer, len(step.prompts))
