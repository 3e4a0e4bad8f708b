"""Grouped products of routed experts, in seconds.

Tokens are sorted by expert and each expert's count is padded to a block of rows, which is small
where tokens are few. The weights of every expert that is met are read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from emu.latency.coefficients import Experts
from emu.latency.kernels.products import soft_max

_LEAST_ROWS: Final = 16
"""Rows of a matrix instruction."""
_POPULARITY: Final = 16.0
"""How much more often the most popular expert is chosen than the least. The measured tables draw
loads up to a few hundred times apart, large batches more; published routers less."""
_CLASSES: Final = 8


def _shares() -> tuple[float, ...]:
    """Popularity of classes of experts, in units of the mean."""
    drawn = [_POPULARITY ** ((at + 0.5) / _CLASSES) for at in range(_CLASSES)]
    return tuple(share * _CLASSES / sum(drawn) for share in drawn)


_SHARES: Final = _shares()


def met_experts(tokens: float, count: int, per_token: int) -> float:
    """Experts that at least one of so many tokens chooses.

    No router is even: popularity is spread over `_POPULARITY`, evenly in the logarithm.
    """
    if per_token >= count:
        return float(count)
    met = 0.0
    for share in _SHARES:
        chance = per_token / count * share
        met += 1.0 if chance >= 1.0 else -math.expm1(tokens * math.log1p(-chance))
    return max(1.0, count * met / len(_SHARES))


def padded_rows(counts: Sequence[float], block: float) -> float:
    """Rows that are computed when each expert's are padded."""
    return sum(math.ceil(count / block) * block for count in counts if count > 0)


def even_padded_rows(rows: float, met: float, block: float) -> float:
    """The same for rows that fall evenly on the experts that are met.

    Counts scatter about the mean, so that an expert's last block is half full on average.
    """
    mean = rows / met
    if mean <= 1.0:
        return met * block
    return met * max(block, mean + 0.5 * block)


def block_rows(kernel: Experts, rows: float, experts: int) -> float:
    """The block that is chosen for a mean number of rows of each expert."""
    mean = rows / experts
    return min(kernel.block, max(_LEAST_ROWS, 2.0 ** math.ceil(math.log2(max(1.0, mean)))))


class Expert(NamedTuple):
    """One expert, of which a layer has many."""

    params: int
    weight_bytes: int
    row_bytes: float
    """What moves for a routed row."""
    peak: float
    """FLOP/s of the units that multiply it."""


def grouped_s(
    kernel: Experts,
    each: Expert,
    *,
    met: float,
    rows: float,
    padded: float,
    memory_rate: float,
) -> float:
    """All experts of one layer on one rank.

    `met` experts are read; `rows` routed rows move, `padded` are computed.
    """
    compute_s = 2.0 * padded * each.params / (each.peak * kernel.compute)
    traffic = (met + kernel.few) * each.weight_bytes + rows * each.row_bytes * kernel.row
    memory_s = traffic / (memory_rate * kernel.memory)
    return soft_max(memory_s, compute_s, kernel.softness) + kernel.launch_us * 1e-6
