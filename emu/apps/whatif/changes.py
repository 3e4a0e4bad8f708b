"""The difference that a variant makes, request by request, with intervals."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from emu.apps.whatif.latencies import Floats, Latencies
from emu.rng import rng_stream

_BLOCKS: Final = 40
_RESAMPLES: Final = 1000


class Change(msgspec.Struct, frozen=True):
    """How much longer requests take than in the replay of the log, ms; negative = less."""

    metric: str
    mean_ms: float
    low_ms: float
    high_ms: float
    """95 %, a bootstrap over blocks of consecutive requests."""
    better: float
    """Part of the requests that are faster by more than 1 %."""
    worse: float


def changes(base: Latencies, other: Latencies, seed: int) -> list[Change]:
    """Differences of pairs: other - base."""
    found = []
    for metric in ("TTFT", "TPOT", "E2E"):
        mine, theirs = other.of(metric), base.of(metric)
        both = ~(np.isnan(mine) | np.isnan(theirs))
        if not both.any():
            continue
        difference = (mine - theirs)[both]
        low, high = block_interval(difference, seed)
        share = 0.01 * theirs[both]
        found.append(
            Change(
                metric,
                float(difference.mean()),
                low,
                high,
                float((difference < -share).mean()),
                float((difference > share).mean()),
            )
        )
    return found


def block_interval(values: Floats, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of values in order of arrival."""
    blocks = np.array_split(values, min(_BLOCKS, len(values)))
    sums = np.array([block.sum() for block in blocks])
    sizes = np.array([len(block) for block in blocks])
    rng = rng_stream(seed, "whatif.bootstrap")
    drawn = rng.integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
