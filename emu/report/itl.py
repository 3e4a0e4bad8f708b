"""Gaps between output tokens, pooled over all requests: exact moments, close percentiles.

    gaps = GapLog()
    gaps.add_gap(ns, count=1, at_ns=now)    # `count` tokens each came `ns` after the one before
    gaps.add_gaps([ns, ns, ...], at_ns=now)     # single gaps
    gaps.add_run(cumulative_ends, count, start_ns)  # a leap: step j took ends[j] - ends[j-1],
                                                    # ends[-1] being 0, and ended at start + ends[j]
    stats = gaps.finish()                   # GapStats, in ns

Times are only for the picture over time (`GapStats.heat`) and may be left out.

Up to `EXACT_SAMPLES` gaps are kept as they are and every figure is exact. Beyond, they fall into
a log-linear histogram of 2048 bins per octave: values below 4096 ns are exact, a larger one is
known within 2^-12 of itself (its bin's middle), so that any percentile is within 2^-11. Mean,
standard deviation, minimum and maximum stay exact: sums of gaps and of their squares are whole
numbers. Percentiles interpolate between the two nearest ranks, as numpy's "linear" does.

Results depend on the multiset of gaps only, never on how they were cut into runs or on when
buffers were flushed: a run with decode leaps and one without print the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul, sub
from typing import TYPE_CHECKING, Final, TypeAlias, final

from emu.kernel.natives import bisect_right

if TYPE_CHECKING:
    from array import array

    import numpy as np
    from numpy.typing import NDArray

Int64Array: TypeAlias = "NDArray[np.int64]"


GapPart: TypeAlias = (
    "tuple[tuple[int, int, int, int, int], tuple[Int64Array, Int64Array] | None,"
    " Int64Array | None, int, list[tuple[int, int, int]]]"
)
"""Gaps in plain values: moments, what is exact or bins, and the picture over time."""

EXACT_SAMPLES: Final = 100_000
_SUB_BITS: Final = 11
_SUB: Final = 1 << _SUB_BITS
_FLOAT_BITS: Final = 52
_FLOAT_BIAS: Final = 1023
"""A positive float64: its exponent, with this bias, stands above so many bits."""
_BINS: Final = (63 - _SUB_BITS) * _SUB + _SUB
_BUFFER: Final = 1 << 15
_RUNS_MAX: Final = 256
_HEAT_COLUMNS: Final = 256
_HEAT_FIRST_WIDTH_NS: Final = 250_000_000
HEAT_BINS_PER_OCTAVE: Final = 4
_HEAT_ROWS: Final = 64 * HEAT_BINS_PER_OCTAVE
_ROW_FIRSTS: Final = [
    -(-part[0] * (1 << octave) // part[1])
    for octave in range(1, 64)
    for part in ((2 ** (quarter / 4)).as_integer_ratio() for quarter in range(4))
]
"""Least gap of each row of the picture over time from the fifth on (those before it take 0 and 1,
in the first)."""


@final
class GapStats:
    """Distribution of inter-token gaps, ns."""

    samples: int
    sum_ns: int
    squares: int
    """Sum of the squares of all gaps."""
    min_ns: int
    max_ns: int
    is_exact: bool
    """False: percentiles come from the histogram (within 2^-11)."""
    values: list[int]
    """Distinct gaps in ascending order (bin middles if not exact)."""
    counts: list[int]
    heat_width_ns: int
    heat: list[tuple[int, int, int]]
    """(interval of `heat_width_ns`, bin of `HEAT_BINS_PER_OCTAVE` per octave of ns, gaps), where
    there were any, in order."""

    __slots__ = (
        "_ends",
        "counts",
        "heat",
        "heat_width_ns",
        "is_exact",
        "max_ns",
        "min_ns",
        "samples",
        "squares",
        "sum_ns",
        "values",
    )

    def __init__(
        self,
        samples: int,
        sum_ns: int,
        squares: int,
        min_ns: int,
        max_ns: int,
        is_exact: bool,
        values: list[int],
        counts: list[int],
        heat_width_ns: int,
        heat: list[tuple[int, int, int]],
    ) -> None:
        self.samples = samples
        self.sum_ns = sum_ns
        self.squares = squares
        self.min_ns = min_ns
        self.max_ns = max_ns
        self.is_exact = is_exact
        self.values = values
        self.counts = counts
        self.heat_width_ns = heat_width_ns
        self.heat = heat
        self._ends: list[int] = []

    @property
    def mean_ns(self) -> float:
        """0 where there are none."""
        return self.sum_ns / self.samples if self.samples else 0.0

    @property
    def std_ns(self) -> float:
        """Standard deviation; 0 where there are none."""
        samples, sum_ns = self.samples, self.sum_ns
        if not samples:
            return 0.0
        # In whole numbers up to the division: a difference of two floats so large would say
        # nothing.
        variance = (samples * self.squares - sum_ns * sum_ns) / samples**2
        return float(variance**0.5)

    def percentile_ns(self, percent: float) -> float:
        """Linear interpolation between the nearest ranks; 0 without samples."""

        if self.samples == 0:
            return 0.0
        rank = percent / 100 * (self.samples - 1)
        below = int(rank)
        ends = self._ends = self._ends or list(accumulate(self.counts))
        low = self._at(bisect_right(ends, below))
        high = self._at(bisect_right(ends, min(below + 1, self.samples - 1)))
        return low + (high - low) * (rank - below)

    def _at(self, place: int) -> float:
        """A value within what there was: the middle of a bin may lie outside."""
        return float(min(max(self.values[place], self.min_ns), self.max_ns))


class GapLog:
    """Collects gaps; constant memory."""

    def __init__(self, *, over_time: bool = True) -> None:
        """`over_time`: also count by instant, for the picture of the report."""
        self._over_time = over_time
        self._single_values: list[int] = []
        self._single_counts: list[int] = []
        self._single_times: list[int] = []
        self._runs: list[tuple[array[int], int, int, int]] = []
        self._run_steps = 0
        self._few = None if "numpy" in sys.modules else FewGaps()
        """Until numpy is worth loading."""
        self._heat = Heat() if self._few is None else None
        self._exact: list[tuple[Int64Array, Int64Array]] | None = []
        self._bins: Int64Array | None = None
        self._samples = 0
        self._sum_ns = 0
        self._squares = 0
        """Sum of squares, ns^2, of the gaps in bins."""
        self._min_ns = -1
        self._max_ns = 0

    def add_gap(self, ns: int, count: int = 1, at_ns: int = -1) -> None:
        """`count` tokens came `ns` after the one before them."""
        if count > 0:
            self._single_values.append(ns)
            self._single_counts.append(count)
            self._single_times.append(at_ns)
            if len(self._single_values) >= _BUFFER:
                self._flush_singles()

    def add_each(self, gaps_ns: Sequence[int], counts: Sequence[int], at_ns: Sequence[int]) -> None:
        """So many tokens came after each of these gaps, at these instants."""
        self._single_values.extend(gaps_ns)
        self._single_counts.extend(counts)
        self._single_times.extend(at_ns)
        if len(self._single_values) >= _BUFFER:
            self._flush_singles()

    def add_gaps(self, gaps_ns: Iterable[int], at_ns: int = -1) -> None:
        """Single gaps."""
        before = len(self._single_values)
        self._single_values.extend(gaps_ns)
        added = len(self._single_values) - before
        self._single_counts.extend([1] * added)
        self._single_times.extend([at_ns] * added)
        if len(self._single_values) >= _BUFFER:
            self._flush_singles()

    def add_run(
        self, cumulative_ends: array[int], count: int, start_ns: int = -1, first_count: int = -1
    ) -> None:
        """Steps of a leap, each giving one token to `count` members (the first: `first_count`).

        With `first_count` 0 there must be a second step.
        The array is kept until some hundreds of runs are there: it must not be written to.
        """
        steps = len(cumulative_ends)
        if count > 0 and steps:
            if first_count < 0:
                first_count = count
            self._runs.append((cumulative_ends, count, start_ns, first_count))
            self._run_steps += steps
            if self._run_steps >= _BUFFER or len(self._runs) >= _RUNS_MAX:
                self._flush_runs()

    def part(self) -> GapPart:
        """All so far, for another process; numpy must have been there from the start."""
        self._flush_singles()
        self._flush_runs()
        heat = self._heat
        assert heat is not None
        moments = (self._samples, self._sum_ns, self._squares, self._min_ns, self._max_ns)
        exact = None if self._exact is None else _merged(self._exact)
        return moments, exact, self._bins, heat.width_ns, heat.used()

    def add_part(self, part: GapPart) -> None:
        """Gaps that were collected elsewhere."""
        import numpy as np

        (samples, sum_ns, squares, min_ns, max_ns), exact, bins, width_ns, heat = part
        self._flush_singles()
        self._flush_runs()
        if not samples:
            return
        assert self._heat is not None
        self._heat.add_used(width_ns, heat)
        if exact is not None:
            self._add(*exact, np.full(len(exact[0]), -1, dtype=np.int64))
            return
        assert bins is not None
        own = self._binned()
        own += bins
        self._samples += samples
        self._sum_ns += sum_ns
        self._squares += squares
        self._min_ns = min_ns if self._min_ns < 0 else min(self._min_ns, min_ns)
        self._max_ns = max(self._max_ns, max_ns)

    def _binned(self) -> Int64Array:
        """The bins, with all that was kept as it is."""
        import numpy as np

        if self._bins is None:
            self._bins = np.zeros(_BINS, dtype=np.int64)
        if self._exact is not None:
            values, counts = _merged(self._exact)
            self._exact = None
            self._squares += _weighted_squares(values, counts)
            np.add.at(self._bins, bin_index(values), counts)
        return self._bins

    def finish(self) -> GapStats:
        """The distribution so far."""

        self._flush_singles()
        self._flush_runs()
        few = self._few
        if few is not None:
            return few.finish()
        values, counts = (column.tolist() for column in self._distribution())
        heat = self._heat
        assert heat is not None
        return GapStats(
            samples=self._samples,
            sum_ns=self._sum_ns,
            squares=self._squares if self._exact is None else _squares_of(values, counts),
            min_ns=max(self._min_ns, 0),
            max_ns=self._max_ns,
            is_exact=self._exact is not None,
            values=values,
            counts=counts,
            heat_width_ns=heat.width_ns,
            heat=heat.used(),
        )

    def _flush_singles(self) -> None:
        values, counts, times = self._single_values, self._single_counts, self._single_times
        if not values:
            return
        if self._few is not None:
            self._few.add_each(values, counts, times if self._over_time else [-1] * len(times))
        else:
            import numpy as np

            self._add(
                np.array(values, dtype=np.int64),
                np.array(counts, dtype=np.int64),
                np.array(times, dtype=np.int64),
            )
        values.clear()
        counts.clear()
        times.clear()

    def _flush_runs(self) -> None:
        """All waiting runs at once: a few array operations for hundreds of leaps."""
        if not self._runs:
            return
        if self._few is not None:
            self._add_few(self._few)
            self._runs.clear()
            self._run_steps = 0
            return
        import numpy as np

        runs, counts_each, starts, first_counts = zip(*self._runs, strict=True)
        self._runs.clear()
        self._run_steps = 0
        lengths = np.array([len(run) for run in runs], dtype=np.int64)
        ends = np.frombuffer(b"".join(runs), dtype=np.int64)
        values = np.diff(ends, prepend=0)
        firsts = np.cumsum(lengths) - lengths
        values[firsts] = ends[firsts]
        times = ends
        if self._over_time:
            begun = np.repeat(np.array(starts, dtype=np.int64), lengths)
            times = np.where(begun >= 0, ends + begun, -1)
        counts = np.repeat(np.array(counts_each, dtype=np.int64), lengths)
        counts_first = np.array(first_counts, dtype=np.int64)
        counts[firsts] = counts_first
        # A first step without a gap of its own shows that of the second, which counts.
        empty = firsts[counts_first == 0]
        values[empty] = values[empty + 1]
        self._add(values, counts, times)

    def _add_few(self, few: FewGaps) -> None:
        """The same without numpy."""
        values: list[int] = []
        counts: list[int] = []
        times: list[int] = []
        for run, count, start_ns, first_count in self._runs:
            if first_count:  # a first step without a gap of its own counts for nothing
                values.append(run[0])
                counts.append(first_count)
            values += map(sub, run[1:], run)
            counts += [count] * (len(run) - 1)
            at_ns = run if first_count else run[1:]
            if start_ns >= 0 and self._over_time:
                times += [start_ns + end_ns for end_ns in at_ns]
            else:
                times += [-1] * len(at_ns)
        few.add_each(values, counts, times)

    def _add(self, values: Int64Array, counts: Int64Array, times: Int64Array) -> None:
        import numpy as np

        low = int(values.min())
        high = int(values.max())
        if low < 0:
            raise ValueError(f"a gap between tokens cannot be negative: {low} ns")
        total = int(counts.sum())
        self._samples += total
        self._sum_ns += _weighted_sum(values, counts, high * total)
        self._min_ns = low if self._min_ns < 0 else min(self._min_ns, low)
        self._max_ns = max(self._max_ns, high)
        self._add_heat(values, counts, times)
        if self._exact is not None:
            self._exact.append((values, counts))
            if self._samples > EXACT_SAMPLES:
                self._binned()
            return
        bins = self._binned()
        self._squares += _weighted_squares(values, counts)
        np.add.at(bins, bin_index(values), counts)

    def _add_heat(self, values: Int64Array, counts: Int64Array, times: Int64Array) -> None:
        if self._over_time and self._heat is not None:
            self._heat.add(values, counts, times)

    def _distribution(self) -> tuple[Int64Array, Int64Array]:
        import numpy as np

        if self._exact is not None:
            return _merged(self._exact)
        assert self._bins is not None
        used = np.flatnonzero(self._bins)
        return bin_middle(used), self._bins[used]


class FewGaps:
    """The same figures of the gaps of a small run, one by one, in plain Python."""

    def __init__(self) -> None:
        self._samples = self._sum_ns = self._squares = self._max_ns = 0
        self._min_ns = -1
        self._is_exact = True
        self._by_value: dict[int, int] = {}
        """Of exact values, or of bins."""
        self._heat: dict[int, int] = {}
        self._width_ns = _HEAT_FIRST_WIDTH_NS

    def add_each(self, values: list[int], counts: list[int], times_ns: list[int]) -> None:
        """So many gaps of each length (`values`, ns), at a time each (-1 = unknown)."""
        if not values:
            return
        least = min(values)
        if least < 0:
            raise ValueError(f"a gap between tokens cannot be negative: {least} ns")
        self._samples += sum(counts)
        self._sum_ns += sum(map(mul, values, counts))
        self._max_ns = max(self._max_ns, max(values))
        if least < self._min_ns or self._min_ns < 0:
            self._min_ns = least
        if self._is_exact:
            keys = values
        else:
            keys = list(map(bin_of, values))
            self._squares += _squares_of(values, counts)
        by_value = self._by_value
        for key, count in zip(keys, counts, strict=True):
            by_value[key] = by_value.get(key, 0) + count
        last_ns = max(times_ns)
        while last_ns // self._width_ns >= _HEAT_COLUMNS:
            self._widen()
        heat, width_ns = self._heat, self._width_ns
        for value, count, time_ns in zip(values, counts, times_ns, strict=True):
            if time_ns >= 0:
                place = time_ns // width_ns * _HEAT_ROWS + row_of(value)
                heat[place] = heat.get(place, 0) + count
        if self._is_exact and self._samples > EXACT_SAMPLES:
            self._is_exact = False
            self._squares = _squares_of(list(by_value), list(by_value.values()))
            self._by_value = {}
            for each, number in by_value.items():
                index = bin_of(each)
                self._by_value[index] = self._by_value.get(index, 0) + number

    def _widen(self) -> None:
        self._width_ns *= 2
        narrow, self._heat = self._heat, {}
        for place, count in narrow.items():
            column, row = divmod(place, _HEAT_ROWS)
            wide = column // 2 * _HEAT_ROWS + row
            self._heat[wide] = self._heat.get(wide, 0) + count

    def finish(self) -> GapStats:
        """The distribution so far."""
        keys = sorted(self._by_value)
        counts = [self._by_value[key] for key in keys]
        heat = self._heat
        return GapStats(
            samples=self._samples,
            sum_ns=self._sum_ns,
            squares=_squares_of(keys, counts) if self._is_exact else self._squares,
            min_ns=max(self._min_ns, 0),
            max_ns=self._max_ns,
            is_exact=self._is_exact,
            values=keys if self._is_exact else [middle_of(key) for key in keys],
            counts=counts,
            heat_width_ns=self._width_ns,
            heat=[(*divmod(place, _HEAT_ROWS), heat[place]) for place in sorted(heat)],
        )


class Heat:
    """Counts by time and size. The width doubles when the run outgrows the columns, so that the
    result is the same as if the last width had been known from the start."""

    def __init__(self) -> None:
        import numpy as np

        self.width_ns = _HEAT_FIRST_WIDTH_NS
        self._counts = np.zeros((_HEAT_COLUMNS, _HEAT_ROWS), dtype=np.int64)
        self._last = -1

    def add(self, values: Int64Array, counts: Int64Array, times: Int64Array) -> None:
        import numpy as np

        known = times >= 0
        if not known.all():
            values, counts, times = values[known], counts[known], times[known]
            if len(times) == 0:
                return
        last_ns = int(times.max())
        while last_ns // self.width_ns >= _HEAT_COLUMNS:
            self._widen()
        columns = times // self.width_ns
        self._last = max(self._last, int(columns.max()))
        np.add.at(self._counts, (columns, heat_row(values)), counts)

    def add_used(self, width_ns: int, used: list[tuple[int, int, int]]) -> None:
        """Counts that were collected elsewhere, with columns of this width."""
        import numpy as np

        if not used:
            return
        places, rows, counts = (
            np.array(column, dtype=np.int64) for column in zip(*used, strict=True)
        )
        while self.width_ns < width_ns:
            self._widen()
        columns = places * width_ns // self.width_ns
        self._last = max(self._last, int(columns.max()))
        np.add.at(self._counts, (columns, rows), counts)

    def _widen(self) -> None:
        pairs = self._counts.reshape(_HEAT_COLUMNS // 2, 2, _HEAT_ROWS).sum(axis=1)
        self._counts[: _HEAT_COLUMNS // 2] = pairs
        self._counts[_HEAT_COLUMNS // 2 :] = 0
        self.width_ns *= 2
        self._last //= 2

    def used(self) -> list[tuple[int, int, int]]:
        import numpy as np

        rows, bins = np.nonzero(self._counts)
        return list(
            zip(rows.tolist(), bins.tolist(), self._counts[rows, bins].tolist(), strict=True)
        )


def row_of(value: int) -> int:
    """`heat_row` of one gap."""
    row = bisect_right(_ROW_FIRSTS, value)
    return row + 3 if row else 0


def heat_row(values: Int64Array) -> Int64Array:
    """Bin of a gap in the picture over time."""
    import numpy as np

    logs = np.log2(np.maximum(values, 1).astype(np.float64)) * HEAT_BINS_PER_OCTAVE
    return np.minimum(logs.astype(np.int64), _HEAT_ROWS - 1)


def bin_index(values: Int64Array) -> Int64Array:
    """Bin of each value (>= 0): values below 2 * 2048 one each, then 2048 per octave."""
    import numpy as np

    shift = values.astype(np.float64).view(np.int64)
    shift >>= _FLOAT_BITS
    shift -= _FLOAT_BIAS + _SUB_BITS
    np.maximum(shift, 0, out=shift)
    if values.size and values.max() >> _FLOAT_BITS:
        # The conversion may round up into the next octave; one step back is right then.
        shift -= (shift > 0) & ((values >> shift) < _SUB)
    index: Int64Array = values >> shift
    shift <<= _SUB_BITS
    index += shift
    return index


def bin_of(value: int) -> int:
    """`bin_index` of one value."""
    shift = max(value.bit_length() - (_SUB_BITS + 1), 0)
    return (value >> shift) + (shift << _SUB_BITS)


def middle_of(index: int) -> int:
    """`bin_middle` of one bin."""
    shift = max((index >> _SUB_BITS) - 1, 0)
    return ((index - (shift << _SUB_BITS)) << shift) + ((1 << shift) >> 1)


def bin_middle(index: Int64Array) -> Int64Array:
    """Middle of a bin, the inverse of `bin_index` within half a bin."""
    import numpy as np

    shift = np.maximum((index >> _SUB_BITS) - 1, 0)
    low = (index - (shift << _SUB_BITS)) << shift
    middle: Int64Array = low + ((np.int64(1) << shift) >> 1)
    return middle


def _weighted_sum(values: Int64Array, counts: Int64Array, bound: int) -> int:
    import numpy as np

    if bound < 2**62:
        return int(np.dot(values, counts))
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return sum(value * count for value, count in pairs)


def _squares_of(values: Sequence[int], counts: Sequence[int]) -> int:
    """Sum of squares, ns^2."""
    return sum(map(mul, map(mul, values, values), counts))


def _weighted_squares(values: Int64Array, counts: Int64Array) -> int:
    """The same of many values: the last 64 bits from whole numbers, what is above from floats."""
    import numpy as np

    floats = values.astype(np.float64)
    about = int((floats * floats * counts).sum())  # `dot` of floats would start threads
    # The sum of n such products is within (n + 5) 2^-53 of itself, which must be below 2^62.
    if about * (len(values) + 5) >= 2**115:
        return _squares_of(values.tolist(), counts.tolist())
    rest = int(np.dot(values * values, counts))  # modulo 2^64
    return about + ((rest - about + 2**63) % 2**64 - 2**63)


def _merged(chunks: Sequence[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    """Distinct values in ascending order with their total counts."""
    import numpy as np

    if not chunks:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty.copy()
    values = np.concatenate([chunk[0] for chunk in chunks])
    counts = np.concatenate([chunk[1] for chunk in chunks])
    distinct, place = np.unique(values, return_inverse=True)
    totals = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(totals, place, counts)
    return distinct, totals
