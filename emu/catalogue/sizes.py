"""Parameters and bytes of a model, from its architecture alone.

Pure functions of `ModelSpec`; the exact physical sizes. (Simulators that this project is
compared with count some of them otherwise; their rules live in `emu/kv/memory.py`.)

Types: `dtype` "auto" means as published. Any other type applies to the matrices of the layers;
embeddings, head, norms, router and biases stay at least 16 bits wide, as engines keep them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.model import BITS_PER_1024, ModelSpec
from emu.units import ceil_div

HALF: Final = ("float16", "bfloat16", "float32")


class LayerSize(msgspec.Struct, frozen=True):
    """Parameters of one layer on one rank, by what they are stored as."""

    linear: int
    """Attention, dense MLP and shared experts."""
    experts: int
    """Routed experts."""
    other: int
    """Norms, biases, router, sinks: never quantised."""


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
    """Type of the KV cache: "auto" follows the activations (as vLLM does)."""
    return activation_dtype(spec, dtype) if kv_cache_dtype == "auto" else kv_cache_dtype


def kv_heads_per_rank(spec: ModelSpec, tp: int) -> int:
    """KV heads of one rank; replicated where there are more ranks than heads."""
    return max(1, ceil_div(spec.kv_heads, tp))


# --- parameters ---------------------------------------------------------------------------------


def attention_params(spec: ModelSpec, tp: int = 1) -> int:
    """Parameters of one layer's attention matrices on one of `tp` ranks."""
    heads = ceil_div(spec.heads, tp)
    if spec.latent is None:
        width = spec.head_dim
        return spec.hidden * width * (2 * heads + 2 * kv_heads_per_rank(spec, tp))
    mla = spec.latent
    # Down projections are replicated, only what has a head dimension is split.
    query = (
        spec.hidden * mla.q_lora_rank + mla.q_lora_rank * heads * mla.qk_head_dim
        if mla.q_lora_rank
        else spec.hidden * heads * mla.qk_head_dim
    )
    key_value = spec.hidden * mla.kv_width + mla.kv_lora_rank * heads * (
        mla.qk_nope_head_dim + mla.v_head_dim
    )
    return query + key_value + heads * mla.v_head_dim * spec.hidden


def mlp_params(spec: ModelSpec, ffn: int, tp: int = 1) -> int:
    """Parameters of a dense MLP (or of one expert) of a width on one of `tp` ranks."""
    return (3 if spec.gated_mlp else 2) * spec.hidden * ceil_div(ffn, tp)


def layer_size(spec: ModelSpec, layer_index: int, tp: int = 1, ep: int = 0) -> LayerSize:
    """Parameters of one layer on one rank. `ep` 0 = as many ranks as `tp`.

    Whole experts go to `ep` ranks; what `tp` has beyond that splits each expert.
    """
    linear = attention_params(spec, tp)
    other = _norm_params(spec) + _attention_bias_params(spec, tp)
    routed = 0
    if spec.is_moe_layer(layer_index):
        assert spec.experts is not None
        moe = spec.experts
        ep = ep or tp
        per_rank, split = ceil_div(moe.count, ep), max(1, tp // ep)
        routed = per_rank * mlp_params(spec, moe.ffn, split)
        linear += mlp_params(spec, moe.shared_ffn, tp)
        other += spec.hidden * moe.count + moe.count * moe.router_bias
        other += spec.hidden * moe.shared_gate
        if moe.bias:
            other += per_rank * (2 * ceil_div(moe.ffn, split) + spec.hidden)
    else:
        linear += mlp_params(spec, spec.ffn, tp)
        if spec.mlp_bias:
            up = (2 if spec.gated_mlp else 1) * ceil_div(spec.ffn, tp)
            other += up + spec.hidden
    return LayerSize(linear, routed, other)


def _norm_params(spec: ModelSpec) -> int:
    params = spec.norms_per_layer * spec.hidden * (2 if spec.norm_bias else 1)
    if spec.qk_norm:
        params += 2 * spec.head_dim
    if spec.latent is not None:
        params += spec.latent.kv_lora_rank + spec.latent.q_lora_rank
    return params


def _attention_bias_params(spec: ModelSpec, tp: int) -> int:
    params = 0
    heads = ceil_div(spec.heads, tp)
    if spec.qkv_bias and spec.latent is None:
        params += (heads + 2 * kv_heads_per_rank(spec, tp)) * spec.head_dim
    if spec.o_bias:
        params += spec.hidden
    if spec.attention_sinks:
        params += heads
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
    """All parameters, as the published figure counts them."""
    layers = sum(sum(_triple(layer_size(spec, index))) for index in range(spec.layers))
    return embedding_params(spec) + layers + head_params(spec)


def active_parameter_count(spec: ModelSpec) -> int:
    """Parameters that one token passes: routed experts count only as far as chosen."""
    total = parameter_count(spec)
    if spec.experts is None:
        return total
    moe = spec.experts
    one = mlp_params(spec, moe.ffn) + (2 * moe.ffn + spec.hidden) * moe.bias
    return total - spec.moe_layer_count * (moe.count - moe.per_token) * one


def _triple(size: LayerSize) -> tuple[int, int, int]:
    return size.linear, size.experts, size.other


# --- bytes of weights ---------------------------------------------------------------------------


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


def embedding_bytes(spec: ModelSpec, tp: int = 1, dtype: str = "auto") -> int:
    """Bytes of the embedding on one rank."""
    return weight_bytes(embedding_params(spec, tp), activation_dtype(spec, dtype))


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
    for index, layers in enumerate(stage_layers(spec, pp)):
        total = sum(layer_weight_bytes(spec, layer, tp, ep, dtype) for layer in layers)
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
    layers = (layer_weight_bytes(spec, index, tp, ep, dtype) for index in range(spec.layers))
    return (embedding_bytes(spec, tp, dtype), *layers, head_bytes(spec, tp, dtype))


# --- bytes of KV --------------------------------------------------------------------------------


def kv_bytes_per_token_layer(spec: ModelSpec, dtype: str, tp: int = 1) -> int:
    """KV bytes of one token in one layer on one of `tp` ranks (`dtype` is a real type).

    Latent attention has one vector for all heads, which every rank must hold.
    """
    width = (
        spec.latent.kv_width
        if spec.latent is not None
        else 2 * kv_heads_per_rank(spec, tp) * spec.head_dim
    )
    return weight_bytes(width, dtype)


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """KV bytes of one token in all layers, each head once (`dtype` is a real type)."""
    return spec.layers * kv_bytes_per_token_layer(spec, dtype)


def kv_bytes_per_token_rank(spec: ModelSpec, dtype: str, tp: int = 1, pp: int = 1) -> int:
    """KV bytes of one token on the fullest rank."""
    layers = max(len(stage) for stage in stage_layers(spec, pp))
    return layers * kv_bytes_per_token_layer(spec, dtype, tp)
