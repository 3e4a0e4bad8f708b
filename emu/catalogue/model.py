"""The architecture of a language model: the facts that its size, KV and speed follow from.

Owns `ModelSpec` and nothing else; `hf.py` makes one from a Hugging Face `config.json`,
`sizes.py` derives parameters and bytes from it. A spec is immutable and holds no weights.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Bits that 1,024 weights take in memory, scales included, so that all sizes stay integers.
# mxfp4: 4-bit values with one 8-bit scale for 32 of them (OCP Microscaling 1.0).
# int4: groups of 128 with a 16-bit scale and a 4-bit zero point (the AWQ and GPTQ default).
BITS_PER_1024: Final = {
    "float32": 32 * 1024,
    "float16": 16 * 1024,
    "bfloat16": 16 * 1024,
    "fp8": 8 * 1024,
    "int8": 8 * 1024,
    "mxfp4": 4352,
    "int4": 4256,
}


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2/V3); plain attention has none of it."""

    q_lora_rank: int
    """0 = queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def kv_width(self) -> int:
        """Cached elements per token and layer: the latent vector and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or (expanded) key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts part of a model."""

    count: int
    per_token: int
    ffn: int
    """Intermediate width of one routed expert."""
    shared_ffn: int = 0
    """Summed intermediate width of the experts that every token passes; 0 = none."""
    shared_gate: bool = False
    """The shared expert has a sigmoid gate of its own (Qwen2-MoE)."""
    router_bias: bool = False
    """The router has one bias (or score correction) for each expert."""
    bias: bool = False
    """Expert projections have biases (gpt-oss)."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model. Widths are elements, counts are counts."""

    name: str
    source: str
    """Where the figures come from: a file, or the catalogue."""
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Intermediate width of a dense layer; 0 where every layer has experts."""
    vocab: int
    max_position: int
    dtype: str = "bfloat16"
    """Type in which activations, norms and embeddings were published."""
    linear_dtype: str = ""
    """Type of the published linear layers where it differs (DeepSeek-V3: fp8)."""
    expert_dtype: str = ""
    """Type of the published routed experts where it differs (gpt-oss: mxfp4)."""
    tied_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    """LayerNorm with a bias instead of RMSNorm."""
    norms_per_layer: int = 2
    final_norm: bool = True
    qk_norm: bool = False
    """Each head's query and key are normalised (Qwen3, Gemma 3)."""
    attention_sinks: bool = False
    """One learnt logit for each head (gpt-oss)."""
    position_rows: int = 0
    """Rows of a learnt position embedding (OPT, GPT-2); 0 = rotary."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    moe_layers: tuple[bool, ...] = ()
    """For each layer whether its MLP is a mixture of experts; empty = no layer."""
    window: int = 0
    """Tokens that a sliding-window layer looks back on; 0 = none."""
    window_layers: tuple[bool, ...] = ()
    """For each layer whether it is a sliding-window layer; empty = no layer."""

    @property
    def moe_layer_count(self) -> int:
        """Layers with experts."""
        return sum(self.moe_layers)

    @property
    def window_layer_count(self) -> int:
        """Layers whose attention sees a window only."""
        return sum(self.window_layers)

    def is_moe_layer(self, layer_index: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return bool(self.moe_layers) and self.moe_layers[layer_index]

    def is_window_layer(self, layer_index: int) -> bool:
        """Whether a layer's attention sees a window only."""
        return bool(self.window_layers) and self.window_layers[layer_index]
