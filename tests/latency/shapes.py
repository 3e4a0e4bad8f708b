"""Batches of the latency tests."""

from __future__ import annotations

from emu.latency.base import BatchShape


def decodes(count: int, context: int) -> BatchShape:
    """So many requests of the same context that produce a token each."""
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * context,
        decode_context_max=context,
        decode_context_min=context,
        sequences=count,
    )
