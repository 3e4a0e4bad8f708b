"""A running digest of integers: the sum of each one, mixed, modulo 2^64.

It does not depend on the order of the values, so that digests of parts add up to that of the whole
(`emu/runs/shards.py`). Values are instants, which a run goes through in their order anyway.

The mixing is that of splitmix64 without its last step: v times an odd number, then its upper half
onto the lower one, then times another odd number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

_FIRST: Final = 0x9E3779B97F4A7C15
_SECOND: Final = 0xBF58476D1CE4E5B9
_HALF: Final = 32
_MASK: Final = (1 << 64) - 1


class Digest:
    """A digest of non-negative integers below 2^64."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Values are appended here; `fold` from time to time, so that it does not grow."""
        self._folded = 0

    def fold(self) -> int:
        """Add what waits; the digest of all values so far."""
        self._folded = (self._folded + digest_of(self.waiting)) & _MASK
        self.waiting.clear()
        return self._folded


def digest_of(values: Sequence[int]) -> int:
    """The digest of these values: numpy adds them up where it is loaded, and gives the same."""
    if "numpy" in sys.modules:
        import numpy as np

        mixed = np.array(values, dtype=np.uint64)
        mixed *= np.uint64(_FIRST)
        mixed ^= mixed >> np.uint64(_HALF)
        mixed *= np.uint64(_SECOND)
        return int(mixed.sum())
    total = 0
    for value in values:
        first = (value * _FIRST) & _MASK
        total += (first ^ (first >> _HALF)) * _SECOND
    return total & _MASK
