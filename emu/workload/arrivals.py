"""Arrival processes, in chunks: exact in law (no cut tails), in integer ns, cheap in numpy.

Time-varying rates are drawn by inversion: unit-exponential steps in expected arrivals, mapped
back to time by the inverse of the cumulative rate. A stream gives the same times however its
caller slices it only if the slices are the same; every pass over a workload uses equal slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from emu.config.schema import ArrivalsTable
from emu.errors import InputError
from emu.rng import rng_stream
from emu.units import NS_PER_S
from emu.workload.items import Ints

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Floats: TypeAlias = "npt.NDArray[np.float64]"
NEVER_NS = 2**62
"""In place of arrivals that a process that ends would never make."""


class GapStream:
    """Independent gaps; each is rounded to ns, so sums are exact."""

    def __init__(self, draw_s: Callable[[int], Floats]) -> None:
        self._draw_s = draw_s
        self._now_ns = 0

    def take(self, count: int) -> Ints:
        """The next arrivals, in ns."""
        import numpy as np

        gaps = np.rint(self._draw_s(count) * NS_PER_S).astype(np.int64)
        times: Ints = np.cumsum(gaps) + self._now_ns
        if count:
            self._now_ns = int(times[-1])
        return times


class EvenStream:
    """Arrivals at 0, gap, 2 gap ...; a gap of 0 puts all at 0."""

    def __init__(self, gap_ns: float) -> None:
        self._gap_ns = gap_ns
        self._done = 0

    def take(self, count: int) -> Ints:
        """The next arrivals, in ns."""
        import numpy as np

        index = np.arange(self._done, self._done + count, dtype=np.int64)
        self._done += count
        times: Ints = np.rint(index * self._gap_ns).astype(np.int64)
        return times


class InvertedStream:
    """A Poisson process with a rate that changes in time."""

    def __init__(self, rng: np.random.Generator, to_time_s: Callable[[Floats], Floats]) -> None:
        self._rng = rng
        self._to_time_s = to_time_s
        self._expected = 0.0

    def take(self, count: int) -> Ints:
        """The next arrivals, in ns."""
        import numpy as np

        steps = np.cumsum(self._rng.standard_exponential(count)) + self._expected
        if count:
            self._expected = float(steps[-1])
        times = np.minimum(self._to_time_s(steps) * NS_PER_S, float(NEVER_NS))
        return np.rint(times).astype(np.int64)


def arrival_stream(
    table: ArrivalsTable, seed: int, config_source: str
) -> GapStream | EvenStream | InvertedStream:
    """The process that the table describes, from the start. Raises InputError."""
    rng = rng_stream(seed, "workload.arrivals")
    rate = table.rate_per_s
    if table.process == "poisson":
        return GapStream(lambda count: rng.standard_exponential(count) / rate)
    if table.process == "gamma":
        shape = 1 / table.cv**2
        return GapStream(lambda count: rng.standard_gamma(shape, count) / (rate * shape))
    if table.process == "constant":
        return EvenStream(NS_PER_S / rate)
    if table.process == "all_at_once":
        return EvenStream(0.0)
    if table.process == "burst":
        return InvertedStream(rng, _invert_bursts(table, config_source))
    return InvertedStream(rng, _invert_points(table.points, config_source))


def _invert_bursts(table: ArrivalsTable, config_source: str) -> Callable[[Floats], Floats]:
    """Each period starts with a burst at its own rate; the rest has the base rate."""
    import numpy as np

    length_s, every_s = table.burst_length_s, table.burst_every_s
    if length_s >= every_s:
        problem = f"must be less than burst_every_s ({every_s:g}), not {length_s:g}"
        raise InputError(config_source, None, "workload.synthetic.arrivals.burst_length_s", problem)
    in_burst = table.burst_rate_per_s * length_s
    in_period = in_burst + table.rate_per_s * (every_s - length_s)

    def to_time_s(expected: Floats) -> Floats:
        period = np.floor(expected / in_period)
        rest = expected - period * in_period
        inside = np.where(
            rest < in_burst,
            rest / table.burst_rate_per_s,
            length_s + (rest - in_burst) / table.rate_per_s,
        )
        times: Floats = period * every_s + np.minimum(inside, every_s)
        return times

    return to_time_s


def _invert_points(points: list[list[float]], config_source: str) -> Callable[[Floats], Floats]:
    """Rates linear between the points, constant before the first and after the last."""
    import numpy as np

    times, rates = _check_points(points, config_source)
    steps = np.diff(times)
    slopes = np.diff(rates) / steps if len(steps) else np.zeros(0)
    reached = np.concatenate(([0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * steps)))
    slopes = np.append(slopes, 0.0)

    def to_time_s(expected: Floats) -> Floats:
        at = np.searchsorted(reached, expected, side="right") - 1
        left = expected - reached[at]
        rate = rates[at]
        # The root of left = rate t + slope t^2 / 2 without cancellation. Rate 0 forever: never.
        root = rate + np.sqrt(np.maximum(rate * rate + 2 * slopes[at] * left, 0.0))
        inside = np.where(left > 0, math.inf, 0.0)
        np.divide(2 * left, root, out=inside, where=root > 0)
        return times[at] + inside

    return to_time_s


def _check_points(points: list[list[float]], config_source: str) -> tuple[Floats, Floats]:
    import numpy as np

    field = "workload.synthetic.arrivals.points"
    if not points:
        raise InputError(config_source, None, field, "piecewise needs at least one point")
    for index, point in enumerate(points):
        here = f"{field}[{index}]"
        if len(point) != 2 or not all(map(math.isfinite, point)):
            raise InputError(config_source, None, here, "must be a pair [second, rate]")
        if point[1] < 0 or point[0] < 0:
            raise InputError(config_source, None, here, "second and rate must be at least 0")
        if index and point[0] <= points[index - 1][0]:
            raise InputError(config_source, None, here, "must be later than the point before")
    if not any(rate for _, rate in points):
        raise InputError(config_source, None, field, "must have a rate above 0")
    table = np.array(points, dtype=np.float64)
    if table[0, 0] > 0:
        table = np.vstack(([0.0, table[0, 1]], table))
    return table[:, 0], table[:, 1]
