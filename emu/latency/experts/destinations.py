"""To how many distinct ranks or nodes a token goes, when its k experts are spread over them.

A library that sends a token once to each node (or rank) moves fewer copies than k. Group-limited
routing (DeepSeek-V3: 4 of 8 groups) makes them fewer still, where groups lie together. Pure.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from emu.rng import rng_stream

_TOKENS: Final = 4_000
"""Tokens that are drawn: the mean is then known to half a percent."""
_BEST: Final = 2
"""A group's score is the sum of its two best experts' (DeepSeek-V3's modeling code)."""


class Choice(msgspec.Struct, frozen=True):
    """How a router chooses: `per_token` of `experts`, in at most `groups_chosen` of `groups`."""

    experts: int
    per_token: int
    groups: int = 1
    groups_chosen: int = 1


@functools.cache
def destinations(choice: Choice, domains: int) -> float:
    """Mean number of distinct domains of a token, its own included; domains hold equal shares.

    Without groups by the formula of drawing without return. With groups by drawing tokens with
    random scores, because two best scores of a group favor groups that hold several chosen experts.
    """
    if domains <= 1:
        return 1.0
    if choice.groups <= 1 or choice.groups_chosen >= choice.groups:
        return domains * (1.0 - _missed(choice.experts, choice.per_token, domains))
    import numpy as np

    experts, groups = choice.experts, choice.groups
    scores = rng_stream(0, "destinations").random((_TOKENS, experts))
    by_group = np.sort(scores.reshape(_TOKENS, groups, experts // groups), axis=2)
    best = by_group[:, :, -_BEST:].sum(axis=2)
    kept = np.argsort(-best, axis=1, kind="stable")[:, : choice.groups_chosen]
    open_ = np.zeros((_TOKENS, groups), dtype=bool)
    open_[np.arange(_TOKENS)[:, None], kept] = True
    scores = np.where(np.repeat(open_, experts // groups, axis=1), scores, -1.0)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : choice.per_token]
    visits = np.zeros((_TOKENS, domains), dtype=bool)
    visits[np.arange(_TOKENS)[:, None], chosen * domains // experts] = True
    return float(visits.sum(axis=1).mean())


def _missed(experts: int, per_token: int, domains: int) -> float:
    """Chance that none of a token's experts is in one domain."""
    outside = experts - experts / domains
    missed = 1.0
    for drawn in range(per_token):
        missed *= max(0.0, outside - drawn) / (experts - drawn)
    return missed
