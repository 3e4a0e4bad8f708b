"""The model types that emu knows, and which keys each one lists.

A type is *plain* (one kind of layer, perhaps with windows or experts in some: `hf_config.py` reads
it into the fields of a `ModelSpec`), *special* (a function of `special_layers.py` builds its layers
one by one) or *refused* with a reason. A key that changes memory or cost is an error in a type that
does not list it, so that a figure is right or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.catalogue.reader import ConfigReader

PLAIN: Final = frozenset(
    (
        "llama", "mistral", "mixtral", "ministral", "ministral3", "mistral3", "qwen", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
        "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text",
        "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "phi", "phi3", "phimoe",
        "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "opt", "gpt2", "gpt_neox", "gptj",
        "gpt_bigcode", "falcon", "bloom", "starcoder2", "stablelm", "internlm", "internlm2",
        "internlm3", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "exaone4", "glm4",
        "glm4_moe", "glm4_moe_lite", "minimax_m2", "ernie4_5", "ernie4_5_moe",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss", "apertus", "smollm3", "granite",
        "granitemoe", "nemotron", "arcee", "dbrx", "mimo",
    )
)  # fmt: skip
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "deberta-v2", "electra"),
            "an encoder generates no tokens",
        ),
        **dict.fromkeys(
            ("t5", "bart", "mt5", "whisper", "pegasus", "mbart"),
            "models with an encoder and a decoder are not modeled",
        ),
        **dict.fromkeys(("llada", "dream"), "diffusion language models are not modeled"),
        "mllama": "cross-attention layers are not modeled",
        "deepseek_v4": "its compressed attention is not modeled",
        "minimax_m3": "its block-sparse attention is not modeled",
        "kimi_k3": "its experts of another width are not modeled",
        "zamba2": "its shared attention blocks are not modeled",
        "gemma3n": "its per-layer inputs and shared KV are not modeled",
        "longcat_flash": "its double layers and zero experts are not modeled",
        "arctic": "its dense layers beside experts are not modeled",
        "step3": "its factorized attention is not modeled",
        "nemotron-nas": "layers of different widths are not modeled",
        "mamba": "models without attention are not modeled",
        "falcon_mamba": "models without attention are not modeled",
        "mamba2": "models without attention are not modeled",
    }
)
# Keys that change memory or cost, and the types whose rules read them. A value of None, False, 0
# or an empty list says that the feature is off.
QWEN_LINEAR: Final = frozenset(
    ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
)
SPARSE_LATENT: Final = frozenset(("deepseek_v32", "glm_moe_dsa"))
_MAMBA: Final = frozenset(("nemotron_h", "jamba", "bamba", "falcon_h1", "granitemoehybrid"))
GUARDED: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "index_topk": SPARSE_LATENT,
        "index_n_heads": SPARSE_LATENT,
        "compress_ratios": frozenset(),
        "linear_attn_config": frozenset(("kimi_linear",)),
        "sparse_attention_config": frozenset(),
        "use_cla": frozenset(),
        "num_kv_shared_layers": frozenset(),
        "hidden_size_per_layer_input": frozenset(),
        "block_configs": frozenset(),
        "attention_chunk_size": frozenset(("llama4", "llama4_text", "mimo_v2_flash")),
        "hybrid_override_pattern": frozenset(("nemotron_h",)),
        "layers_block_type": frozenset(("nemotron_h",)),
        "hybrid_layer_pattern": frozenset(("mimo_v2_flash",)),
        "attn_layer_period": frozenset(("jamba",)),
        "attn_layer_indices": frozenset(("bamba",)),
        "attn_type_list": frozenset(("minimax",)),
        "conv_L_cache": frozenset(("lfm2", "lfm2_moe")),
        "moe_latent_size": frozenset(("nemotron_h",)),
        "routed_expert_hidden_size": frozenset(),
        "zero_expert_num": frozenset(),
        "share_q_dim": frozenset(),
        "expert_dtype": frozenset(),
        "use_bidirectional_attention": frozenset(("gemma4", "gemma4_text")),
        "linear_conv_kernel_dim": QWEN_LINEAR,
        "linear_num_key_heads": QWEN_LINEAR,
        "global_head_dim": frozenset(("gemma4", "gemma4_text")),
    }
)
GUARDED_PREFIXES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"mamba_": _MAMBA | QWEN_LINEAR, "ssm_": _MAMBA}
)


def check_keys(read: ConfigReader, kind: str, *, is_known: bool) -> None:
    """Refuse what emu would silently get wrong: types and keys without a rule.

    `is_known`: there is a rule for the layers of this type.
    """
    if kind in REFUSED:
        raise read.problem("model_type", f"{kind!r}: {REFUSED[kind]}")
    if read.get("is_encoder_decoder", False):
        raise read.problem("is_encoder_decoder", "encoder-decoder models are not modeled")
    if not is_known:
        raise read.problem(
            "model_type",
            f"unknown architecture {kind!r}: its KV cache and cost are not known to emu; "
            'model.assume = "llama" reads it as a plain decoder',
        )
    for key, value in read.config.items():
        known = GUARDED.get(key)
        if known is None:
            known = next(
                (types for prefix, types in GUARDED_PREFIXES.items() if key.startswith(prefix)),
                None,
            )
        if known is not None and kind not in known and not _is_off(key, value):
            raise read.problem(key, f"is not known of model_type {kind!r}")


def _is_off(key: str, value: object) -> bool:
    """Whether a guarded key says that its feature is not used."""
    if key == "attn_type_list":  # 1 = softmax attention
        return isinstance(value, list) and all(entry == 1 for entry in value)
    return value in (None, False, 0, [], {}, "")
