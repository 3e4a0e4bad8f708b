"""Which running requests SGLang takes back when the pool lacks the next step's pages.

The request with the fewest outputs goes first, among equals the one with the longest prompt, then
the one that stands last in the batch. At least one goes, one always stays; those that stay stand in
this order from then on. After each the tree of prefixes gives up what the rest needs for 20 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

AHEAD_STEPS: Final = 20
"""Decode steps that room is made for."""


class Seat(NamedTuple):
    """A running request, as retraction sees it."""

    place: int
    """Its place in the batch."""
    made: int
    """Output tokens that are known."""
    prompt_tokens: int
    output_max: int


def order(seats: Sequence[Seat]) -> list[Seat]:
    """Those that stay longest first."""
    return sorted(seats, key=_worth, reverse=True)


def _worth(seat: Seat) -> tuple[int, int]:
    return seat.made, -seat.prompt_tokens


def retract(
    seats: Sequence[Seat],
    fits: Callable[[Sequence[Seat]], bool],
    take_back: Callable[[Seat, int], None],
    *,
    in_order: bool = False,
) -> list[Seat]:
    """Take requests back until the rest fits; those that stay, in their new order.

    `fits`: whether the pool has the next step's pages of these. `take_back`: the pages of one are
    freed; so many others remain. `in_order`: the last of the batch goes first (beside drafts).
    """
    left = list(seats) if in_order else order(seats)
    is_first = True
    while len(left) > 1 and (is_first or not fits(left)):
        is_first = False
        victim = left.pop()
        take_back(victim, len(left))
    return left


def ratio_after(seats: Sequence[Seat]) -> float:
    """The part of possible outputs that admission counts from now on; `seats` stay."""
    made = sum(seat.made for seat in seats) + AHEAD_STEPS * len(seats)
    return min(1.0, made / (sum(seat.output_max for seat in seats) + 1))
