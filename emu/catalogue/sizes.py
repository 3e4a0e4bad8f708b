"""Parameters and bytes of a model, from its architecture alone.

Pure functions of `ModelSpec`; the exact physical sizes. (LLMServingSim counts some of
them otherwise: `emu/kv/memory.py`.)

Types: `dtype` "auto" means as published. Any other type applies to the matrices of the layers;
embeddings, head, norms, router and biases stay at least 16 bits wide, as engines keep them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.layers import Layer
from emu.catalogue.model import BITS_PER_1024, ModelSpec
from emu.units import ceil_div

NO_EXPERTS: Final = -1
"""Of ranks that experts are dealt to: all experts are elsewhere."""
HALF: Final = ("float16", "bfloat16", "float32")


class LayerSize(msgspec.Struct, frozen=True):
    """Parameters of one layer on one rank, by what they are stored as."""

    linear: int
    """Attention, dense MLP and shared experts."""
    experts: int
    """Routed experts."""
    other: int
    """Norms, biases, router, sinks: never quantized."""


def weight_bytes(params: int, dtype: str) -> int:
    """Bytes that `params` weights of a type take in memory."""
    return ceil_div(params * BITS_PER_1024[dtype], 8 * 1024)


def linear_dtype(spec: ModelSpec, dtype: str) -> str:
    """Type of attention and dense MLP weights under a configured `dtype`."""
    return (spec.linear_dtype or spec.dtype) if dtype == "auto" else dtype


def expert_dtype(spec: ModelSpec, dtype: str) -> str:
    """Type of routed experts under a configured `dtype`."""
    return (spec.expert_dtype or spec.dtype) if dtype == "auto" else dtype


def activation_dtype(spec: ModelSpec, dtype: str) -> str:
    """Type of activations, norms, embeddings and head: 16 or 32 bits."""
    return dtype if dtype in HALF else spec.dtype


def kv_dtype(spec: ModelSpec, dtype: str, kv_cache_dtype: str) -> str:
    """Type of the KV cache: "auto" follows the checkpoint, else the activations (as vLLM does)."""
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    return spec.published_kv_dtype or activation_dtype(spec, dtype)


def weights_told(spec: ModelSpec, dtype: str) -> str:
    """The types of a model's matrices in words: `fp8_block`, `mxfp4, partly bfloat16`."""
    linear, experts = linear_dtype(spec, dtype), expert_dtype(spec, dtype)
    words = linear
    if spec.experts is not None and experts != linear:
        words += f", experts {experts}"
    layers = range(spec.layers)
    is_partly = linear not in HALF and any(spec.layer(index).unquantized for index in layers)
    return f"{words}, partly {activation_dtype(spec, dtype)}" if is_partly else words


def kv_heads_per_rank(spec: ModelSpec, tp: int) -> int:
    """KV heads of one rank; replicated where there are more ranks than heads."""
    return max(1, ceil_div(spec.kv_heads, tp))


def attention_params(spec: ModelSpec, tp: int = 1) -> int:
    """Parameters of the first layer's attention matrices on one of `tp` ranks."""
    return _mixer_params(spec, spec.layer(0), tp)


def layer_size(spec: ModelSpec, layer_index: int, tp: int = 1, ep: int = 0) -> LayerSize:
    """Parameters of one layer on one rank. `ep` 0 = as many ranks as `tp`; `NO_EXPERTS`: those of
    all experts are elsewhere.

    Whole experts go to `ep` ranks; what `tp` has beyond that splits each expert. Matrices that a
    quantized checkpoint keeps wide count as "other".
    """
    layer, hidden = spec.layer(layer_index), spec.hidden
    mixer, mlp, shared, routed = _mixer_params(spec, layer, tp), 0, 0, 0
    other = layer.norm_params + _small_mixer_params(spec, layer, tp)
    if layer.mlp is not None:
        mlp = layer.mlp.params(hidden, tp)
        other += layer.mlp.small_params(hidden, tp)
    if layer.experts is not None:
        moe = layer.experts
        ep = ep or tp
        per_rank = 0 if ep == NO_EXPERTS else ceil_div(moe.count, ep)
        split = max(1, tp // ep)
        routed = per_rank * moe.expert_params(hidden, gated=layer.experts_gated, split=split)
        shared = moe.dense_params(hidden, gated=layer.experts_gated, tp=tp)
        other += moe.small_params(hidden)
        if moe.bias:
            other += per_rank * (2 * ceil_div(moe.ffn, split) + hidden)
    output = 0
    if layer.latent is not None:
        output = layer.latent.output_params(hidden, ceil_div(layer.latent_heads, tp))
    parts = {"mixer": mixer - output, "output": output}
    parts |= {"mlp": mlp, "shared": shared, "experts": routed}
    other += sum(params for part, params in parts.items() if part in layer.unquantized)
    kept = {part: params for part, params in parts.items() if part not in layer.unquantized}
    routed = kept.pop("experts", 0)
    return LayerSize(sum(kept.values()), routed, other)


def _mixer_params(spec: ModelSpec, layer: Layer, tp: int) -> int:
    params = 0
    if layer.attention is not None:
        params += layer.attention.params(spec.hidden, tp)
    if layer.latent is not None:
        params += layer.latent.params(spec.hidden, ceil_div(layer.latent_heads, tp))
        if layer.indexer is not None:
            params += layer.indexer.params(spec.hidden, layer.latent.q_lora_rank)
    if layer.state is not None:
        params += ceil_div(layer.state.matrix_params, tp)
    return params


def _small_mixer_params(spec: ModelSpec, layer: Layer, tp: int) -> int:
    params = 0
    if layer.attention is not None:
        params += layer.attention.small_params(spec.hidden, tp)
    if layer.state is not None:
        params += ceil_div(layer.state.other_params, tp)
    return params


def embedding_params(spec: ModelSpec, tp: int = 1) -> int:
    """Token (and learnt position) embedding on one of `tp` ranks."""
    return (ceil_div(spec.vocab, tp) + spec.position_rows) * spec.hidden


def head_params(spec: ModelSpec, tp: int = 1) -> int:
    """Output matrix and final norm on one of `tp` ranks; a tied matrix is not counted."""
    rows = ceil_div(spec.vocab, tp)
    matrix = 0 if spec.tied_embeddings else rows * spec.hidden
    norm = spec.hidden * (2 if spec.norm_bias else 1) * spec.final_norm
    return matrix + norm + rows * spec.head_bias


def parameter_count(spec: ModelSpec) -> int:
    """All parameters of the language model, without towers and multi-token prediction."""
    layers = sum(sum(_triple(layer_size(spec, index))) for index in range(spec.layers))
    return embedding_params(spec) + layers + head_params(spec) + spec.extra_params


def active_parameter_count(spec: ModelSpec) -> int:
    """Parameters that one token passes: routed experts count only as far as chosen."""
    total = parameter_count(spec)
    for index in range(spec.layers):
        layer = spec.layer(index)
        if layer.experts is not None:
            moe = layer.experts
            one = moe.expert_params(spec.hidden, gated=layer.experts_gated)
            one += (2 * moe.ffn + spec.hidden) * moe.bias
            total -= (moe.count - moe.per_token) * one
    return total


def _triple(size: LayerSize) -> tuple[int, int, int]:
    return size.linear, size.experts, size.other


def layer_weight_bytes(
    spec: ModelSpec, layer_index: int, tp: int = 1, ep: int = 0, dtype: str = "auto"
) -> int:
    """Bytes of one layer on one rank."""
    size = layer_size(spec, layer_index, tp, ep)
    return (
        weight_bytes(size.linear, linear_dtype(spec, dtype))
        + weight_bytes(size.experts, expert_dtype(spec, dtype))
        + weight_bytes(size.other, activation_dtype(spec, dtype))
    )


def layers_weight_bytes(
    spec: ModelSpec, tp: int = 1, ep: int = 0, dtype: str = "auto"
) -> list[int]:
    """Bytes of each layer on one rank; layers that are alike are weighed once."""
    if spec.special_layers or spec.unquantized:
        return [layer_weight_bytes(spec, index, tp, ep, dtype) for index in range(spec.layers)]
    known: dict[bool, int] = {}
    found: list[int] = []
    for index in range(spec.layers):
        is_moe = spec.is_moe_layer(index)
        if is_moe not in known:
            known[is_moe] = layer_weight_bytes(spec, index, tp, ep, dtype)
        found.append(known[is_moe])
    return found


def embedding_bytes(spec: ModelSpec, tp: int = 1, dtype: str = "auto") -> int:
    """Bytes of the embedding, and of vision and audio towers, on one rank."""
    towers = ceil_div(spec.tower_params, tp)
    return weight_bytes(embedding_params(spec, tp) + towers, activation_dtype(spec, dtype))


def head_bytes(spec: ModelSpec, tp: int = 1, dtype: str = "auto", *, own_copy: bool = False) -> int:
    """Bytes of final norm and output matrix on one rank.

    `own_copy`: a tied matrix must be held once more (the last stage of a pipeline).
    """
    params = head_params(spec, tp)
    if own_copy and spec.tied_embeddings:
        params += ceil_div(spec.vocab, tp) * spec.hidden
    return weight_bytes(params, activation_dtype(spec, dtype))


def stage_layers(spec: ModelSpec, pp: int) -> tuple[range, ...]:
    """The layers of each pipeline stage.

    An uneven rest goes to the last stages but one, because the very last also has the head
    (vLLM's default partition).
    """
    base, rest = divmod(spec.layers, pp)
    sizes = [base] * pp
    for index in range(2, rest + 2):
        sizes[-index] += 1
    stages: list[range] = []
    first = 0
    for size in sizes:
        stages.append(range(first, first + size))
        first += size
    return tuple(stages)


def stage_weight_bytes(
    spec: ModelSpec, tp: int = 1, pp: int = 1, ep: int = 0, dtype: str = "auto"
) -> tuple[int, ...]:
    """Bytes on each rank of every pipeline stage."""
    stages = []
    each = layers_weight_bytes(spec, tp, ep, dtype)
    for index, layers in enumerate(stage_layers(spec, pp)):
        total = sum(each[layer] for layer in layers)
        if index == 0:
            total += embedding_bytes(spec, tp, dtype)
        if index == pp - 1:
            total += head_bytes(spec, tp, dtype, own_copy=pp > 1)
        stages.append(total)
    return tuple(stages)


def weight_bytes_per_rank(
    spec: ModelSpec, tp: int = 1, pp: int = 1, ep: int = 0, dtype: str = "auto"
) -> int:
    """Bytes on the fullest rank. `ep` 0 = `tp`."""
    return max(stage_weight_bytes(spec, tp, pp, ep, dtype))


def weight_segments(
    spec: ModelSpec, tp: int = 1, ep: int = 0, dtype: str = "auto"
) -> tuple[int, ...]:
    """Bytes of one rank in loading order: embedding, each layer, head.

    For layer-by-layer loading; a stage of a pipeline loads its part of the list.
    """
    layers = layers_weight_bytes(spec, tp, ep, dtype)
    return (embedding_bytes(spec, tp, dtype), *layers, head_bytes(spec, tp, dtype))


def layer_kv_bytes_per_token(layer: Layer, dtype: str, tp: int = 1) -> int:
    """KV bytes of one token in one layer on one of `tp` ranks (`dtype` is a real type).

    Latent attention has one vector for all heads, which every rank must hold; an indexer's keys
    have a type of their own.
    """
    if layer.latent is not None:
        index_bytes = layer.indexer.bytes_per_token if layer.indexer is not None else 0
        return weight_bytes(layer.latent.kv_width, dtype) + index_bytes
    if layer.attention is not None:
        return weight_bytes(layer.attention.kv_width(tp), dtype)
    return 0


def kv_bytes_per_token_layer(spec: ModelSpec, dtype: str, tp: int = 1) -> int:
    """KV bytes of one token in the layer that keeps most, on one of `tp` ranks."""
    return max(layer_kv_bytes_per_token(layer, dtype, tp) for layer in _kinds_of_layers(spec))


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """KV bytes of one token in all layers, windowed ones included, each head once."""
    return kv_bytes_per_token_rank(spec, dtype)


def kv_copies(spec: ModelSpec, dtype: str, tp: int) -> int:
    """Times that `tp` ranks together hold the KV of a token."""
    on_ranks = tp * kv_bytes_per_token_rank(spec, dtype, tp)
    return max(1, on_ranks // max(1, kv_bytes_per_token(spec, dtype)))


def kv_bytes_per_token_rank(spec: ModelSpec, dtype: str, tp: int = 1, pp: int = 1) -> int:
    """KV bytes of one token on the fullest rank, windowed layers included."""
    return max(
        sum(layer_kv_bytes_per_token(spec.layer(index), dtype, tp) for index in stage)
        for stage in stage_layers(spec, pp)
    )


def layer_state_bytes(
    spec: ModelSpec, layer: Layer, dtype: str = "auto", tp: int = 1, draft_tokens: int = 0
) -> int:
    """Bytes of one state of one layer on one rank; 0 without a state."""
    if layer.state is None:
        return 0
    activation_bytes = weight_bytes(1, activation_dtype(spec, dtype))
    state = layer.state
    element_bytes = weight_bytes(1, state.state_dtype) if state.state_dtype else activation_bytes
    return state.state_bytes(activation_bytes, element_bytes, tp, draft_tokens)


def state_bytes(spec: ModelSpec, dtype: str = "auto") -> int:
    """Bytes of the states of a sequence in all layers and heads."""
    return sum(layer_state_bytes(spec, layer, dtype) for layer in spec.special_layers)


def _kinds_of_layers(spec: ModelSpec) -> list[Layer]:
    """The layers, or one of them where all keep the same."""
    if spec.special_layers:
        return list(spec.special_layers)
    return [spec.layer(0)]
