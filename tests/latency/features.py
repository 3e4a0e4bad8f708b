"""From a batch to the few numbers that tables of measured kernels are indexed by, and back.

Pure functions, as Vidur's predictor defines them (reference section 8): token counts rounded up,
one key for the decode attention of a batch, one for its prefill attention, and how the times of
single operations add up to a stage. Also the model FLOPs of a batch. Reads no table itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isqrt
from typing import Final

from emu.units import ceil_div

TOKEN_MULTIPLE: Final = 8
"""Matrix kernels are timed at multiples of this many tokens."""
KV_GRANULARITY: Final = 64
"""Context lengths are looked up at multiples of this."""

ATTENTION_PARTS: Final = (
    "pre_proj",
    "post_proj",
    "rope",
    "kv_cache_save",
    "attn_decode",
    "attn_prefill",
    "tensor_parallel_comm",
    "attn_norm",
)
MLP_PARTS: Final = ("mlp_up", "mlp_down", "mlp_act", "tensor_parallel_comm", "mlp_norm")
CPU_PARTS: Final = (
    "schedule",
    "sampler_e2e",
    "prepare_inputs_e2e",
    "process_model_outputs",
    "ray_comm",
)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple not below `value`."""
    return ceil_div(value, multiple) * multiple


def matmul_tokens(tokens: int, multiple: int = TOKEN_MULTIPLE) -> int:
    """Tokens at which projections, MLP, norms and collectives are looked up."""
    return round_up(tokens, multiple)


def decode_attention_key(
    context_tokens: Sequence[int], granularity: int = KV_GRANULARITY
) -> tuple[int, int]:
    """(members, their mean context rounded up); (0, 0) without decodes.

    The context of a decode includes the token whose KV the step writes.
    """
    if not context_tokens:
        return 0, 0
    mean = sum(context_tokens) // len(context_tokens)
    return len(context_tokens), round_up(mean, granularity)


def prefill_attention_key(
    chunks: Iterable[tuple[int, int]], granularity: int = KV_GRANULARITY
) -> tuple[int, int] | None:
    """(sum of contexts, each rounded up; chunk length squared) for (context, new tokens) pairs.

    Several chunks count as one whose square is the sum of theirs, its root rounded to a whole
    number. None without chunks.
    """
    pairs = list(chunks)
    if not pairs:
        return None
    context = sum(round_up(context, granularity) for context, _ in pairs)
    return context, _nearest_root(sum(new * new for _, new in pairs)) ** 2


def _nearest_root(square: int) -> int:
    root = isqrt(square)
    return root + (square - root * root > root)


def stage_time_ms(parts_ms: Mapping[str, float], layers: int) -> tuple[float, float]:
    """(model time, with CPU overhead) of one stage from the times of its operations per layer.

    Missing operations take no time; `pipeline_comm` and the CPU parts count once per stage, the
    tensor-parallel collective twice per layer.
    """
    attention = sum(parts_ms.get(name, 0.0) for name in ATTENTION_PARTS)
    mlp = sum(parts_ms.get(name, 0.0) for name in MLP_PARTS)
    layer = attention + mlp + parts_ms.get("add", 0.0)
    model = layer * layers + parts_ms.get("pipeline_comm", 0.0)
    return model, model + sum(parts_ms.get(name, 0.0) for name in CPU_PARTS)


def batch_flops(
    members: Iterable[tuple[int, int]],
    *,
    parameters: int,
    layers: int,
    query_heads: int,
    head_dim: int,
    causal: bool = True,
) -> int:
    """Model FLOPs of one iteration on one device, for (context, new tokens) pairs.

    `parameters`, `layers` and `query_heads` are those of the device. Each new token attends to
    the context and to the new tokens up to itself; with `causal` off to all new tokens, as the
    peer counts it.
    """
    tokens = 0
    pairs = 0
    for context, new in members:
        tokens += new
        pairs += new * context + (new * (new + 1) // 2 if causal else new * new)
    return 2 * tokens * parameters + 4 * layers * query_heads * head_dim * pairs


def mfu(flops: int, duration_s: float, peak_tflops: float) -> float:
    """Model FLOPs over what the device could do in that time at 1e12 FLOP/s per TFLOP/s."""
    return flops / (duration_s * peak_tflops * 1e12)
