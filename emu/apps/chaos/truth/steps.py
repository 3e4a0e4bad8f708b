"""What a step computes, as the truth's second model of costs sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """What a step computes."""

    prompts: tuple[tuple[int, int], ...]
    """(tokens before, new tokens) of members with several new ones."""
    decodes: int
    """Sequences with one token, or with drafts that are verified."""
    seen: int
    """Tokens that their attention reads."""
    sequences: int
    padded: int = 0
    """Tokens of the largest member of a group that steps together."""
    queries: int = 0
    """Tokens of what decodes and verifies."""
    verifying: int = 0
    """Of the sequences, those that verify drafts."""
    drafts: int = 0
    """Rows of logits beside one of each sequence."""
    mean: int = 0
    """Tokens of a member on average, in a group that is not padded; 0 = it is."""


def step_of(members: Sequence[Sequence[int]], padded: int = 0, mean: int = 0) -> Step:
    """The step of members without drafts (row, tokens before, new tokens).

    `padded`: tokens of the largest member of its group; `mean`: of one that is not padded.
    """
    decodes = [before for _, before, new in members if new == 1]
    prompts = tuple((before, new) for _, before, new in members if new != 1)
    count = len(decodes)
    return Step(prompts, count, sum(decodes) + count, len(members), padded, count, 0, 0, mean)
