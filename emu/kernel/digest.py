"""A running digest of integers: h <- h * K + v, modulo 2^64, for each v in turn.

Owns the digest and the values that wait to be added. Python computes one step of it with long
integers, at the price of ten bytecodes; numpy adds hundreds of values for little more.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_BLOCK: Final = 1024
_POWERS: Final = np.full(_BLOCK, _FACTOR, dtype=np.uint64)
"""_FACTOR ** (_BLOCK - 1), ..., _FACTOR, 1: unsigned arithmetic of numpy is modulo 2^64."""
_POWERS[-1] = 1
_POWERS[:] = np.multiply.accumulate(_POWERS[::-1])[::-1]


class Digest:
    """A digest of non-negative integers below 2^64."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Values are appended here; `fold` from time to time, so that it does not grow."""
        self._folded = 0

    def fold(self) -> int:
        """Add what waits; the digest of all values so far."""
        values = np.array(self.waiting, dtype=np.uint64)
        self.waiting.clear()
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK]
            count = len(block)
            added = int(np.dot(block, _POWERS[-count:]))
            self._folded = (self._folded * pow(_FACTOR, count, _MASK + 1) + added) & _MASK
        return self._folded
