"""Whether the cluster kept up with the load: a verdict with the figure behind it. Pure.

The figure is the growth of waiting: the least-squares slope of a request's waiting time (time
until first scheduled, plus time between replicas) over its arrival time, in seconds of extra
waiting per second of arrivals, with its standard error. A server that gets `a` and can do `c` <
`a` requests per second makes every arrival wait (a - c) / a longer than one a second before, so
the slope is the part of the load that was too much. The rule, in this order:

* overloaded: slope - 2 standard errors > 0.02, and the last quarter of the arrivals waited longer
  than a tenth of what a request takes once it runs; or more than 5 % were rejected while waiting
  was long (as below);
* stable: the mean wait is below a tenth of the mean time in service, and below that in the last
  quarter of the arrivals;
* backlogged: anything else. Queues were long at times, and did not keep growing.
"""

from __future__ import annotations

import math
from array import array
from math import fsum
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from emu.report.records import RequestStats
from emu.report.sums import FEW, mean_of
from emu.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from array import array

    import numpy as np
    from numpy.typing import NDArray


GROWTH_LIMIT: Final = 0.02
LONG_WAIT_PART: Final = 0.1
REJECTED_PART: Final = 0.05
_PIECE: Final = 65_536

Verdict = Literal["stable", "backlogged", "overloaded", "unknown"]


class Load(msgspec.Struct, kw_only=True):
    """Verdict on load."""

    verdict: Verdict
    """unknown: no request completed."""
    wait_growth_s_per_s: float
    wait_growth_error_s_per_s: float
    mean_wait_ms: float
    mean_wait_last_quarter_ms: float
    mean_service_ms: float
    """First scheduled to last token, less the time between replicas."""
    arrival_rate_per_s: float
    completion_rate_per_s: float
    drain_s: float
    """From the last arrival to the last token."""


def judge_load(stats: RequestStats) -> Load:
    """Apply the rule to the completed requests of a run."""
    waits = stats.columns["wait"]  # in order of arrival
    count = len(waits)
    arrival_span_ns = max(stats.last_arrival_ns - stats.first_arrival_ns, 0)
    run_ns = max(stats.last_token_ns - stats.first_arrival_ns, 0)
    load = Load(
        verdict="unknown",
        wait_growth_s_per_s=0.0,
        wait_growth_error_s_per_s=0.0,
        mean_wait_ms=0.0,
        mean_wait_last_quarter_ms=0.0,
        mean_service_ms=0.0,
        arrival_rate_per_s=_rate(stats.requests - 1, arrival_span_ns),
        completion_rate_per_s=_rate(count, run_ns),
        drain_s=round(max(stats.last_token_ns - stats.last_arrival_ns, 0) / NS_PER_S, 6),
    )
    if count == 0:
        return load
    mean_ns, late_ns = mean_of(waits), mean_of(waits[-max(count // 4, 1) :])
    service_ns = mean_of(stats.columns["e2e"]) - mean_ns
    slope, error = growth(stats.columns["arrival"], waits)
    load.wait_growth_s_per_s = round(slope, 6)
    load.wait_growth_error_s_per_s = round(error, 6)
    load.mean_wait_ms = round(mean_ns / NS_PER_MS, 6)
    load.mean_wait_last_quarter_ms = round(late_ns / NS_PER_MS, 6)
    load.mean_service_ms = round(service_ns / NS_PER_MS, 6)
    long_ns = LONG_WAIT_PART * service_ns
    is_short = mean_ns <= long_ns and late_ns <= long_ns
    rejected = stats.by_status.get("rejected", 0) / max(stats.requests, 1)
    if slope - 2 * error > GROWTH_LIMIT and late_ns > long_ns:
        load.verdict = "overloaded"
    elif is_short:
        load.verdict = "stable"
    else:
        load.verdict = "overloaded" if rejected > REJECTED_PART else "backlogged"
    return load


def growth(x: array[int], y: array[int]) -> tuple[float, float]:
    """Least-squares slope of y over x and its standard error; zeros where x does not vary.

    Overwrites both.
    """
    if len(x) <= FEW:  # the same sums whether numpy is loaded or not
        return _growth_of_few(x, y)
    return _growth_of_many(_as_floats(x), _as_floats(y))


def _growth_of_few(x: array[int], y: array[int]) -> tuple[float, float]:
    mean = mean_of(x)
    over = [value - mean for value in x]
    spread = fsum([each * each for each in over])
    if len(x) < 3 or spread == 0:
        return 0.0, 0.0
    mean = mean_of(y)
    left = [value - mean for value in y]
    slope = fsum([a * b for a, b in zip(over, y, strict=True)]) / spread
    left = [b - slope * a for a, b in zip(over, left, strict=True)]
    return slope, math.sqrt(fsum([each * each for each in left]) / (len(x) - 2) / spread)


def _growth_of_many(
    x: np.ndarray[tuple[int], np.dtype[np.float64]], y: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> tuple[float, float]:
    import numpy as np

    x -= x.mean()  # in place: columns may have millions of rows
    spread = float(np.dot(x, x))
    if spread == 0:
        return 0.0, 0.0
    slope = float(np.dot(x, y)) / spread
    y -= y.mean()
    x *= slope
    y -= x
    return slope, (float(np.dot(y, y)) / (len(x) - 2) / spread) ** 0.5


def _as_floats(numbers: array[int]) -> NDArray[np.float64]:
    """The same numbers in the same memory; the column is gone."""
    import numpy as np

    column = np.frombuffer(numbers, dtype=np.int64)
    floats = column.view(np.float64)
    for start in range(0, len(column), _PIECE):
        floats[start : start + _PIECE] = column[start : start + _PIECE].astype(np.float64)
    return floats


def _rate(count: int, span_ns: int) -> float:
    return round(max(count, 0) * NS_PER_S / span_ns, 6) if span_ns > 0 else 0.0
