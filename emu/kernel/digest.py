"""A running digest of integers: h <- h * K + v, modulo 2^64, for each v in turn.

Python computes one step of it with long integers, at the price of ten bytecodes; numpy, where it is
loaded, adds hundreds of values for little more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_BLOCK: Final = 1024


class Digest:
    """A digest of non-negative integers below 2^64."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Values are appended here; `fold` from time to time, so that it does not grow."""
        self._folded = 0
        self._powers: NDArray[np.uint64] | None = None
        """_FACTOR ** (_BLOCK - 1), ..., _FACTOR, 1, modulo 2^64."""

    def fold(self) -> int:
        """Add what waits; the digest of all values so far."""
        if "numpy" in sys.modules:
            self._fold_blocks()
        else:
            folded = self._folded
            for value in self.waiting:
                folded = (folded * _FACTOR + value) & _MASK
            self._folded = folded
        self.waiting.clear()
        return self._folded

    def _fold_blocks(self) -> None:
        """Folded by numpy, whose unsigned arithmetic is modulo 2^64."""
        import numpy as np

        powers = self._powers
        if powers is None:
            powers = np.full(_BLOCK, _FACTOR, dtype=np.uint64)
            powers[-1] = 1
            powers[:] = np.multiply.accumulate(powers[::-1])[::-1]
            self._powers = powers
        values = np.array(self.waiting, dtype=np.uint64)
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK]
            count = len(block)
            added = int(np.dot(block, powers[-count:]))
            self._folded = (self._folded * pow(_FACTOR, count, _MASK + 1) + added) & _MASK
