"""Which points are measured, coarse ones first. Pure.

A look-up interpolates along each axis, so every level of the grid is a usable table by itself;
when the time budget ends, what was measured until then stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

COARSE, FINE, FINEST = 0, 1, 2
_LEVELS: Final = (COARSE, FINE, FINEST)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Largest iteration to profile."""

    max_tokens: int = 2048
    """New tokens of one iteration."""
    max_sequences: int = 256
    max_context: int = 16384
    """Tokens of history."""


AttentionPoint = tuple[int, int, int, int]
"""(new prompt tokens, their history, decodes, history of each)."""


def token_counts(limits: Limits, level: int) -> list[int]:
    """Token counts of the dense layers: doubling, then by tiles of products, then finer."""
    top = limits.max_tokens
    if level == COARSE:
        return _doubling(1, top)
    if level == FINE:
        return _up_to(top, [*range(1, 17), *range(24, 129, 8), *range(160, 513, 32)]) + _up_to(
            top, list(range(576, top + 1, 64))
        )
    return _up_to(top, [*range(1, 17), *range(20, 65, 4), *range(80, top + 1, 16)])


def sequence_counts(limits: Limits, level: int) -> list[int]:
    """Rows of logits."""
    top = limits.max_sequences
    if level == COARSE:
        return _doubling(1, top)
    fine = _up_to(top, [*range(1, 17), *range(20, 65, 4), *range(80, top + 1, 16)])
    return fine if level == FINEST else fine[::2]


def attention_points(limits: Limits, level: int) -> Iterator[AttentionPoint]:
    """Prompt alone, decodes alone, and both."""
    step = {COARSE: 4, FINE: 2, FINEST: 2}[level]
    contexts = _geometric(64 if level == COARSE else 16, limits.max_context, step)
    decodes = _geometric(1, limits.max_sequences, 2)
    chunks = _geometric(16, limits.max_tokens, step)
    for chunk in chunks:
        for history in [0, *contexts]:
            yield chunk, history, 0, 0
    for count in decodes:
        for context in contexts:
            yield 0, 0, count, context
    # Both together: every fourth point of each axis at first, the rest only at the finest level.
    thin = 2 if level != FINEST else 1
    for chunk in chunks[::thin]:
        for history in [0, *contexts[thin::thin]]:
            for count in decodes[::thin]:
                for context in contexts[::thin]:
                    yield chunk, history, count, context


def in_levels(limits: Limits) -> Iterator[tuple[int, str, AttentionPoint | int]]:
    """(level, table, point), each point once, coarse levels first; tables: dense, per_sequence,
    attention."""
    done: set[tuple[str, AttentionPoint | int]] = set()
    for level in _LEVELS:
        points: list[tuple[str, AttentionPoint | int]] = []
        points += (("dense", count) for count in token_counts(limits, level))
        points += (("per_sequence", count) for count in sequence_counts(limits, level))
        points += (("attention", point) for point in attention_points(limits, level))
        for point in points:
            if point not in done:
                done.add(point)
                yield level, *point


def _doubling(first: int, top: int) -> list[int]:
    return _geometric(first, top, 2)


def _geometric(first: int, top: int, factor: int) -> list[int]:
    """first, first x factor ... and the top itself."""
    values = []
    value = first
    while value < top:
        values.append(value)
        value *= factor
    return [*values, top]


def _up_to(top: int, values: list[int]) -> list[int]:
    return sorted({value for value in values if value <= top})
