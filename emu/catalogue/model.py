"""The architecture of a language model: the facts that its size, KV and speed follow from.

Owns `ModelSpec`; `hf_config.py` makes one from a Hugging Face `config.json`, `sizes.py` derives
parameters and bytes from it. A spec is immutable and holds no weights.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.layers import Attention, Experts, LatentAttention, Layer, Mlp
from emu.catalogue.tower import Tower

# Bits that 1,024 weights take in memory, scales included, so that all sizes stay integers.
# mxfp4: 4-bit values with one 8-bit scale for 32 of them (OCP Microscaling 1.0).
# int4: groups of 128 with a 16-bit scale and a 4-bit zero point (the AWQ and GPTQ default).
# int4_g32: groups of 32 with a 16-bit scale. nvfp4: groups of 16 with an 8-bit scale.
# fp8_block: one 32-bit scale for a block of 128 x 128. int8_wo: groups of 128 with a 16-bit scale.
BITS_PER_1024: Final = {
    "float32": 32 * 1024,
    "float16": 16 * 1024,
    "bfloat16": 16 * 1024,
    "fp8": 8 * 1024,
    "fp8_block": 8 * 1024 + 2,
    "int8": 8 * 1024,
    "mxfp4": 4352,
    "int4": 4256,
    "int4_g32": 4608,
    "nvfp4": 4608,
    "int8_wo": 8 * 1024 + 128,
    "nvfp4_wo": 4608,
}
"""Every type of weights that emu knows; `_wo` = stored narrow, multiplied in 16 bits."""

UNITS: Final = {
    "float32": "tf32",
    "float16": "half",
    "bfloat16": "half",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "int8": "int8",
    "mxfp4": "fp4",
    "int4": "half",
    "int4_g32": "half",
    "nvfp4": "fp4",
    "int8_wo": "half",
    "nvfp4_wo": "half",
}
"""Units that multiply each type of weights, on GPUs that have them; else weights are widened while
they are loaded, and multiplied in half precision."""


class Quantization(msgspec.Struct, frozen=True):
    """What a checkpoint stores its matrices as; empty types = as its activations."""

    linear_dtype: str = ""
    expert_dtype: str = ""
    unquantized: tuple[frozenset[str], ...] = ()
    """For each layer the parts that stay wide; empty = none."""
    kv_cache_dtype: str = ""


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
    """Each head's query and key are normalized (Qwen3, Gemma 3)."""
    wide_qk_norm: bool = False
    """Queries and keys are normalized over all heads together (OLMo 2, MiniMax-M2)."""
    wide_router: bool = False
    """The router of experts multiplies in 32 bits (MiniMax-M2)."""
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
    special_layers: tuple[Layer, ...] = ()
    """Each layer of a model whose layers the fields above cannot describe; empty = they can."""
    extra_params: int = 0
    """Parameters of the language model outside its layers, embedding and head."""
    tower: Tower | None = None
    """The vision tower: held in memory, used by images."""
    mtp_layers: int = 0
    """Published layers for multi-token prediction; loaded only to draft with."""
    unquantized: tuple[frozenset[str], ...] = ()
    """For each layer the parts that a quantized checkpoint keeps wide; empty = none."""
    published_kv_dtype: str = ""
    """Type of the KV cache that a quantized checkpoint asks for."""

    @property
    def tower_params(self) -> int:
        """Parameters of the vision tower."""
        return 0 if self.tower is None else self.tower.params + self.tower.beside_params

    @property
    def moe_layer_count(self) -> int:
        """Layers with experts."""
        return sum(self.moe_layers)

    def is_moe_layer(self, layer_index: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return bool(self.moe_layers) and self.moe_layers[layer_index]

    @property
    def is_hybrid(self) -> bool:
        """Whether layers keep different caches: windows, chunks, states or none at all."""
        return bool(self.window_layers) or any(
            layer.state is not None
            or layer.indexer is not None
            or (layer.attention is None and layer.latent is None)
            or (
                layer.attention is not None
                and (layer.attention.window_tokens or layer.attention.chunk_tokens)
            )
            for layer in self.special_layers
        )

    def _attention(self, layer_index: int) -> Attention:
        qk_norm = 2 * self.head_dim * self.qk_norm
        qk_norm += (self.heads + self.kv_heads) * self.head_dim * self.wide_qk_norm
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            window_tokens=self.window if self.is_window_layer(layer_index) else 0,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            sinks=self.attention_sinks,
            norm_params=qk_norm,
        )

    def layer(self, layer_index: int) -> Layer:
        """What one layer consists of."""
        if self.special_layers:
            return self.special_layers[layer_index]
        norms = self.norms_per_layer * self.hidden * (2 if self.norm_bias else 1)
        if self.latent is not None:
            norms += self.latent.kv_lora_rank + self.latent.q_lora_rank
            norms += self.hidden * self.o_bias
        has_experts = self.is_moe_layer(layer_index)
        mlp = Mlp(width=self.ffn, gated=self.gated_mlp, bias=self.mlp_bias)
        return Layer(
            attention=self._attention(layer_index) if self.latent is None else None,
            latent=self.latent,
            latent_heads=self.heads if self.latent else 0,
            mlp=None if has_experts else mlp,
            experts=self.experts if has_experts else None,
            experts_gated=self.gated_mlp,
            norm_params=norms,
            unquantized=self.kept_wide(layer_index),
        )

    def kept_wide(self, layer_index: int) -> frozenset[str]:
        """The parts of a layer that a quantized checkpoint keeps wide."""
        if self.special_layers:
            return self.special_layers[layer_index].unquantized
        return self.unquantized[layer_index] if self.unquantized else frozenset()

    def is_window_layer(self, layer_index: int) -> bool:
        """Whether a layer's attention sees a window only."""
        return bool(self.window_layers) and self.window_layers[layer_index]
