"""Adding members to a `BatchShape` while a batch is being formed. Owns nothing."""

from __future__ import annotations

from emu.latency.base import BatchShape


def add_chunk(shape: BatchShape, new_tokens: int, context_tokens: int) -> None:
    """One more member with so many new tokens; exactly one token counts as a decode."""
    if new_tokens != 1:
        shape.prefill_new.append(new_tokens)
        shape.prefill_context.append(context_tokens)
        return
    if shape.decode_count == 0:
        shape.decode_context_max = shape.decode_context_min = context_tokens
    elif context_tokens > shape.decode_context_max:
        shape.decode_context_max = context_tokens
    elif context_tokens < shape.decode_context_min:
        shape.decode_context_min = context_tokens
    shape.decode_count += 1
    shape.decode_context_sum += context_tokens
