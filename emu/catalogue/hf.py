"""A `ModelSpec` from a Hugging Face `config.json`.

Owns the knowledge of key names and of what a `model_type` implies without saying so (biases,
norms, gating, which layers have experts or windows). Knows the families named below; any other
type is read as a Llama-like decoder, which is what nearly all new ones are. Missing or
impossible figures are `InputError`s that name the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from emu.catalogue.model import Experts, LatentAttention, ModelSpec
from emu.errors import InputError

# The first name found counts.
HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "model_dim")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "num_query_groups",
)
FFN: Final = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
VOCAB: Final = ("vocab_size", "padded_vocab_size")
POSITIONS: Final = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
EXPERT_COUNT: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k")

UNGATED: Final = {
    "opt", "phi", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "falcon", "bloom", "mpt", "starcoder2",
}  # fmt: skip
LAYER_NORM: Final = UNGATED | {"stablelm", "phimoe", "cohere"}
ALL_BIASED: Final = {"opt", "phi", "gpt2", "gpt_neox", "gpt_bigcode", "bloom"}
ONE_NORM: Final = {"phi", "gptj", "cohere"}  # attention and MLP run in parallel after one norm
FOUR_NORMS: Final = {"gemma2", "gemma3", "gemma3_text"}
QKV_BIAS: Final = {"qwen2", "qwen2_moe", "qwen"}
QK_NORM: Final = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text"}
TIED_BY_DEFAULT: Final = {"gemma", "gemma2", "gemma3", "gemma3_text", "opt", "gpt2", "gpt_bigcode"}
QUANTISATION: Final = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
    "awq": "int4",
    "gptq": "int4",
}


class _Reader:
    """Looks keys up under any of their names and judges them."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def problem(self, field: str, problem: str) -> InputError:
        return InputError(self.source, None, field, problem)

    def optional(self, *names: str) -> int | None:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, list):  # a few configs give one value for each layer
                value = max(value, default=None)
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.problem(name, f"expected a whole number, got {value!r}")
            if not 0 <= value <= 1 << 40:
                raise self.problem(name, f"{value} is out of range")
            return value
        return None

    def required(self, *names: str) -> int:
        value = self.optional(*names)
        if value is None:
            also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.problem(names[0], f"the key is missing{also}")
        if value == 0:
            raise self.problem(names[0], "must not be 0")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.config.get(name)
        return default if value is None else value


def from_hf_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """The architecture that a `config.json` describes.

    `name` is how reports call the model, `source` where the config came from (for errors).
    Multi-modal configs are read at their `text_config`. InputError: a needed key is missing,
    has the wrong type, or contradicts another one.
    """
    read = _Reader(_text_keys(config, source), source)
    kind = str(read.get("model_type", "llama"))
    hidden = read.required(*HIDDEN)
    layers = read.required(*LAYERS)
    latent = _latent(read)
    heads, kv_heads = _heads(read, kind, hidden, latent)
    experts = _experts(read, kind)
    moe_layers = _moe_layers(read, kind, layers, experts)
    window, window_layers = _windows(read, kind, layers)
    max_position = read.optional(*POSITIONS) or 2048
    linear_dtype, expert_dtype = _quantisation(read)
    biased = kind in ALL_BIASED
    attention_bias = bool(read.get("attention_bias", read.get("bias", False))) or biased
    return ModelSpec(
        name=name,
        source=source,
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.optional("head_dim", "kv_channels") or hidden // heads,
        ffn=_dense_ffn(read, kind, hidden, experts is not None and all(moe_layers)),
        vocab=read.required(*VOCAB),
        max_position=max_position,
        dtype=_dtype(read),
        linear_dtype=linear_dtype,
        expert_dtype=expert_dtype,
        tied_embeddings=bool(read.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        gated_mlp=kind not in UNGATED,
        qkv_bias=attention_bias or kind in QKV_BIAS or bool(read.get("add_qkv_bias")),
        o_bias=attention_bias,
        mlp_bias=bool(read.get("mlp_bias", False)) or biased or kind in ("gptj", "starcoder2"),
        head_bias=bool(read.get("lm_head_bias", kind in ("phi", "gptj"))),
        norm_bias=kind in LAYER_NORM,
        norms_per_layer=_norms(read, kind),
        qk_norm=kind in QK_NORM or bool(read.get("use_qk_norm", False)),
        attention_sinks=kind == "gpt_oss",
        position_rows=_position_rows(kind, max_position),
        latent=latent,
        experts=experts,
        moe_layers=moe_layers if any(moe_layers) else (),
        window=window,
        window_layers=window_layers,
    )


def _text_keys(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The keys of the decoder: of a multi-modal model, with those of its `text_config`."""
    if not isinstance(config, Mapping):
        raise InputError(source, None, "$", "expected an object with the keys of config.json")
    text = config.get("text_config")
    if isinstance(text, Mapping) and any(key in text for key in HIDDEN):
        return {**{k: v for k, v in config.items() if k != "text_config"}, **text}
    return config


def _heads(
    read: _Reader, kind: str, hidden: int, latent: LatentAttention | None
) -> tuple[int, int]:
    """Query heads and KV heads."""
    heads = read.required(*HEADS)
    kv_heads = _kv_heads(read, kind, heads)
    if read.get("head_dim") is None and latent is None and hidden % heads:
        raise read.problem("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    if heads % kv_heads:
        raise read.problem("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    return heads, kv_heads


def _kv_heads(read: _Reader, kind: str, heads: int) -> int:
    if kind == "falcon":
        if read.get("new_decoder_architecture", False):
            return read.optional(*KV_HEADS) or heads
        return 1 if read.get("multi_query", True) else heads
    if kind == "gpt_bigcode":
        return 1 if read.get("multi_query", True) else heads
    return read.optional(*KV_HEADS) or heads


def _norms(read: _Reader, kind: str) -> int:
    if kind == "falcon" and not read.get("new_decoder_architecture", False):
        return 1
    if kind in FOUR_NORMS:
        return 4
    return 1 if kind in ONE_NORM else 2


def _position_rows(kind: str, max_position: int) -> int:
    if kind == "opt":
        return max_position + 2  # OPT keeps two rows for padding
    return max_position if kind in ("gpt2", "gpt_bigcode") else 0


def _dense_ffn(read: _Reader, kind: str, hidden: int, only_experts: bool) -> int:
    if only_experts:
        return 0
    if kind == "qwen":  # the first Qwen counts gate and up together
        return read.required(*FFN) // 2
    ffn = read.optional("intermediate_size_mlp", *FFN)  # the first: Llama 4
    if ffn:
        return ffn
    if kind in ("gpt2", "gptj", "gpt_bigcode", "falcon", "bloom"):
        return 4 * hidden
    return read.required(*FFN)


def _latent(read: _Reader) -> LatentAttention | None:
    if read.optional("kv_lora_rank") in (None, 0):
        return None
    return LatentAttention(
        q_lora_rank=read.optional("q_lora_rank") or 0,
        kv_lora_rank=read.required("kv_lora_rank"),
        qk_nope_head_dim=read.required("qk_nope_head_dim"),
        qk_rope_head_dim=read.required("qk_rope_head_dim"),
        v_head_dim=read.required("v_head_dim"),
    )


def _experts(read: _Reader, kind: str) -> Experts | None:
    count = read.optional(*EXPERT_COUNT) or 0
    if count <= 1:
        return None
    per_token = read.required(*EXPERTS_PER_TOKEN)
    if per_token > count:
        raise read.problem(EXPERTS_PER_TOKEN[0], f"{per_token} is more than {count} experts")
    ffn = read.optional("moe_intermediate_size", "expert_intermediate_size")
    # Llama 4 and Mixtral keep the expert's width under the plain key.
    ffn = ffn or read.required("intermediate_size", "ffn_dim")
    shared = read.optional("shared_expert_intermediate_size") or 0
    if not shared:
        shared = ffn * (read.optional("n_shared_experts", "num_shared_experts") or 0)
    if kind == "llama4_text" or kind == "llama4":
        shared = ffn
    return Experts(
        count=count,
        per_token=per_token,
        ffn=ffn,
        shared_ffn=shared,
        shared_gate=kind == "qwen2_moe",
        router_bias=kind == "gpt_oss" or read.get("topk_method") == "noaux_tc",
        bias=kind == "gpt_oss",
    )


def _moe_layers(read: _Reader, kind: str, layers: int, experts: Experts | None) -> tuple[bool, ...]:
    """Dense first layers (DeepSeek), every n-th layer (Qwen, Llama 4), single exceptions."""
    if experts is None:
        return ()
    first_dense = read.optional("first_k_dense_replace") or 0
    step = read.optional("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    dense = set(read.get("mlp_only_layers", []))
    from_end = kind != "deepseek_v2" and kind != "deepseek_v3"
    return tuple(
        index >= first_dense
        and index not in dense
        and ((index + 1) % step == 0 if from_end else index % step == 0)
        for index in range(layers)
    )


def _windows(read: _Reader, kind: str, layers: int) -> tuple[int, tuple[bool, ...]]:
    window = read.optional("sliding_window") or 0
    if not window or read.get("use_sliding_window", True) is False:
        return 0, ()
    listed = read.get("layer_types")
    if listed:
        if len(listed) != layers:
            raise read.problem("layer_types", f"{len(listed)} entries for {layers} layers")
        flags = tuple(entry == "sliding_attention" for entry in listed)
    elif kind in ("gpt_oss", "gemma2"):  # local first, then alternating
        flags = tuple(index % 2 == 0 for index in range(layers))
    elif kind.startswith("gemma3"):
        pattern = read.optional("sliding_window_pattern") or 6
        flags = tuple((index + 1) % pattern != 0 for index in range(layers))
    elif kind.startswith("qwen"):
        first = read.optional("max_window_layers") or 0
        flags = tuple(index >= first for index in range(layers))
    else:
        flags = (True,) * layers
    return (window, flags) if any(flags) else (0, ())


def _dtype(read: _Reader) -> str:
    published = str(read.get("torch_dtype", read.get("dtype", "bfloat16"))).removeprefix("torch.")
    # Serving engines run float32 checkpoints in half precision; so does every size quoted.
    return {"float16": "float16", "half": "float16", "float32": "float16"}.get(
        published, "bfloat16"
    )


def _quantisation(read: _Reader) -> tuple[str, str]:
    """Types of published linear layers and experts; empty = as `dtype`."""
    table = read.get("quantization_config")
    if not isinstance(table, Mapping):
        return "", ""
    method = str(table.get("quant_method", ""))
    stored = QUANTISATION.get(method, "")
    if method == "gptq" and table.get("bits") == 8:
        stored = "int8"
    if stored == "mxfp4":  # only the experts of gpt-oss are stored so
        return "", stored
    return stored, stored
