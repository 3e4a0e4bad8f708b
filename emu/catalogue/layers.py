"""One decoder layer of a model: what it computes, what it stores, how many parameters it has.

Owns the structs of a layer's parts (`Attention`, `Indexer`, `StateSpace`, `Mlp`) and their
parameter and cache formulas. A layer may hold any combination of parts: Falcon-H1 runs attention
and a state-space mixer side by side, a Nemotron-H layer is a mixer or an MLP alone. Widths are
elements, parameters are counts on one of `tp` ranks, caches are elements of one token or bytes of
one sequence on one rank. Nothing here knows a `model_type`; `special_layers.py` builds the layers.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from emu.units import ceil_div

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
        return query + key_value + self.output_params(hidden, heads)

    def output_params(self, hidden: int, heads: int) -> int:
        """Parameters of the last product alone."""
        return heads * self.v_head_dim * hidden


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
    inputs: tuple[tuple[int, ...], ...] = ()
    """Widths of the products of a layer's input, as the published code has them, in groups that
    most engines make one product of; empty = all projections are one."""
    output_width: int = 0
    """Channels that the product of the output takes, beside `inputs`."""
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
    groups: int = 1
    """Groups of experts in the order of their numbers, of which a token uses some (DeepSeek-V3)."""
    groups_chosen: int = 1
    """Of these, how many."""

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
    """Parts that a quantized checkpoint keeps wide: "mixer", "mlp", "shared", "experts", and
    "output", the last product of latent attention (that of other mixers is as the "mixer" is)."""

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
