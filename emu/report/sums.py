"""Sums and spreads of columns, equal to the bit with numpy and without.

A few thousand values are added up here, so that a small run need not load numpy; more are added
up by numpy, in the same order.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from array import array


FEW: Final = 4096
"""Values that are added up in plain Python. Numpy casts 8192 integers at a time, which would cut
the tree of its sums."""


def is_few(count: int) -> bool:
    """Whether so many values are better handled in plain Python."""
    return count <= FEW and "numpy" not in sys.modules


def added(values: Sequence[float]) -> float:
    """The sum as numpy adds: by halves, down to eight running sums over at most 128 values."""
    count = len(values)
    if count < 8:
        total = 0.0
        for value in values:
            total += value
        return total
    if count > 128:
        half = count // 2
        half -= half % 8
        return added(values[:half]) + added(values[half:])
    sums = list(values[:8])
    whole = count - count % 8
    for start in range(8, whole, 8):
        for lane in range(8):
            sums[lane] += values[start + lane]
    a, b, c, d, e, f, g, h = sums
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for value in values[whole:]:
        total += value
    return total


def ascending(values: array[int]) -> Sequence[int]:
    """The same, sorted."""
    if is_few(len(values)):
        return sorted(values)
    import numpy as np

    found: Sequence[int] = np.sort(np.frombuffer(values, dtype=np.int64))  # type: ignore[assignment]
    return found


def total_of(values: Sequence[int]) -> int:
    """The sum of integers."""
    if is_few(len(values)):
        return sum(values)
    import numpy as np

    return int(np.asarray(values).sum())


def mean_of(values: Sequence[int]) -> float:
    """Equals `numpy.mean`."""
    if not is_few(len(values)):
        import numpy as np

        return float(np.asarray(values).mean())
    return added([float(value) for value in values]) / len(values)


def deviation_of(values: Sequence[int]) -> float:
    """Equals `numpy.std`."""
    if not is_few(len(values)):
        import numpy as np

        return float(np.asarray(values).std())
    mean = mean_of(values)
    distances = [value - mean for value in values]
    return math.sqrt(added([each * each for each in distances]) / len(values))
