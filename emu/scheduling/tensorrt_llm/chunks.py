"""How many tokens of each context a step of TensorRT-LLM computes.

A step has `max_num_tokens`; generations come first with one token each. Without chunks a context is
computed whole, and the first that does not fit ends the step. With chunks, contexts that do not fit
together are cut to whole units: those ahead take all that is left (FIRST_COME_FIRST_SERVED), or all
advance by a unit in turn (EQUAL_PROGRESS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Chunking = Literal["none", "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]


def whole(lengths: Sequence[int], budget_tokens: int) -> list[int]:
    """Tokens of each context, all or none, up to the first that does not fit."""
    found = [0] * len(lengths)
    for place, length in enumerate(lengths):
        if length > budget_tokens:
            break
        found[place] = length
        budget_tokens -= length
    return found


def in_order(lengths: Sequence[int], budget_tokens: int, unit_tokens: int) -> list[int]:
    """Tokens of each context; what is cut is cut to whole units."""
    found: list[int] = []
    for length in lengths:
        tokens = length if length <= budget_tokens else budget_tokens - budget_tokens % unit_tokens
        found.append(tokens)
        budget_tokens -= tokens
    return found


def in_turn(lengths: Sequence[int], budget_tokens: int, unit_tokens: int) -> list[int]:
    """Tokens of each context, which all advance by a unit in turn while the budget lasts."""
    if sum(lengths) <= budget_tokens:
        return list(lengths)
    found = [0] * len(lengths)
    has_grown = True
    while has_grown and budget_tokens > 0:
        has_grown = False
        for place, length in enumerate(lengths):
            more = min(unit_tokens, length - found[place])
            if 0 < more <= budget_tokens:
                found[place] += more
                budget_tokens -= more
                has_grown = True
    return found


def shares(
    lengths: Sequence[int], budget_tokens: int, chunking: Chunking, unit_tokens: int
) -> list[int]:
    """Tokens of each context of these lengths, in order of arrival; 0 = it waits for a step."""
    if chunking == "none":
        return whole(lengths, budget_tokens)
    if chunking == "EQUAL_PROGRESS":
        return in_turn(lengths, budget_tokens, unit_tokens)
    return in_order(lengths, budget_tokens, unit_tokens)


def from_hit(hit: int, tokens: int, reached_tokens: int, block_tokens: int) -> int:
    """Tokens that a context computes which finds `hit` tokens cached and had a share of `tokens`.

    The share starts behind the hit; if it does not reach the end, it stops at a block's end.
    """
    end = hit + tokens
    if end >= reached_tokens:
        return reached_tokens - hit
    return end - end % block_tokens - hit
