"""The layers of unusual model types, built one by one from the keys of a `config.json`.

Formulas: the published modeling code of each family; totals are compared with published parameter
counts in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from emu.catalogue.expert_groups import expert_groups
from emu.catalogue.families import QWEN_LINEAR, SPARSE_LATENT
from emu.catalogue.layers import (
    Attention,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    Mlp,
    StateSpace,
)
from emu.catalogue.reader import ConfigReader
from emu.units import ceil_div

_GQA_CONV_KERNEL: Final = 4


def _gqa(read: ConfigReader, **differs: object) -> Attention:
    """Grouped attention from the common keys."""
    heads = read.required("num_attention_heads")
    width = read.optional("head_dim", "attention_head_dim") or read.required("hidden_size") // heads
    fields: dict[str, object] = {
        "heads": heads,
        "kv_heads": read.optional("num_key_value_heads") or heads,
        "head_dim": width,
        "value_dim": width,
        "qkv_bias": bool(read.get("attention_bias", False)),
    }
    return Attention(**{**fields, **differs})  # type: ignore[arg-type]


def _latent(read: ConfigReader) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=read.optional("q_lora_rank") or 0,
        kv_lora_rank=read.required("kv_lora_rank"),
        qk_nope_head_dim=read.required("qk_nope_head_dim"),
        qk_rope_head_dim=read.required("qk_rope_head_dim"),
        v_head_dim=read.required("v_head_dim"),
    )


def _gated_delta(read: ConfigReader) -> StateSpace:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: key heads share value heads, as in attention."""
    hidden = read.required("hidden_size")
    keys = read.required("linear_num_key_heads") * read.required("linear_key_head_dim")
    value_heads = read.required("linear_num_value_heads")
    value_dim = read.required("linear_value_head_dim")
    values = value_heads * value_dim
    kernel = read.optional("linear_conv_kernel_dim") or _GQA_CONV_KERNEL
    channels = 2 * keys + values
    state = values * read.required("linear_key_head_dim")
    is_split = str(read.get("model_type", "")).startswith("qwen3_5")
    return StateSpace(
        kind="gated_delta",
        conv_channels=channels,
        conv_kernel=kernel,
        state_elements=state,
        state_dtype=str(read.get("mamba_ssm_dtype", "")),
        # In: queries, keys, values, output gate, and two gates for each value head. Out: values.
        matrix_params=hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden,
        inputs=((channels, values), (value_heads, value_heads))
        if is_split
        else ((channels + values,), (2 * value_heads,)),
        output_width=values,
        other_params=channels * kernel + 2 * value_heads + value_dim,
        flops_per_token=7 * state,
    )


def _mamba2(
    read: ConfigReader, inner: int, heads: int, groups: int, state: int, *, gated_norm: bool = True
) -> StateSpace:
    """Mamba-2 with `heads` heads over `inner` channels and `groups` groups of B and C."""
    hidden = read.required("hidden_size")
    kernel = read.optional("conv_kernel", "mamba_d_conv") or _GQA_CONV_KERNEL
    channels = inner + 2 * groups * state
    projections = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return StateSpace(
        kind="mamba2",
        conv_channels=channels,
        conv_kernel=kernel,
        state_elements=inner * state,
        state_dtype=str(read.get("mamba_ssm_cache_dtype", "")),
        matrix_params=projections,
        # Convolution and its bias; A, D and the step's bias for each head; the gated norm.
        other_params=channels * (kernel + 1) + 3 * heads + inner * gated_norm,
        flops_per_token=6 * inner * state,
    )


def _experts(read: ConfigReader, **differs: object) -> Experts:
    """Routed and shared experts from the common keys."""
    width = read.required("moe_intermediate_size", "intermediate_size")
    shared = read.optional(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    )
    if shared is None:
        shared = width * (read.optional("n_shared_experts", "num_shared_experts") or 0)
    per_token = read.required(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"
    )
    count = read.required("num_local_experts", "num_experts", "n_routed_experts")
    if per_token > count:
        raise read.problem("num_experts_per_tok", f"{per_token} is more than {count} experts")
    its = expert_groups(read, count)
    fields: dict[str, object] = {
        "count": count,
        "groups": its.groups,
        "groups_chosen": its.chosen,
        "per_token": per_token,
        "ffn": width,
        "shared_ffn": shared,
        "router_bias": read.get("scoring_func", "") == "sigmoid"
        or read.get("topk_method", "") == "noaux_tc",
    }
    return Experts(**{**fields, **differs})  # type: ignore[arg-type]


def _dense(read: ConfigReader, *names: str, gated: bool = True) -> Mlp:
    return Mlp(width=read.required(*(names or ("intermediate_size",))), gated=gated)


def _two_norms(read: ConfigReader) -> int:
    return 2 * read.required("hidden_size")


def _count(read: ConfigReader) -> int:
    return read.layers


_ATTENTION_OR_LINEAR: Final = frozenset(("full_attention", "linear_attention"))


def _qwen_linear(read: ConfigReader) -> list[Layer]:
    """Qwen3-Next, Qwen3.5: three Gated DeltaNet layers, then one of gated attention."""
    count = _count(read)
    every = read.optional("full_attention_interval") or 4
    kinds = read.listed("layer_types", count, _ATTENTION_OR_LINEAR) or [
        "full_attention" if (index + 1) % every == 0 else "linear_attention"
        for index in range(count)
    ]
    attention = _gqa(read, output_gate=True)
    attention = _gqa(read, output_gate=True, norm_params=2 * attention.head_dim)
    state = _gated_delta(read)
    sparse = (read.optional("num_experts") or 0) > 1
    step = read.optional("decoder_sparse_step") or 1
    dense_only = read.indices("mlp_only_layers")
    layers = []
    for index, kind in enumerate(kinds):
        routed = sparse and index not in dense_only and (index + 1) % step == 0
        layers.append(
            Layer(
                attention=attention if kind == "full_attention" else None,
                state=state if kind == "linear_attention" else None,
                mlp=None if routed else _dense(read),
                experts=_experts(read, shared_gate=True) if routed else None,
                norm_params=_two_norms(read),
            )
        )
    return layers


def _gemma4(read: ConfigReader) -> list[Layer]:
    """Gemma 4: windows with many KV heads, every sixth layer full with few wide ones."""
    count, hidden = _count(read), read.required("hidden_size")
    window = read.required("sliding_window")
    kinds = read.listed("layer_types", count, frozenset(("full_attention", "sliding_attention")))
    if kinds is None:
        kinds = [
            "full_attention" if (index + 1) % 6 == 0 else "sliding_attention"
            for index in range(count)
        ]
    narrow = _gqa(read, window_tokens=window, norm_params=2 * read.required("head_dim"))
    wide_dim = read.optional("global_head_dim") or narrow.head_dim
    wide = _gqa(
        read,
        kv_heads=read.optional("num_global_key_value_heads") or narrow.kv_heads,
        head_dim=wide_dim,
        value_dim=wide_dim,
        shares_projection=bool(read.get("attention_k_eq_v", False)),
        norm_params=2 * wide_dim,
    )
    routed = bool(read.get("enable_moe_block", False))
    plain = Layer(mlp=_dense(read), norm_params=(7 if routed else 4) * hidden)
    if routed:
        scales = hidden + (read.optional("num_experts") or 0)
        experts = _experts(read, shared_ffn=0, router_bias=False, router_scales=scales)
        plain = replace(plain, experts=experts)
    return [
        replace(plain, attention=wide if kind == "full_attention" else narrow) for kind in kinds
    ]


def _llama4(read: ConfigReader) -> list[Layer]:
    """Llama 4: three layers of chunked attention, then one full layer without rotary positions."""
    count = _count(read)
    chunk = read.optional("attention_chunk_size") or 0
    kinds = read.listed(
        "layer_types", count, frozenset(("full_attention", "chunked_attention"))
    ) or [
        "full_attention" if (index + 1) % 4 == 0 else "chunked_attention" for index in range(count)
    ]
    step = read.optional("interleave_moe_layer_step") or 1
    width = read.required("intermediate_size")
    experts = Experts(
        count=read.required("num_local_experts"),
        per_token=read.required("num_experts_per_tok"),
        ffn=width,
        shared_ffn=width,
    )
    dense = _dense(read, "intermediate_size_mlp", "intermediate_size")
    return [
        Layer(
            attention=_gqa(read, chunk_tokens=chunk if kind == "chunked_attention" else 0),
            mlp=None if (index + 1) % step == 0 else dense,
            experts=experts if (index + 1) % step == 0 else None,
            norm_params=_two_norms(read),
        )
        for index, kind in enumerate(kinds)
    ]


def _owns_indexer(read: ConfigReader, count: int) -> list[bool]:
    """GLM-5.2 lets four layers share one choice of tokens (`index_topk_freq`)."""
    listed = read.listed("indexer_types", count, frozenset(("full", "shared")))
    if listed:
        return [entry == "full" for entry in listed]
    pattern = read.entries("index_topk_pattern")
    if pattern:
        if len(pattern) != count:
            raise read.problem("index_topk_pattern", f"{len(pattern)} entries for {count} layers")
        return [letter != "S" for letter in pattern]
    every = read.optional("index_topk_freq") or 1
    offset = read.optional("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return [max(index - offset + 1, 0) % every == 0 for index in range(count)]


def _sparse_latent(read: ConfigReader) -> list[Layer]:
    """DeepSeek-V3.2, GLM-5: latent attention over the tokens that an indexer chooses."""
    count, latent = _count(read), _latent(read)
    read.listed("layer_types", count, frozenset(("deepseek_sparse_attention", "indexed_attention")))
    norms = _two_norms(read) + latent.kv_lora_rank + latent.q_lora_rank
    dense_first = read.optional("first_k_dense_replace") or 0
    experts = _experts(read)
    return [
        Layer(
            latent=latent,
            latent_heads=read.required("num_attention_heads"),
            indexer=Indexer(
                heads=read.required("index_n_heads"),
                head_dim=read.required("index_head_dim"),
                topk_tokens=read.required("index_topk"),
                owns_keys=owns,
            ),
            mlp=_dense(read) if index < dense_first else None,
            experts=None if index < dense_first else experts,
            norm_params=norms,
        )
        for index, owns in enumerate(_owns_indexer(read, count))
    ]


def _kimi_linear(read: ConfigReader) -> list[Layer]:
    """Kimi Linear: Kimi Delta Attention, every fourth layer latent attention."""
    table = read.get("linear_attn_config")
    if not isinstance(table, Mapping):
        raise read.problem("linear_attn_config", "the key is missing")
    inner = ConfigReader(table, read.source)
    count, hidden = _count(read), read.required("hidden_size")
    heads, width = inner.required("num_heads"), inner.required("head_dim")
    kernel = inner.optional("short_conv_kernel_size") or _GQA_CONV_KERNEL
    full = inner.indices("full_attn_layers")
    if not full or not full <= set(range(1, count + 1)):
        raise read.problem("linear_attn_config.full_attn_layers", f"expected numbers 1 to {count}")
    wide = heads * width
    state = StateSpace(
        kind="kda",
        conv_channels=3 * wide,
        conv_kernel=kernel,
        state_elements=heads * width * width,
        state_dtype="float32",
        matrix_params=3 * hidden * wide
        + 2 * (hidden * width + width * wide)
        + hidden * heads
        + wide * hidden,
        other_params=3 * wide * kernel + wide + heads + width,
        flops_per_token=7 * heads * width * width,
    )
    latent = _latent(read)
    dense_first = read.optional("first_k_dense_replace") or 0
    experts = _experts(read, router_bias=True)
    return [
        Layer(
            state=None if index + 1 in full else state,
            latent=latent if index + 1 in full else None,
            latent_heads=read.required("num_attention_heads") if index + 1 in full else 0,
            mlp=_dense(read) if index < dense_first else None,
            experts=None if index < dense_first else experts,
            norm_params=_two_norms(read) + (latent.kv_lora_rank if index + 1 in full else 0),
        )
        for index in range(count)
    ]


def _minimax(read: ConfigReader) -> list[Layer]:
    """MiniMax-Text-01, M1: seven layers of lightning attention, then one of softmax attention."""
    count, hidden = _count(read), read.required("hidden_size")
    kinds = read.listed("layer_types", count, _ATTENTION_OR_LINEAR)
    if kinds is None:
        listed = read.listed("attn_type_list", count, frozenset((0, 1)))
        if listed is not None:
            kinds = ["full_attention" if entry else "linear_attention" for entry in listed]
    if kinds is None:
        raise read.problem("layer_types", "the key is missing (or attn_type_list)")
    attention = _gqa(read)
    wide = attention.heads * attention.head_dim
    state = StateSpace(
        kind="lightning",
        conv_channels=0,
        conv_kernel=1,
        state_elements=wide * attention.head_dim,
        matrix_params=5 * hidden * wide,  # queries, keys, values, output gate, output
        other_params=wide,
        flops_per_token=4 * wide * attention.head_dim,
    )
    plain = Layer(
        experts=_experts(read, shared_ffn=0, router_bias=False), norm_params=_two_norms(read)
    )
    of_kind = {
        "full_attention": replace(plain, attention=attention),
        "linear_attention": replace(plain, state=state),
    }
    return [of_kind[str(kind)] for kind in kinds]


_NEMOTRON_LETTERS: Final = MappingProxyType(
    {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
)


def _nemotron_h(read: ConfigReader) -> list[Layer]:
    """Nemotron-H, Nemotron 3: each layer is one mixer or one MLP, named by a letter or a word."""
    pattern = str(read.get("hybrid_override_pattern", ""))
    words = read.entries("layers_block_type")
    if pattern:
        unknown = sorted(set(pattern) - set(_NEMOTRON_LETTERS))
        if unknown:
            raise read.problem("hybrid_override_pattern", f"unknown letter {unknown[0]!r}")
        words = [_NEMOTRON_LETTERS[letter] for letter in pattern]
    if not words:
        raise read.problem("hybrid_override_pattern", "the key is missing (or layers_block_type)")
    count = read.optional("num_hidden_layers")
    if count is not None and count != len(words):
        raise read.problem("num_hidden_layers", f"{count} layers, but {len(words)} in the pattern")
    hidden, heads = read.required("hidden_size"), read.required("mamba_num_heads")
    mamba = _mamba2(
        read,
        heads * read.required("mamba_head_dim"),
        heads,
        read.required("n_groups"),
        read.required("ssm_state_size"),
    )
    if not mamba.state_dtype:
        mamba = _with_state_dtype(mamba, "float32")
    layers = []
    for word in words:
        if word not in _NEMOTRON_LETTERS.values():
            raise read.problem("layers_block_type", f"unknown kind of layer {word!r}")
        latent = read.optional("moe_latent_size") or 0
        layers.append(
            Layer(
                attention=_gqa(read) if word == "attention" else None,
                state=mamba if word == "mamba" else None,
                mlp=_dense(read, gated=False) if word == "mlp" else None,
                experts=_experts(read, hidden=latent, router_bias=True) if word == "moe" else None,
                experts_gated=False,
                norm_params=hidden,
            )
        )
    return layers


def _with_state_dtype(state: StateSpace, dtype: str) -> StateSpace:
    return replace(state, state_dtype=dtype)


def _jamba(read: ConfigReader) -> list[Layer]:
    """Jamba: Mamba-1, every eighth layer attention, every second one with experts."""
    count, hidden = _count(read), read.required("hidden_size")
    period, offset = read.optional("attn_layer_period") or 8, read.optional("attn_layer_offset")
    offset = 4 if offset is None else offset
    moe_period = read.optional("expert_layer_period") or 2
    moe_offset = read.optional("expert_layer_offset")
    moe_offset = 1 if moe_offset is None else moe_offset
    inner = (read.optional("mamba_expand") or 2) * hidden
    state_dim = read.optional("mamba_d_state") or 16
    kernel = read.optional("mamba_d_conv") or _GQA_CONV_KERNEL
    rank = ceil_div(hidden, 16)
    if isinstance(read.get("mamba_dt_rank"), int):
        rank = read.required("mamba_dt_rank")
    state = StateSpace(
        kind="mamba1",
        conv_channels=inner,
        conv_kernel=kernel,
        state_elements=inner * state_dim,
        matrix_params=2 * hidden * inner
        + inner * (rank + 2 * state_dim)
        + rank * inner
        + inner * hidden,
        # Convolution and bias, bias of the step, A, D, norms of the step, B and C.
        other_params=inner * (kernel + 1) + inner * (2 + state_dim) + rank + 2 * state_dim,
        flops_per_token=6 * inner * state_dim,
    )
    routed = (read.optional("num_experts") or 0) > 1
    experts = _experts(read, shared_ffn=0, router_bias=False) if routed else None
    layers = []
    for index in range(count):
        is_attention = index % period == offset
        is_moe = routed and index % moe_period == moe_offset
        layers.append(
            Layer(
                attention=_gqa(read) if is_attention else None,
                state=None if is_attention else state,
                mlp=None if is_moe else _dense(read),
                experts=experts if is_moe else None,
                norm_params=_two_norms(read),
            )
        )
    return layers


def _bamba(read: ConfigReader) -> list[Layer]:
    """Bamba: Mamba-2 with a few layers of attention; an MLP in every layer."""
    listed = read.indices("attn_layer_indices")
    heads = read.required("mamba_n_heads")
    inner = (read.optional("mamba_expand") or 2) * read.required("hidden_size")
    mamba = _mamba2(
        read, inner, heads, read.optional("mamba_n_groups") or 1, read.required("mamba_d_state")
    )
    return [
        Layer(
            attention=_gqa(read) if index in listed else None,
            state=None if index in listed else mamba,
            mlp=_dense(read),
            norm_params=_two_norms(read),
        )
        for index in range(_count(read))
    ]


def _falcon_h1(read: ConfigReader) -> list[Layer]:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    mamba = _mamba2(
        read,
        read.required("mamba_d_ssm"),
        read.required("mamba_n_heads"),
        read.optional("mamba_n_groups") or 1,
        read.required("mamba_d_state"),
        gated_norm=bool(read.get("mamba_rms_norm", False)),
    )
    layer = Layer(attention=_gqa(read), state=mamba, mlp=_dense(read), norm_params=_two_norms(read))
    return [layer] * _count(read)


def _granite_hybrid(read: ConfigReader) -> list[Layer]:
    """Granite 4.0-H: Mamba-2 with a few layers of attention; experts and a shared MLP in each."""
    count = _count(read)
    kinds = read.listed("layer_types", count, frozenset(("attention", "mamba")))
    if kinds is None:
        raise read.problem("layer_types", "the key is missing")
    inner = (read.optional("mamba_expand") or 2) * read.required("hidden_size")
    mamba = _mamba2(
        read,
        inner,
        read.required("mamba_n_heads"),
        read.optional("mamba_n_groups") or 1,
        read.required("mamba_d_state"),
    )
    plain = Layer(norm_params=_two_norms(read))
    if read.optional("num_local_experts"):
        shared = read.optional("shared_intermediate_size") or 0
        plain = replace(plain, experts=_experts(read, shared_ffn=shared, router_bias=False))
    else:
        plain = replace(plain, mlp=_dense(read, "shared_intermediate_size"))
    of_kind = {
        "attention": replace(plain, attention=_gqa(read)),
        "mamba": replace(plain, state=mamba),
    }
    return [of_kind[str(kind)] for kind in kinds]


def _mimo_v2(read: ConfigReader) -> list[Layer]:
    """MiMo-V2-Flash: five short windows with sinks, then one full layer with fewer KV heads."""
    count = _count(read)
    windows = read.listed("hybrid_layer_pattern", count, frozenset((0, 1)))
    routed = read.listed("moe_layer_freq", count, frozenset((0, 1))) or [1] * count
    if windows is None:
        raise read.problem("hybrid_layer_pattern", "the key is missing")
    value_dim = read.required("v_head_dim")
    full = _gqa(
        read, value_dim=value_dim, sinks=bool(read.get("add_full_attention_sink_bias", False))
    )
    narrow = _gqa(
        read,
        heads=read.optional("swa_num_attention_heads") or full.heads,
        kv_heads=read.required("swa_num_key_value_heads"),
        head_dim=read.optional("swa_head_dim") or full.head_dim,
        value_dim=read.optional("swa_v_head_dim") or value_dim,
        window_tokens=read.required("sliding_window"),
        sinks=bool(read.get("add_swa_attention_sink_bias", False)),
    )
    experts = _experts(read)
    return [
        Layer(
            attention=narrow if window else full,
            mlp=None if moe else _dense(read),
            experts=experts if moe else None,
            norm_params=_two_norms(read),
        )
        for window, moe in zip(windows, routed, strict=True)
    ]


def _lfm2(read: ConfigReader) -> list[Layer]:
    """LFM2: gated short convolutions with a few layers of attention."""
    count, hidden = _count(read), read.required("hidden_size")
    kinds = read.listed("layer_types", count, frozenset(("conv", "full_attention")))
    if kinds is None:
        raise read.problem("layer_types", "the key is missing")
    kernel = read.optional("conv_L_cache") or 3
    conv = StateSpace(
        kind="conv",
        conv_channels=hidden,
        conv_kernel=kernel,
        state_elements=0,
        matrix_params=3 * hidden * hidden + hidden * hidden,
        other_params=hidden * kernel,
        flops_per_token=2 * hidden * kernel,
    )
    width = read.required("intermediate_size")
    if read.get("block_auto_adjust_ff_dim", True):
        multiple = read.optional("block_multiple_of") or 256
        width = multiple * ceil_div(2 * width // 3, multiple)
    attention = _gqa(read)
    attention = _gqa(read, norm_params=2 * attention.head_dim)
    dense_first = read.optional("num_dense_layers")
    routed = read.optional("num_experts") or 0
    layers = []
    for index, kind in enumerate(kinds):
        is_moe = bool(routed) and index >= (dense_first or 0)
        layers.append(
            Layer(
                attention=attention if kind == "full_attention" else None,
                state=conv if kind == "conv" else None,
                mlp=None
                if is_moe
                else Mlp(width=read.required("intermediate_size") if routed else width),
                experts=_experts(read, router_bias=bool(read.get("use_expert_bias", False)))
                if is_moe
                else None,
                norm_params=_two_norms(read),
            )
        )
    return layers


def _step3p5(read: ConfigReader) -> list[Layer]:
    """Step-3.5, Step-3.7: one full layer, then three short windows."""
    count = _count(read)
    kinds = read.entries("layer_types")[:count]
    if len(kinds) != count:
        raise read.problem("layer_types", f"{len(kinds)} entries for {count} layers")
    window = read.required("sliding_window")
    width = read.optional("head_dim") or read.required("hidden_size") // read.required(
        "num_attention_heads"
    )
    dense_first = read.optional("first_k_dense_replace") or 0
    experts = _experts(read)
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise read.problem("layer_types", f"unknown kind of layer {kind!r}")
        layers.append(
            Layer(
                attention=_gqa(
                    read,
                    window_tokens=window if kind == "sliding_attention" else 0,
                    norm_params=2 * width,
                ),
                mlp=_dense(read) if index < dense_first else None,
                experts=None if index < dense_first else experts,
                norm_params=_two_norms(read),
            )
        )
    return layers


SPECIAL: Final[Mapping[str, Callable[[ConfigReader], list[Layer]]]] = MappingProxyType(
    {
        **dict.fromkeys(sorted(QWEN_LINEAR), _qwen_linear),
        "gemma4": _gemma4,
        "gemma4_text": _gemma4,
        "llama4": _llama4,
        "llama4_text": _llama4,
        **dict.fromkeys(sorted(SPARSE_LATENT), _sparse_latent),
        "kimi_linear": _kimi_linear,
        "minimax": _minimax,
        "nemotron_h": _nemotron_h,
        "jamba": _jamba,
        "bamba": _bamba,
        "falcon_h1": _falcon_h1,
        "granitemoehybrid": _granite_hybrid,
        "mimo_v2_flash": _mimo_v2,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2,
        "step3p5": _step3p5,
        "step3p7": _step3p5,
    }
)
"""Model type -> the function that builds its layers."""
