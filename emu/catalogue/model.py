"""The architecture of a language model: the facts that its size, KV and speed follow from.

Owns `ModelSpec` and nothing else; `lookup.py` makes one from a Hugging Face `config.json`,
`sizes.py` derives parameters and bytes from it. A spec is immutable and holds no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from emu.units import ceil_div

# --------------------------------------------------------------------------------------------------
# The vision tower of a multi-modal model: what it weighs, and what an image makes it compute.
#
# Owns the keys of `vision_config`. A tower is a plain transformer over patches, all of which attend
# to each other; some patches together make one token of the prompt. How many is a rule of the
# family, or a key. A tower whose rule is not known weighs, but encodes nothing.

_PATCHES: Final = {
    "qwen2_vl": 4,
    "qwen2_5_vl": 4,
    "qwen3_vl": 4,
    "qwen3_vl_moe": 4,
    "qwen3_5": 4,
    "qwen3_5_moe": 4,
    "gemma3": 16,
    "llama4": 4,
    "kimi_k25": 4,
    "mistral3": 4,
}
"""Patches that become one token of the prompt, by model type (`spatial_merge_size` goes before)."""
_STACKED: Final = ("qwen3_vl", "qwen3_vl_moe")
"""Types whose tower also gives the outputs of some inner layers to the decoder."""
_STACKED_LEVELS: Final = 3
_WINDOW_PATCHES: Final = {"qwen2_5_vl": 64}
"""Types in most of whose layers a patch attends to so many only: windows of 112 pixels."""


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer over the patches of an image."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    patches_per_token: int = 0
    """Patches of one prompt token; 0 = not known."""
    levels: int = 1
    """Vectors of the decoder's width that it makes for a token."""
    window_patches: int = 0
    """What a patch attends to in windowed layers; 0 = there are none."""
    full_layers: int = 0
    """Layers without a window; they are all where there is no window."""
    beside_params: int = 0
    """Parameters besides its layers: of patches, positions and the way to the decoder; 0 = small,
    or not known."""

    @property
    def params(self) -> int:
        """Parameters of its layers."""
        return self.layers * (4 * self.hidden * self.hidden + 2 * self.hidden * self.ffn)


def read_tower(config: Mapping[str, Any]) -> Tower | None:
    """The vision tower that a `config.json` describes; None without one, or without its widths."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None

    def number(*names: str) -> int:
        found = next((vision[name] for name in names if vision.get(name)), 0)
        return found if isinstance(found, int) else 0

    hidden = number("hidden_size", "vt_hidden_size", "embed_dim")
    layers = number("num_hidden_layers", "depth", "vt_num_hidden_layers")
    if not hidden or not layers:
        return None
    kind = str(config.get("model_type", ""))
    merge = vision.get("spatial_merge_size", config.get("spatial_merge_size"))
    patches = merge * merge if isinstance(merge, int) else _PATCHES.get(kind, 0)
    window = _WINDOW_PATCHES.get(kind, 0)
    full = vision.get("fullatt_block_indexes")
    ffn = number("intermediate_size", "vt_intermediate_size") or 4 * hidden
    beside = 0
    if number("projector_input_dim"):  # Llama 4: patches shuffled together, then three products
        side, wide = number("patch_size"), number("projector_output_dim")
        positions = (number("image_size") // side) ** 2 + 1 if side else 0
        beside = hidden * (3 * side * side + positions)
        beside += patches * hidden * number("projector_input_dim") + wide * wide
        beside += number("vision_output_dim") * _decoder_width(config)
    return Tower(
        hidden=hidden,
        layers=layers,
        heads=number("num_heads", "num_attention_heads", "vt_num_attention_heads") or 16,
        ffn=ffn,
        beside_params=beside,
        patches_per_token=patches,
        levels=1 + _STACKED_LEVELS if kind in _STACKED else 1,
        window_patches=window,
        full_layers=(len(full) if isinstance(full, list) else layers // 8) if window else layers,
    )


def _decoder_width(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    width = (text if isinstance(text, Mapping) else config).get("hidden_size", 0)
    return width if isinstance(width, int) else 0


# --------------------------------------------------------------------------------------------------
# One decoder layer of a model: what it computes, what it stores, how many parameters it has.
#
# Owns the structs of a layer's parts (`Attention`, `Indexer`, `StateSpace`, `Mlp`) and their
# parameter and cache formulas. A layer may hold any combination of parts: Falcon-H1 runs attention
# and a state-space mixer side by side, a Nemotron-H layer is a mixer or an MLP alone. Widths are
# elements, parameters are counts on one of `tp` ranks, caches are elements of one token or bytes of
# one sequence on one rank. Nothing here knows a `model_type`; `families.py` builds the layers.

StateKind = Literal["mamba1", "mamba2", "gated_delta", "kda", "lightning", "conv"]
INDEXER_SCALE_BYTES_PER_128: Final = 4
"""An indexer keeps its keys in one byte an element and one 4-byte scale for 128 of them."""


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2/V3): one cached vector for all heads."""

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

    def params(self, hidden: int, heads: int) -> int:
        """Parameters with `heads` heads on this rank; down projections are replicated."""
        query = (
            hidden * self.q_lora_rank + self.q_lora_rank * heads * self.qk_head_dim
            if self.q_lora_rank
            else hidden * heads * self.qk_head_dim
        )
        key_value = hidden * self.kv_width + self.kv_lora_rank * heads * (
            self.qk_nope_head_dim + self.v_head_dim
        )
        return query + key_value + heads * self.v_head_dim * hidden


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """The selector of sparse latent attention (DeepSeek-V3.2): which tokens a query attends to."""

    heads: int
    head_dim: int
    topk_tokens: int
    """A query attends to at most this many tokens."""
    owns_keys: bool = True
    """False: the layer reuses the choice of an earlier layer and has no keys or weights."""

    @property
    def bytes_per_token(self) -> int:
        """Cached bytes of one token, whatever the type of the KV cache; replicated over ranks."""
        if not self.owns_keys:
            return 0
        return self.head_dim + INDEXER_SCALE_BYTES_PER_128 * ceil_div(self.head_dim, 128)

    def params(self, hidden: int, q_lora_rank: int) -> int:
        """Parameters: queries from the latent query, one key head, its norm, head weights."""
        if not self.owns_keys:
            return 0
        key = hidden * self.head_dim + 2 * self.head_dim
        return q_lora_rank * self.heads * self.head_dim + key + hidden * self.heads


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention with its own keys and values (multi-head, grouped or single KV head)."""

    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query and key head."""
    value_dim: int
    """Width of a value head."""
    window_tokens: int = 0
    """Tokens that a query sees, itself included; 0 = all."""
    chunk_tokens: int = 0
    """Tokens of the blocks that attention stays within (Llama 4); 0 = none."""
    holds_kv: bool = True
    """False: the layer reads the cache of another layer."""
    shares_projection: bool = False
    """Keys and values come from one matrix (both are cached)."""
    output_gate: bool = False
    """A gate as wide as the queries multiplies the output (Qwen3-Next)."""
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    """One learned logit for each head."""
    norm_params: int = 0
    """Parameters of the norms of queries and keys."""

    def params(self, hidden: int, tp: int = 1) -> int:
        """Parameters of the matrices."""
        heads, kv_heads = self._split(tp)
        query = hidden * heads * self.head_dim * (2 if self.output_gate else 1)
        key_value = kv_heads * self.head_dim
        if not self.shares_projection:
            key_value += kv_heads * self.value_dim
        return query + hidden * key_value + heads * self.value_dim * hidden

    def small_params(self, hidden: int, tp: int = 1) -> int:
        """Biases, sinks and norms: never quantized."""
        heads, kv_heads = self._split(tp)
        total = self.norm_params + heads * self.sinks + hidden * self.o_bias
        if self.qkv_bias:
            total += heads * self.head_dim + kv_heads * (self.head_dim + self.value_dim)
        return total

    def kv_width(self, tp: int = 1) -> int:
        """Cached elements of one token."""
        return self._split(tp)[1] * (self.head_dim + self.value_dim) if self.holds_kv else 0

    def _split(self, tp: int) -> tuple[int, int]:
        return ceil_div(self.heads, tp), max(1, ceil_div(self.kv_heads, tp))


class StateSpace(msgspec.Struct, frozen=True, kw_only=True):
    """A mixer with a state of fixed size: linear attention, state-space model, short convolution.

    A sequence holds its state whatever its length; with k drafted tokens it holds k + 1 of them.
    """

    kind: StateKind
    conv_channels: int
    """Channels of the convolution before the recurrence; 0 = none."""
    conv_kernel: int
    state_elements: int
    """Elements of the recurrent state; 0 for a plain convolution."""
    state_dtype: str = ""
    """Type of the recurrent state; empty = as the activations."""
    matrix_params: int
    """Parameters of the projections."""
    other_params: int
    """Convolution weights, norms, decay rates: never quantized."""
    flops_per_token: int
    """Operations of the recurrence for one token, without the projections."""

    def state_bytes(
        self, activation_bytes: int, state_bytes: int, tp: int = 1, draft_tokens: int = 0
    ) -> int:
        """Bytes of one state on one rank; a draft lengthens the convolution."""
        rows = self.conv_kernel - 1 + draft_tokens if self.conv_channels else 0
        conv = ceil_div(self.conv_channels, tp) * rows * activation_bytes
        return conv + ceil_div(self.state_elements, tp) * state_bytes


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """A dense feed-forward network."""

    width: int
    gated: bool = True
    bias: bool = False

    def params(self, hidden: int, tp: int = 1) -> int:
        """Parameters of the matrices."""
        return (3 if self.gated else 2) * hidden * ceil_div(self.width, tp)

    def small_params(self, hidden: int, tp: int = 1) -> int:
        """Biases."""
        if not self.bias:
            return 0
        return (2 if self.gated else 1) * ceil_div(self.width, tp) + hidden


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts part of a layer."""

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
    router_scales: int = 0
    """Further parameters of the router (Gemma 4 scales its input and each expert)."""
    bias: bool = False
    """Expert projections have biases (gpt-oss)."""
    hidden: int = 0
    """Width that routed experts work on where it is not the model's (Nemotron 3); 0 = the model's.
    Two matrices then lead there and back."""

    def expert_params(self, hidden: int, *, gated: bool, split: int = 1) -> int:
        """Parameters of the matrices of one routed expert, split over `split` ranks."""
        return (3 if gated else 2) * (self.hidden or hidden) * ceil_div(self.ffn, split)

    def dense_params(self, hidden: int, *, gated: bool, tp: int = 1) -> int:
        """Parameters of shared experts and of the way to the routed ones and back."""
        shared = (3 if gated else 2) * hidden * ceil_div(self.shared_ffn, tp)
        return shared + (2 * hidden * self.hidden if self.hidden else 0)

    def small_params(self, hidden: int) -> int:
        """Router, its biases and the gate of the shared expert: never quantized."""
        return (
            hidden * self.count
            + self.count * self.router_bias
            + hidden * self.shared_gate
            + self.router_scales
        )


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer. Parts that are None are absent."""

    attention: Attention | None = None
    latent: LatentAttention | None = None
    latent_heads: int = 0
    indexer: Indexer | None = None
    state: StateSpace | None = None
    mlp: Mlp | None = None
    experts: Experts | None = None
    experts_gated: bool = True
    norm_params: int = 0
    """Parameters of the norms around the parts."""
    unquantized: frozenset[str] = frozenset()
    """Parts that a quantized checkpoint keeps wide: "mixer", "mlp", "shared", "experts"."""

    @property
    def kind(self) -> str:
        """The layer's mixer in one word, as `emu validate` shows it."""
        if self.state is not None:
            return self.state.kind if self.attention is None else f"{self.state.kind}+attention"
        if self.latent is not None:
            return "sparse latent" if self.indexer is not None else "latent"
        if self.attention is None:
            return "none"
        if self.attention.window_tokens:
            return "window"
        return "chunked" if self.attention.chunk_tokens else "full"


# --- The architecture of a language model ---------------------------------------------------------

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

    def layer(self, layer_index: int) -> Layer:
        """What one layer consists of."""
        if self.special_layers:
            return self.special_layers[layer_index]
        norms = self.norms_per_layer * self.hidden * (2 if self.norm_bias else 1)
        mlp, experts = None, None
        if self.is_moe_layer(layer_index):
            experts = self.experts
        else:
            mlp = Mlp(width=self.ffn, gated=self.gated_mlp, bias=self.mlp_bias)
        attention = None
        if self.latent is None:
            qk_norm = 2 * self.head_dim * self.qk_norm
            qk_norm += (self.heads + self.kv_heads) * self.head_dim * self.wide_qk_norm
            attention = Attention(
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
        else:
            norms += self.latent.kv_lora_rank + self.latent.q_lora_rank
            norms += self.hidden * self.o_bias
        return Layer(
            attention=attention,
            latent=self.latent,
            latent_heads=self.heads if self.latent else 0,
            mlp=mlp,
            experts=experts,
            experts_gated=self.gated_mlp,
            norm_params=norms,
            unquantized=self.unquantized[layer_index] if self.unquantized else frozenset(),
        )

    def is_window_layer(self, layer_index: int) -> bool:
        """Whether a layer's attention sees a window only."""
        return bool(self.window_layers) and self.window_layers[layer_index]
