"""Mean and 95 % confidence interval over few repetitions (seeds): Student's t. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""
_NORMAL: Final = 1.960


class Mean(msgspec.Struct, frozen=True):
    """A mean of `count` repetitions; `half` is half the width of its interval, None for one."""

    mean: float
    half: float | None
    count: int


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and interval of repetitions that do not depend on each other; at least one value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Mean(mean, None, count)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Mean(mean, t_quantile(count - 1) * (variance / count) ** 0.5, count)


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; beyond 30 degrees of freedom within 0.2 %."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _NORMAL + 2.4 / freedom
