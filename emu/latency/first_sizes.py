"""Kernels that a server compiles while it serves: those of its experts, by tokens of a step.

Engines warm up before they are ready: vLLM runs a step with as many tokens as one may have, and
graphs are captured for the small sizes. The experts' kernels of Triton are left. Their tiles are
tuned for some numbers of tokens, the nearest of which a step takes, and each set of tiles is
compiled in every worker when a step first needs it, while all wait. Captured sizes and that of the
trial are compiled by then; what lies between stalls the first prompts of a fresh server.

Measured on Mixtral-8x7B at TP 2 on H100 (three servers of vLLM 0.15, first stages): stalls of 1.2
to 2.0 s, some 7 s together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.catalogue import sizes
from emu.latency.abilities import FirstSize
from emu.latency.context import LatencyContext

TUNED: Final = (512, 1024, 1536, 2048, 3072, 4096)
"""Tokens that tiles are tuned for, beyond captured sizes; steps of more take the last."""
_COMPILED: Final = ("float16", "bfloat16", "fp8", "fp8_block", "int8")
"""Types of experts whose kernels are Triton's."""
_OTHERS: Final = "blackwell"
"""Architectures with this in their name run experts in kernels that come compiled."""


def first_sizes(context: LatencyContext, captured_tokens: int) -> tuple[FirstSize, ...]:
    """What a fresh server has yet to compile, once it is ready."""
    engine, spec = context.engine, context.model
    if engine is None or not engine.expert_compile_ns or spec.experts is None:
        return ()
    stored = sizes.expert_dtype(spec, context.dtype)
    if stored not in _COMPILED or _OTHERS in context.gpu.architecture:
        return ()
    largest = context.max_num_batched_tokens
    tried = nearest(TUNED, largest) if engine.graph_sizes == "vllm" else 0
    return _between(captured_tokens, largest, tried, engine.expert_compile_ns)


def _between(captured: int, largest: int, tried: int, stall_ns: int) -> tuple[FirstSize, ...]:
    """Tuned sizes above the captured ones, without the one that the engine has tried."""
    found = []
    for index, size in enumerate(TUNED):
        before = TUNED[index - 1] if index else min(captured, size)
        least = max(captured, (before + size) // 2) + 1
        is_last = index == len(TUNED) - 1
        most = 0 if is_last else (size + TUNED[index + 1]) // 2
        if size != tried and least <= largest:
            found.append(FirstSize(least, most, stall_ns))
    return tuple(found)


def nearest(sizes_tuned: Sequence[int], tokens: int) -> int:
    """The tuned size nearest to a number of tokens; the smaller at a tie."""
    return min(sizes_tuned, key=lambda size: (abs(size - tokens), size))
