"""How the steps of a real engine vary around their mean: a seeded factor for each step.

Every step takes its time times a factor near one (log-normal, standard deviation `jitter_step`),
and now and then (`straggler_part` of all steps) a pause on top, of exponential length: a
collection of garbage, a page of memory, another process. Both are neutral in the mean: constants
were fitted to means of real steps, which contain them. Distributions are an engine's
(`EngineModel`), scaled from the percentiles of measured runs.

Chance is counted, not drawn: step n of a replica has its factor from a hash of (seed, replica,
n). So a leap of many steps equals stepping, a cut leap needs no rewinding, and replicas do not
disturb each other. Values come from tables of quantiles, in integers.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from emu.latency.engine import EngineModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_BITS: Final = 12
_QUANTILES: Final = 1 << _BITS
_SHIFT: Final = 20
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB


class Jitter:
    """The factors of one replica's steps."""

    def __init__(self, engine: EngineModel, seed: int, replica_id: int) -> None:
        self._key = zlib.crc32(f"jitter.{seed}.{replica_id}".encode()) * _GOLDEN & _MASK
        self._factors = _factors(engine.jitter_step)
        self._pauses = _pauses(engine.straggler_ns)
        self._part = round(engine.straggler_part * 2**32)
        self._mean_ns = round(engine.straggler_part * engine.straggler_ns)
        self.counted = 0
        """Steps of a pipeline, whose batches are in flight together."""

    def step(self, number: int, cost_ns: int) -> int:
        """What step `number` takes instead of `cost_ns`."""
        bits = ((number + 1) * _GOLDEN + self._key) & _MASK
        bits = ((bits ^ (bits >> 30)) * _MIX_A) & _MASK
        bits = ((bits ^ (bits >> 27)) * _MIX_B) & _MASK
        bits ^= bits >> 31
        taken = (cost_ns * int(self._factors[bits & (_QUANTILES - 1)])) >> _SHIFT
        taken -= self._mean_ns
        if (bits >> _BITS) & 0xFFFFFFFF < self._part:
            taken += int(self._pauses[bits >> (_BITS + 32) & (_QUANTILES - 1)])
        least = cost_ns >> 1
        return taken if taken > least else max(1, least)

    def run(self, number: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cumulative ends of the steps from `number` on, instead of `ends`."""
        import numpy as np

        costs = np.diff(ends, prepend=0)
        bits = np.arange(number + 1, number + 1 + len(ends), dtype=np.uint64)
        bits *= np.uint64(_GOLDEN)
        bits += np.uint64(self._key)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_A)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_B)
        bits ^= bits >> np.uint64(31)
        low = np.uint64(_QUANTILES - 1)
        taken = (costs * self._factors[(bits & low).astype(np.intp)]) >> _SHIFT
        taken -= self._mean_ns
        strays = (bits >> np.uint64(_BITS)) & np.uint64(0xFFFFFFFF) < np.uint64(self._part)
        if strays.any():
            which = (bits[strays] >> np.uint64(_BITS + 32)) & low
            taken[strays] += self._pauses[which.astype(np.intp)]
        np.maximum(taken, costs >> 1, out=taken)
        np.maximum(taken, 1, out=taken)
        found: NDArray[np.int64] = np.cumsum(taken)
        return found

    def stages(self, costs_ns: tuple[int, ...]) -> tuple[int, ...]:
        """The next batch of a pipeline: all its stages by one factor, a pause on the first."""
        self.counted += 1
        return self.spread(self.counted - 1, costs_ns)

    def spread(self, number: int, costs_ns: Sequence[int]) -> tuple[int, ...]:
        """The same of batch `number`."""
        whole = sum(costs_ns)
        taken = self.step(number, whole)
        spread = [taken * cost // whole for cost in costs_ns]
        spread[0] += taken - sum(spread)
        return tuple(spread)


@functools.cache
def _factors(deviation: float) -> NDArray[np.int64]:
    """Quantiles of the factor, mean 1, binary fixed point."""
    import statistics  # 5 ms, and few runs vary

    import numpy as np

    normal = statistics.NormalDist()
    values = [
        math.exp(deviation * normal.inv_cdf((index + 0.5) / _QUANTILES))
        for index in range(_QUANTILES)
    ]
    mean = math.fsum(values) / _QUANTILES
    return np.array([round(value / mean * (1 << _SHIFT)) for value in values], dtype=np.int64)


@functools.cache
def _pauses(mean_ns: int) -> NDArray[np.int64]:
    """Quantiles of a pause, ns."""
    import numpy as np

    values = [-math.log1p(-(index + 0.5) / _QUANTILES) for index in range(_QUANTILES)]
    mean = math.fsum(values) / _QUANTILES
    return np.array([round(value / mean * mean_ns) for value in values], dtype=np.int64)
