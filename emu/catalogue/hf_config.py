"""A `ModelSpec` from a Hugging Face `config.json`.

Owns the knowledge of key names and of what a plain `model_type` implies without saying so
(biases, norms, gating, which layers have experts or windows). `families.py` lists the types that
emu knows, `special_layers.py` builds the layers of the unusual ones; anything else is refused,
unless the caller assumes a type. Missing or impossible figures are `InputError`s that name the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from emu.catalogue.expert_groups import expert_groups
from emu.catalogue.families import PLAIN, check_keys
from emu.catalogue.layers import Experts, LatentAttention, Layer
from emu.catalogue.model import ModelSpec, Quantization
from emu.catalogue.reader import HIDDEN, ConfigReader, HfConfig
from emu.catalogue.tower import Tower, read_tower
from emu.errors import InputError

# The first name found counts.
KV_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "num_query_groups",
)
FFN: Final = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_MTP_WITHOUT_KEY: Final = {"qwen3_next": 1}
"""By model type: layers that are published with the weights (`mtp.*`) and not in `config.json`."""
MTP_LAYERS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
EXPERT_COUNT: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k")

QUANTIZED: Final = ("quantization_config", "compression_config")

UNGATED: Final = {
    "opt", "phi", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "falcon", "bloom", "starcoder2",
    "nemotron", "apertus", "arcee",
}  # fmt: skip
LAYER_NORM: Final = (UNGATED - {"apertus", "arcee"}) | {"stablelm", "phimoe", "cohere"}
ALL_BIASED: Final = {"opt", "phi", "gpt2", "gpt_neox", "gpt_bigcode", "bloom"}
ONE_NORM: Final = {"phi", "gptj", "cohere", "cohere2"}  # attention and MLP in parallel
FOUR_NORMS: Final = {"gemma2", "gemma3", "gemma3_text", "glm4"}
QKV_BIAS: Final = {"qwen2", "qwen2_moe", "qwen", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
                   "qwen2_5_vl_text", "mimo"}  # fmt: skip
NO_O_BIAS: Final = {"glm4", "glm4_moe", "seed_oss"}  # `attention_bias` is of q, k and v alone
QK_NORM: Final = {"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe",
                  "qwen3_vl_moe_text", "gemma3", "gemma3_text", "exaone4", "apertus"}  # fmt: skip
WIDE_QK_NORM: Final = {"olmo2", "olmo3"}
TIED_BY_DEFAULT: Final = {"gemma", "gemma2", "gemma3", "gemma3_text", "opt", "gpt2", "gpt_bigcode",
                          "cohere", "cohere2", "gemma4", "gemma4_text"}  # fmt: skip
WINDOW_PATTERN: Final = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4}
"""Types in which every n-th layer is full and the others see a window."""
LAYER_KINDS: Final = frozenset(("full_attention", "attention", "sliding_attention"))
OPT_IN_WINDOW: Final = "use_sliding_window"
"""Qwen's configurations state a window that is off unless this key is true."""


class Published(msgspec.Struct, frozen=True):
    """What is published of a model."""

    name: str
    kind: str
    """Its `model_type`, or the one that it is assumed to be."""
    read: ConfigReader
    tower: Tower | None
    companion: HfConfig | None
    """The content of `hf_quant_config.json`."""

    def stored(self, layers: int) -> Quantization:
        """The types of its weights."""
        if self.companion is None and not any(map(self.read.get, QUANTIZED)):
            return Quantization()
        from emu.catalogue.quantization import read_quantization  # most are as they were trained

        return read_quantization(self.read, layers, self.companion)


def from_hf_config(
    config: HfConfig,
    name: str,
    source: str,
    *,
    assume: str = "",
    companion: HfConfig | None = None,
) -> ModelSpec:
    """The architecture that a `config.json` describes.

    `name` is how reports call the model, `source` where the config came from (for errors).
    `assume` reads an unknown model as this type and drops the keys that the type does not know;
    `companion` is the content of `hf_quant_config.json`. Multi-modal configs are read at their
    `text_config`. InputError: a needed key is missing, has the wrong type, contradicts another
    one, or changes memory or cost in a way that emu does not know.
    """
    read = ConfigReader(_text_keys(config, source), source)
    kind = str(read.get("model_type", "llama"))
    if assume:
        if assume not in PLAIN:
            raise InputError(source, None, "model.assume", f"{assume!r} is no plain model type")
        kind = assume
    layers_of = None if kind in PLAIN else _layers_of(kind)
    if not assume:
        check_keys(read, kind, is_known=kind in PLAIN or layers_of is not None)
    if kind == "dbrx":
        read = ConfigReader(_flat_dbrx(read), source)
    model = Published(name, kind, read, read_tower(config), companion)
    return _plain(model) if layers_of is None else _special(model, layers_of(read))


def _layers_of(kind: str) -> Callable[[ConfigReader], list[Layer]] | None:
    """What builds the layers of an unusual type; None if the type is not known."""
    from emu.catalogue.special_layers import SPECIAL  # most models are plain

    return SPECIAL.get(kind)


def _plain(model: Published) -> ModelSpec:
    """A model of one kind of layer, perhaps with windows or experts in some."""
    read, kind = model.read, model.kind
    experts = _experts(read, kind)
    moe_layers = _moe_layers(read, kind, experts)
    window_layers = _window_layers(read, kind)
    stored = model.stored(read.layers)
    biased = kind in ALL_BIASED
    attention_bias = bool(read.get("attention_bias", read.get("bias", False))) or biased
    return ModelSpec(
        name=model.name,
        source=read.source,
        model_type=kind,
        hidden=read.hidden,
        layers=read.layers,
        heads=read.heads,
        kv_heads=_kv_heads(read, kind),
        head_dim=read.optional("head_dim", "kv_channels") or read.hidden // read.heads,
        ffn=0 if experts is not None and all(moe_layers) else _dense_ffn(read, kind),
        vocab=read.vocab,
        max_position=read.max_position,
        dtype=_dtype(read),
        linear_dtype=stored.linear_dtype,
        expert_dtype=stored.expert_dtype,
        tied_embeddings=bool(read.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        gated_mlp=kind not in UNGATED,
        qkv_bias=attention_bias or kind in QKV_BIAS or bool(read.get("add_qkv_bias")),
        o_bias=bool(read.get("attention_out_bias", attention_bias and kind not in NO_O_BIAS)),
        mlp_bias=bool(read.get("mlp_bias", False)) or biased or kind in ("gptj", "starcoder2"),
        head_bias=bool(read.get("lm_head_bias", kind in ("phi", "gptj"))),
        norm_bias=kind in LAYER_NORM,
        norms_per_layer=_norms(read, kind),
        qk_norm=kind in QK_NORM or (bool(read.get("use_qk_norm", False)) and kind != "minimax_m2"),
        wide_qk_norm=kind in WIDE_QK_NORM
        or (kind == "minimax_m2" and bool(read.get("use_qk_norm", False))),
        wide_router=kind == "minimax_m2",
        attention_sinks=kind == "gpt_oss",
        position_rows=_position_rows(kind, read.max_position),
        latent=_latent(read),
        experts=experts,
        moe_layers=moe_layers if any(moe_layers) else (),
        window=(read.optional("sliding_window") or 0) if window_layers else 0,
        window_layers=window_layers,
        tower=model.tower,
        mtp_layers=_mtp_layers(read, kind),
        unquantized=stored.unquantized,
        published_kv_dtype=stored.kv_cache_dtype,
    )


def _special(model: Published, layers: list[Layer]) -> ModelSpec:
    """A model whose layers differ: the fields of a plain one are those of its widest layers."""
    read, kind = model.read, model.kind
    stored = model.stored(len(layers))
    if stored.unquantized:
        layers = [
            msgspec.structs.replace(layer, unquantized=kept)
            for layer, kept in zip(layers, stored.unquantized, strict=True)
        ]
    with_attention = [layer.attention for layer in layers if layer.attention is not None]
    widest = max(with_attention, key=lambda part: part.kv_width(), default=None)
    experts = next((layer.experts for layer in layers if layer.experts is not None), None)
    windows = [_window_of(layer) for layer in layers]
    return ModelSpec(
        name=model.name,
        source=read.source,
        model_type=kind,
        hidden=read.hidden,
        layers=len(layers),
        heads=read.heads,
        kv_heads=widest.kv_heads if widest else read.heads,
        head_dim=widest.head_dim
        if widest
        else read.optional("head_dim") or read.hidden // read.heads,
        ffn=max((layer.mlp.width for layer in layers if layer.mlp is not None), default=0),
        vocab=read.vocab,
        max_position=read.max_position,
        dtype=_dtype(read),
        linear_dtype=stored.linear_dtype,
        expert_dtype=stored.expert_dtype,
        tied_embeddings=bool(read.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        gated_mlp=kind != "nemotron_h",
        latent=next((layer.latent for layer in layers if layer.latent is not None), None),
        experts=experts,
        moe_layers=tuple(layer.experts is not None for layer in layers) if experts else (),
        window=max(windows),
        window_layers=tuple(map(bool, windows)) if any(windows) else (),
        special_layers=tuple(layers),
        tower=model.tower,
        mtp_layers=_mtp_layers(read, kind),
        published_kv_dtype=stored.kv_cache_dtype,
    )


def _mtp_layers(read: ConfigReader, kind: str) -> int:
    """Layers for multi-token prediction that are published with the model."""
    said = read.optional(*MTP_LAYERS)
    return _MTP_WITHOUT_KEY.get(kind, 0) if said is None else said


def _window_of(layer: Layer) -> int:
    part = layer.attention
    return (part.window_tokens or part.chunk_tokens) if part is not None else 0


def _flat_dbrx(read: ConfigReader) -> dict[str, object]:
    """DBRX keeps attention and experts in tables of their own."""
    attention, ffn = read.table("attn_config"), read.table("ffn_config")
    return {
        **read.config,
        "num_key_value_heads": attention.get("kv_n_heads"),
        "intermediate_size": ffn.get("ffn_hidden_size"),
        "num_experts": ffn.get("moe_num_experts"),
        "num_experts_per_tok": ffn.get("moe_top_k"),
    }


def _text_keys(config: HfConfig, source: str) -> HfConfig:
    """The keys of the decoder: of a multi-modal model, with those of its `text_config`."""
    if not isinstance(config, Mapping):
        raise InputError(source, None, "$", "expected an object with the keys of config.json")
    text = config.get("text_config")
    if isinstance(text, Mapping) and any(key in text for key in HIDDEN):
        return {**{k: v for k, v in config.items() if k != "text_config"}, **text}
    return config


def _kv_heads(read: ConfigReader, kind: str) -> int:
    """Heads of keys and values, which share the query heads evenly."""
    heads, hidden = read.heads, read.hidden
    if read.get("head_dim") is None and _latent(read) is None and hidden % heads:
        raise read.problem("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    kv_heads = _published_kv_heads(read, kind, heads)
    if heads % kv_heads:
        raise read.problem("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    return kv_heads


def _published_kv_heads(read: ConfigReader, kind: str, heads: int) -> int:
    if kind == "falcon":
        if read.get("new_decoder_architecture", False):
            return read.optional(*KV_HEADS) or heads
        return 1 if read.get("multi_query", True) else heads
    if kind == "gpt_bigcode":
        return 1 if read.get("multi_query", True) else heads
    return read.optional(*KV_HEADS) or heads


def _norms(read: ConfigReader, kind: str) -> int:
    if kind == "falcon" and not read.get("new_decoder_architecture", False):
        return 1
    if kind in FOUR_NORMS:
        return 4
    return 1 if kind in ONE_NORM else 2


def _position_rows(kind: str, max_position: int) -> int:
    if kind == "opt":
        return max_position + 2  # OPT keeps two rows for padding
    return max_position if kind in ("gpt2", "gpt_bigcode") else 0


def _dense_ffn(read: ConfigReader, kind: str) -> int:
    if kind == "qwen":  # the first Qwen counts gate and up together
        return read.required(*FFN) // 2
    ffn = read.optional("intermediate_size_mlp", *FFN)  # the first: Llama 4
    if ffn:
        return ffn
    if kind in ("gpt2", "gptj", "gpt_bigcode", "falcon", "bloom"):
        return 4 * read.hidden
    return read.required(*FFN)


def _latent(read: ConfigReader) -> LatentAttention | None:
    if read.optional("kv_lora_rank") in (None, 0):
        return None
    return LatentAttention(
        q_lora_rank=read.optional("q_lora_rank") or 0,
        kv_lora_rank=read.required("kv_lora_rank"),
        qk_nope_head_dim=read.required("qk_nope_head_dim"),
        qk_rope_head_dim=read.required("qk_rope_head_dim"),
        v_head_dim=read.required("v_head_dim"),
    )


def _experts(read: ConfigReader, kind: str) -> Experts | None:
    count = read.optional(*EXPERT_COUNT) or 0
    if count <= 1:
        return None
    groups = expert_groups(read, count)
    return Experts(
        count=count,
        per_token=_experts_per_token(read, count),
        ffn=_expert_ffn(read),
        shared_ffn=_shared_ffn(read),
        shared_gate=kind == "qwen2_moe",
        router_bias=kind in ("gpt_oss", "glm4_moe", "glm4_moe_lite")
        or read.get("topk_method") == "noaux_tc"
        or bool(read.get("use_routing_bias", read.get("moe_use_aux_free", False))),
        bias=kind == "gpt_oss",
        groups=groups.groups,
        groups_chosen=groups.chosen,
    )


def _expert_ffn(read: ConfigReader) -> int:
    """Llama 4 and Mixtral keep the expert's width under the plain key."""
    own = read.optional("moe_intermediate_size", "expert_intermediate_size")
    return own or read.required("intermediate_size", "ffn_dim")


def _shared_ffn(read: ConfigReader) -> int:
    """Width of the experts that every token meets, together."""
    names = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
    count = read.optional(*names, "moe_num_shared_experts") or 0
    return read.optional("shared_expert_intermediate_size") or _expert_ffn(read) * count


def _experts_per_token(read: ConfigReader, count: int) -> int:
    per_token = read.required(*EXPERTS_PER_TOKEN)
    if per_token > count:
        raise read.problem(EXPERTS_PER_TOKEN[0], f"{per_token} is more than {count} experts")
    return per_token


def _moe_layers(read: ConfigReader, kind: str, experts: Experts | None) -> tuple[bool, ...]:
    """Dense first layers (DeepSeek), every n-th layer (Qwen, Llama 4), single exceptions."""
    if experts is None:
        return ()
    first_dense = read.optional("first_k_dense_replace", "moe_layer_start_index") or 0
    step = read.optional("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval") or 1
    dense = read.indices("mlp_only_layers")
    end = read.optional("moe_layer_end_index")
    if end is not None:
        dense |= set(range(end + 1, read.layers))
    from_end = kind != "deepseek_v2" and kind != "deepseek_v3"
    return tuple(
        index >= first_dense
        and index not in dense
        and ((index + 1) % step == 0 if from_end else index % step == 0)
        for index in range(read.layers)
    )


def _window_layers(read: ConfigReader, kind: str) -> tuple[bool, ...]:
    """For each layer whether it has a window; empty if none has."""
    layers = read.layers
    listed = read.listed("layer_types", layers, LAYER_KINDS)
    window = read.optional("sliding_window") or 0
    if not window or read.get(OPT_IN_WINDOW, not kind.startswith("qwen")) is False:
        if listed and "sliding_attention" in listed and not kind.startswith("qwen"):
            raise read.problem("sliding_window", "the key is missing for sliding_attention layers")
        return ()
    if listed:
        flags = tuple(entry == "sliding_attention" for entry in listed)
    elif kind in ("gpt_oss", "gemma2"):  # local first, then alternating
        flags = tuple(index % 2 == 0 for index in range(layers))
    elif kind in WINDOW_PATTERN:
        flags = _every_nth_is_full(read, kind, layers)
    elif kind.startswith("qwen"):
        first = read.optional("max_window_layers") or 0
        flags = tuple(index >= first for index in range(layers))
    else:
        flags = (True,) * layers
    return flags if any(flags) else ()


def _every_nth_is_full(read: ConfigReader, kind: str, layers: int) -> tuple[bool, ...]:
    pattern = read.get("sliding_window_pattern", WINDOW_PATTERN[kind])
    every = len(pattern) if isinstance(pattern, str) else pattern  # EXAONE 4 writes "LLLG"
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise read.problem("sliding_window_pattern", f"expected a whole number, got {pattern!r}")
    return tuple((index + 1) % every != 0 for index in range(layers))


def _dtype(read: ConfigReader) -> str:
    published = str(read.get("torch_dtype", read.get("dtype", "bfloat16"))).removeprefix("torch.")
    # Serving engines run float32 checkpoints in half precision; so does every size quoted.
    return {"float16": "float16", "half": "float16", "float32": "float16"}.get(
        published, "bfloat16"
    )
