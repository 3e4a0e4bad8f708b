"""Stripes of weights: a copy dealt over several lanes, and the node at which they meet again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from emu.units import MIB

STRIPE_BYTES: Final = 64 * MIB


def stripe_bytes(offset_bytes: int, lane: int, lanes: int) -> int:
    """How many of the first `offset_bytes` belong to a lane: pieces of 64 MiB dealt in turn."""
    turn = lanes * STRIPE_BYTES
    whole, rest = divmod(offset_bytes, turn)
    return whole * STRIPE_BYTES + min(max(rest - lane * STRIPE_BYTES, 0), STRIPE_BYTES)


class StripeJoin:
    """A node of a lane transfer: a segment is there when every stripe has brought its part."""

    def __init__(self, lanes: int, tell: Callable[[int, bool], None]) -> None:
        self._marks = [0] * lanes
        self._open = lanes
        self._told = 0
        self._tell = tell

    def mark(self, lane: int, count: int) -> None:
        """A stripe has passed `count` segments' ends."""
        self._marks[lane] = count
        ready = min(self._marks)
        if ready > self._told:
            self._told = ready
            self._tell(ready, False)

    def end(self, lane: int) -> None:
        """A stripe is complete."""
        self._open -= 1
        if self._open == 0:
            self._tell(0, True)
