"""How the steps of a real engine vary around their mean: a seeded factor for each step.

Every step takes its time times a factor near one (log-normal, standard deviation `jitter_step`),
and now and then (`straggler_part` of all steps) a pause on top, of exponential length: a
collection of garbage, a page of memory, another process. Both are neutral in the mean: constants
were fitted to means of real steps, which contain them. Distributions are an engine's
(`EngineModel`), scaled from the percentiles of measured runs.

Chance is counted, not drawn: step n of a replica has its factor from a hash of (seed, replica,
n). So a leap of many steps equals stepping, a cut leap needs no rewinding, and replicas do not
disturb each other. Values come from tables of quantiles, in integers; those of a block of steps are
looked up together.
"""

from __future__ import annotations

import functools
import math
import zlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from emu.latency.ends import Ends
from emu.latency.engine import EngineModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_BITS: Final = 12
_QUANTILES: Final = 1 << _BITS
_SHIFT: Final = 20
_BLOCK_BITS: Final = 8
_BLOCK: Final = 1 << _BLOCK_BITS
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB


class Jitter:
    """The factors of one replica's steps."""

    def __init__(self, engine: EngineModel, seed: int, replica_id: int) -> None:
        self._key = zlib.crc32(f"jitter.{seed}.{replica_id}".encode()) * _GOLDEN & _MASK
        self._engine = engine
        self._part = round(engine.straggler_part * 2**32)
        self._mean_ns = round(engine.straggler_part * engine.straggler_ns)
        self._block = -1
        """Which block of steps is drawn."""
        self._scales: list[int] = []
        """Their factors, binary fixed point."""
        self._added_ns: list[int] = []
        """What they take besides: a pause, less the mean of pauses."""
        self.counted = 0
        """Steps of a pipeline, whose batches are in flight together."""

    def step(self, number: int, cost_ns: int) -> int:
        """What step `number` takes instead of `cost_ns`."""
        if number >> _BLOCK_BITS != self._block:
            self._draw(number >> _BLOCK_BITS)
        place = number & (_BLOCK - 1)
        taken = (cost_ns * self._scales[place] >> _SHIFT) + self._added_ns[place]
        least = cost_ns >> 1
        return taken if taken > least else max(1, least)

    def run(self, number: int, ends: Ends, first_ns: int = -1) -> Ends:
        """Cumulative ends of the steps from `number` on, instead of `ends`.

        `first_ns`: a step of this length, as it is, comes before them; -1 = none.
        """
        before = now = 0
        varied: list[int] = []
        if first_ns >= 0:
            now = first_ns
            varied.append(now)
        for end in ends:
            if number >> _BLOCK_BITS != self._block:
                self._draw(number >> _BLOCK_BITS)
            place = number & (_BLOCK - 1)
            cost_ns = end - before
            taken = (cost_ns * self._scales[place] >> _SHIFT) + self._added_ns[place]
            least = cost_ns >> 1
            now += taken if taken > least else max(1, least)
            varied.append(now)
            before = end
            number += 1
        return array("q", varied)

    def _draw(self, block: int) -> None:
        """Factors and pauses of a block of steps."""
        import numpy as np

        first = block << _BLOCK_BITS
        bits = np.arange(first + 1, first + 1 + _BLOCK, dtype=np.uint64)
        bits *= np.uint64(_GOLDEN)
        bits += np.uint64(self._key)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_A)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_B)
        bits ^= bits >> np.uint64(31)
        low = np.uint64(_QUANTILES - 1)
        factors = _factors(self._engine.jitter_step)
        added_ns = np.full(_BLOCK, -self._mean_ns, dtype=np.int64)
        strays = (bits >> np.uint64(_BITS)) & np.uint64(0xFFFFFFFF) < np.uint64(self._part)
        if strays.any():
            which = (bits[strays] >> np.uint64(_BITS + 32)) & low
            added_ns[strays] += _pauses(self._engine.straggler_ns)[which.astype(np.intp)]
        self._block = block
        self._scales = factors[(bits & low).astype(np.intp)].tolist()
        self._added_ns = added_ns.tolist()

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
