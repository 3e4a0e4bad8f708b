"""Look-up tables of measured layer times: pure numbers, no files.

Owns the interpolation rules of the profile backend (LLMServingSim 2.0): 1-D curves, the 4-D
attention grid, the skew correction and the 2-D expert table.
All times are integer nanoseconds, interpolation is linear on raw values in float64, and results
are truncated, so the order of operations is part of the contract: scalar and vectorized paths
perform the same float operations in the same order and agree bit by bit.

Does not know layers, models or batches (`profile.py`), nor files (`profile_bundle.py`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emu.catalogue.lookup import GpuSpec
from emu.latency.base import BatchShape


def blend(xs: list[int], ys: list[int], x: int) -> float:
    """Linear interpolation; clamped below the first key, extrapolated above the last."""
    i = bisect_right(xs, x)
    if i == 0:
        return ys[0]
    if i == len(xs):
        if i == 1:
            return ys[0]
        i -= 1
    x0, y0 = xs[i - 1], ys[i - 1]
    return y0 + (x - x0) / (xs[i] - x0) * (ys[i] - y0)


def bracket(values: list[int], x: int) -> tuple[int, int, float]:
    """Positions around x on an axis and the weight of the second; > 1 beyond the last value."""
    if x <= values[0] or len(values) == 1:
        return 0, 0, 0.0
    i = min(bisect_right(values, x), len(values) - 1)
    x0 = values[i - 1]
    return i - 1, i, (x - x0) / (values[i] - x0)


def first_of_equal_keys(
    points: Sequence[tuple[tuple[int, ...], int]],
) -> dict[tuple[int, ...], int]:
    """Points by key in sorted order; of equal keys the one that comes first in the file stays."""
    unique: dict[tuple[int, ...], int] = {}
    for key, value in sorted(points, key=lambda point: point[0]):
        unique.setdefault(key, value)
    return unique


class Curve:
    """Time of one layer over a count (tokens, or rows of logits)."""

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        assert points
        unique = first_of_equal_keys([((x,), y) for x, y in points])
        self._xs = [key[0] for key in unique]
        self._ys = list(unique.values())

    @property
    def last(self) -> int:
        """Largest profiled count; above it the last interval is extrapolated."""
        return self._xs[-1]

    def at(self, count: int) -> int:
        """Nanoseconds at `count` (below 1 counts as 1), at least 1."""
        return max(1, int(blend(self._xs, self._ys, max(1, count))))


class ExpertTable:
    """Time of the whole expert block of one rank over (tokens, activated experts)."""

    __slots__ = ("_activated", "_rows")

    def __init__(self, points: Sequence[tuple[int, int, int]]) -> None:
        assert points
        unique = first_of_equal_keys([((a, t), ns) for t, a, ns in points])
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for (activated, tokens), ns in unique.items():
            xs, ys = rows.setdefault(activated, ([], []))
            xs.append(tokens)
            ys.append(ns)
        self._activated = list(rows)
        self._rows = list(rows.values())

    def at(self, tokens: int, activated: int) -> int:
        """Nanoseconds for `tokens` on a rank that uses `activated` of its experts."""
        tokens = max(1, tokens)
        low, high, weight = bracket(self._activated, max(1, activated))
        value = blend(*self._rows[low], tokens)
        if high != low:
            value = value + weight * (blend(*self._rows[high], tokens) - value)
        return max(1, int(value))


class _Slice:
    """The attention times of one (prefill chunk, decode count) pair over both histories."""

    __slots__ = ("arrays", "kv_prefill", "rows")

    def __init__(self, points: Sequence[tuple[int, int, int]]) -> None:
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for kv_prefill, kv_decode, ns in points:
            xs, ys = rows.setdefault(kv_prefill, ([], []))
            xs.append(kv_decode)
            ys.append(ns)
        self.kv_prefill = list(rows)
        self.rows = list(rows.values())
        self.arrays = [
            (np.array(xs, dtype=np.int64), np.array(ys, dtype=np.int64)) for xs, ys in self.rows
        ]

    def at(self, kp: int, kd: int) -> float:
        axis = self.kv_prefill
        if kp <= axis[0] or len(axis) == 1:
            return blend(*self.rows[0], kd)
        i = bisect_right(axis, kp)
        if i == len(axis):
            i -= 1
        x0 = axis[i - 1]
        value = blend(*self.rows[i - 1], kd)
        weight = (kp - x0) / (axis[i] - x0)
        return value + weight * (blend(*self.rows[i], kd) - value)

    def at_many(self, kp: int, kd: NDArray[np.int64]) -> NDArray[np.float64]:
        low, high, weight = bracket(self.kv_prefill, kp)
        value = _blend_many(*self.arrays[low], kd)
        if high != low:
            value = value + weight * (_blend_many(*self.arrays[high], kd) - value)
        return value


def _blend_many(
    xs: NDArray[np.int64], ys: NDArray[np.int64], x: NDArray[np.int64]
) -> NDArray[np.float64]:
    """`blend` over an array, the same float operations element by element."""
    if len(xs) == 1:
        return np.full(len(x), ys[0], dtype=np.float64)
    i = np.clip(np.searchsorted(xs, x, side="right"), 1, len(xs) - 1)
    x0, y0 = xs[i - 1], ys[i - 1]
    value: NDArray[np.float64] = y0 + (x - x0) / (xs[i] - x0) * (ys[i] - y0)
    return np.where(x < xs[0], np.float64(ys[0]), value)


def _nearest(pairs: Iterable[tuple[int, int]], pc: int, nd: int) -> tuple[int, int]:
    """The pair at the smallest squared distance; of equals the first."""
    return min(pairs, key=lambda pair: (pair[0] - pc) ** 2 + (pair[1] - nd) ** 2)


class AttentionTable:
    """Time of the attention kernel of one layer over (chunk, history, decodes, their history)."""

    __slots__ = ("_chunks", "_decodes", "_grid")

    def __init__(self, points: Sequence[tuple[int, int, int, int, int]]) -> None:
        assert points
        unique = first_of_equal_keys([((pc, nd, kp, kd), ns) for pc, kp, nd, kd, ns in points])
        by_pair: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for (pc, nd, kp, kd), ns in unique.items():
            by_pair.setdefault((pc, nd), []).append((kp, kd, ns))
        slices = {pair: _Slice(rows) for pair, rows in by_pair.items()}
        self._chunks = sorted({pc for pc, _ in slices})
        self._decodes = sorted({nd for _, nd in slices})
        # Pairs that were not profiled use the nearest one that was. Resolved once, so that a
        # look-up never searches.
        self._grid = [
            [slices[_nearest(slices, pc, nd)] for nd in self._decodes] for pc in self._chunks
        ]

    @property
    def first_chunk(self) -> int:
        """Smallest profiled prefill chunk; 0 = there is none."""
        return next((chunk for chunk in self._chunks if chunk), 0)

    def at(self, pc: int, kp: int, nd: int, kd: int) -> int:
        """Nanoseconds for `pc` prompt tokens on `kp` cached ones and `nd` decodes on `kd` each."""
        column, next_column, weight = bracket(self._decodes, nd)
        row, next_row, row_weight = bracket(self._chunks, pc)
        cells = self._grid[row]
        value = cells[column].at(kp, kd)
        if weight:
            value = value + weight * (cells[next_column].at(kp, kd) - value)
        if row_weight:
            cells = self._grid[next_row]
            other = cells[column].at(kp, kd)
            if weight:
                other = other + weight * (cells[next_column].at(kp, kd) - other)
            value = value + row_weight * (other - value)
        return max(1, int(value))

    def at_many(self, pc: int, kp: int, nd: int, kd: NDArray[np.int64]) -> NDArray[np.int64]:
        """`at` for many decode histories at once, equal to it element by element.

        `pc` new prompt tokens after `kp` tokens of history; `nd` decodes.
        """
        column, next_column, weight = bracket(self._decodes, nd)
        row, next_row, row_weight = bracket(self._chunks, pc)

        def across(cells: list[_Slice]) -> NDArray[np.float64]:
            value = cells[column].at_many(kp, kd)
            if weight:
                value = value + weight * (cells[next_column].at_many(kp, kd) - value)
            return value

        value = across(self._grid[row])
        if row_weight:
            value = value + row_weight * (across(self._grid[next_row]) - value)
        return np.maximum(value.astype(np.int64), 1)


class DecodeTimes:
    """Attention times of pure decode batches, worked out a block of histories at a time.

    Between two events a replica decodes with the same members and one more token each: the same
    row of the grid, one step further. Keeping what was worked out makes a look-up an index and a
    run of steps a slice. What is kept is bounded; dropping it changes no result.
    """

    _BLOCK_BITS: Final = 10
    _BLOCKS_MAX: Final = 4096

    __slots__ = ("_blocks", "_table")

    def __init__(self, table: AttentionTable) -> None:
        self._table = table
        self._blocks: dict[int, array[int]] = {}

    def _block(self, nd: int, index: int) -> array[int]:
        """Times of `nd` decodes with histories of block `index`."""
        key = nd << 32 | index
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) == self._BLOCKS_MAX:
                self._blocks.clear()
            first = index << self._BLOCK_BITS
            kd = np.arange(first, first + (1 << self._BLOCK_BITS), dtype=np.int64)
            block = array("q", self._table.at_many(0, 0, nd, kd).tobytes())
            self._blocks[key] = block
        return block

    def at(self, nd: int, kd: int) -> int:
        """Nanoseconds for `nd` decodes on `kd` tokens each, as `AttentionTable.at`."""
        return self._block(nd, kd >> self._BLOCK_BITS)[kd & (1 << self._BLOCK_BITS) - 1]

    def run(self, nd: int, kd: int, steps: int) -> NDArray[np.int64]:
        """`at` for the histories kd, kd + 1, ..."""
        first, last = kd >> self._BLOCK_BITS, (kd + steps - 1) >> self._BLOCK_BITS
        blocks = [
            np.frombuffer(self._block(nd, index), dtype=np.int64)
            for index in range(first, last + 1)
        ]
        joined = blocks[0] if first == last else np.concatenate(blocks)
        begin = kd - (first << self._BLOCK_BITS)
        return joined[begin : begin + steps]


class SkewAxes:
    """Bins of the skew correction: (edges, labels) of each axis; label i ends at edge i + 1."""

    __slots__ = ("edges", "labels")

    def __init__(self, axes: Mapping[str, tuple[Sequence[float], Sequence[str]]]) -> None:
        assert list(axes) == list(SKEW_AXES)
        # The first edge of an axis is its lower end and never decides.
        self.edges = tuple(tuple(edges[1:]) for edges, _ in axes.values())
        self.labels = tuple(tuple(labels) for _, labels in axes.values())


SKEW_AXES: Final = ("n", "skew_rate", "kv_big", "kp")

OLD_SKEW_AXES: Final = SkewAxes(
    {
        "n": (
            [0, 2, 4, 8, 16, 32, 64, 128, 1_000_000],
            ["n<=2", "n<=4", "n<=8", "n<=16", "n<=32", "n<=64", "n<=128", "n>128"],
        ),
        "skew_rate": (
            [-0.01, 0.05, 0.15, 0.4, 0.7, 1.01],
            ["sr<=5%", "sr<=15%", "sr<=40%", "sr<=70%", "sr>70%"],
        ),
        "kv_big": (
            [0, 1024, 4096, 16384, 1_000_000_000],
            ["kvB<=1k", "kvB<=4k", "kvB<=16k", "kvB>16k"],
        ),
        "kp": ([-1, 0, 2048, 1_000_000_000], ["kp=0", "kp<=2k", "kp>2k"]),
    }
)
"""For bundles that do not say their bins."""


class SkewTable:
    """How far a batch of unequal histories moves from the time at their mean to that at their
    maximum: a fraction by (exact prefill chunk, decodes, skewness, longest history, prompt
    history). Chunks that were not profiled, and empty buckets, use the default.
    """

    __slots__ = ("_alphas", "_default", "_edges", "_sizes")

    def __init__(self, axes: SkewAxes, by_key: Mapping[str, float], default: float) -> None:
        self._edges = axes.edges
        self._sizes = [len(labels) for labels in axes.labels]
        self._default = default
        chunks = sorted({int(key.split("|", 1)[0].removeprefix("pc=")) for key in by_key})
        n_labels, rate_labels, big_labels, kp_labels = axes.labels
        self._alphas = {
            pc: [
                by_key.get(f"pc={pc}|{n}|{rate}|{big}|{kp}", default)
                for n in n_labels
                for rate in rate_labels
                for kp in kp_labels
                for big in big_labels
            ]
            for pc in chunks
        }

    def _label(self, axis: int, value: float) -> int:
        return min(bisect_left(self._edges[axis], value), self._sizes[axis] - 1)

    def _row(self, nd: int, rate: float, kp: int) -> int:
        _, rates, bigs, kps = self._sizes
        row = (self._label(0, nd) * rates + self._label(1, rate)) * kps + self._label(3, kp)
        return row * bigs

    def alpha(self, pc: int, nd: int, rate: float, kv_max: int, kp: int) -> float:
        """The fraction for one batch.

        `pc` new prompt tokens after `kp` tokens of history; `nd` decodes.
        """
        alphas = self._alphas.get(pc)
        if alphas is None:
            return self._default
        return alphas[self._row(nd, rate, kp) + self._label(2, kv_max)]

    def alphas(
        self, pc: int, nd: int, rate: float, kv_max: NDArray[np.int64], kp: int
    ) -> NDArray[np.float64]:
        """`alpha` over many longest histories of one batch, rising, with its `pc` and `kp`."""
        first, last = self._label(2, int(kv_max[0])), self._label(2, int(kv_max[-1]))
        alphas = self._alphas.get(pc)
        if alphas is None or first == last:
            return np.full(len(kv_max), self.alpha(pc, nd, rate, int(kv_max[0]), kp))
        start = self._row(nd, rate, kp)
        row = np.array(alphas[start : start + self._sizes[2]])
        labels = np.searchsorted(self._edges[2], kv_max, side="left")
        return row[np.minimum(labels, self._sizes[2] - 1)]


# --------------------------------------------------------------------------------------------------
# Attention of one layer from a profile bundle: one look-up for a batch, by either of two rules.
#
# Merged (LLMServingSim 2.0): the prompts of a batch count as one chunk over the sum of their
# histories, its decodes as equals at their mean history, corrected by the bundle's fitted fraction.
# This is the simulator's rule, to the nanosecond.
#
# Separate: no prompt sees another's tokens. What a prompt costs grows with its pairs of (query,
# key), so the batch is looked up at the one chunk over the history that has as many pairs; where
# that history would be negative (several prompts without any), the pairs too many are taken off at
# the price that history has for this chunk. And in a kernel that serves prompts and decodes at
# once, the longest decode is read by one block of threads to its end while the others have
# finished: its time beyond that of the mean one stays exposed. In the skewed batches of three
# bundles (skew.csv, whose times are sums of three calls) the excess is 0.67 to 0.93 of that
# difference from 8 to 32 decodes, more at 64 on one GPU; the fitted fractions are defined at nine
# chunk sizes only.
#
# Captured. Profiles are eager: FlashAttention 2 then splits the histories of a few decodes, so that
# all multiprocessors read. An engine replays decodes from a CUDA graph, captured with the model's
# longest history, in which no real one is split: a (sequence, KV head) is one block of threads from
# end to end, and blocks start head by head, each when a multiprocessor is free. The memory's
# bandwidth is full as long as many blocks run, and idle in part when only the longest histories
# are left, each at the pace of one block (that of the table's mixed kernel, which does not split
# either). That rest is added to the look-up at the mean, in place of the bundle's fitted fraction,
# which was fitted to a few long ones among equals. Dealing out the blocks one by one gives those
# measurements to 1 to 3 % without a constant (`benchmarks.fidelity_blocks`); the closed forms here,
# which need no single history, are within 3 % of it for batches like those of the measured runs.

_TAIL_QUARTERS: Final = 3
"""Exposed part of the longest decode's time beyond the mean one's, in quarters."""


class BlockGrid(NamedTuple):
    """Where blocks of the decode kernel run."""

    slots: int
    """Blocks that a GPU runs together."""
    kv_heads: int
    """Blocks of one decode: KV heads of a rank."""

    @staticmethod
    def of(gpu: GpuSpec, kv_heads: int) -> BlockGrid | None:
        """The grid of a GPU of the catalogue; None if nothing is known of its kernel."""
        slots = gpu.sm_count * gpu.decode_blocks_per_sm
        return BlockGrid(slots, kv_heads) if slots else None

    @property
    def unit(self) -> int:
        """Fractions of a nanosecond in which rests are counted."""
        return 2000 * self.slots


class LayerAttention:
    """Attention of one layer, in ns, from one table."""

    def __init__(
        self,
        table: AttentionTable,
        skew: SkewTable | None,
        *,
        separate: bool,
        grid: BlockGrid | None = None,
    ) -> None:
        """`grid`: captured graphs do not split histories; None = they do, or nothing is known."""
        self._table = table
        self._decodes = DecodeTimes(table)
        self._skew = skew
        self._separate = separate
        self._grid = grid
        if grid:
            self._alone_ps, self._shared_ps = paces_ps(table)
            self._unsaturated = self._alone_ps // self._shared_ps

    def at(self, shape: BatchShape) -> int:
        """One batch."""
        if self._separate and shape.prefill_new:
            return self._separate_ns(shape)
        nd = shape.decode_count
        if self._grid is None or nd == 0:
            return self._eager_ns(shape)
        mean, longest = shape.decode_context_sum // nd, shape.decode_context_max
        at_mean = self._decodes.at(nd, mean)
        if nd <= self._unsaturated:
            return max(at_mean, longest * self._alone_ps // 1000)
        rest, _ = self._rest(self._grid, shape, mean)
        return at_mean + max(0, rest) // self._grid.unit

    def _eager_ns(self, shape: BatchShape) -> int:
        nd = shape.decode_count
        pc = kp = 0
        if shape.prefill_new:
            pc, kp = sum(shape.prefill_new), sum(shape.prefill_context)
        if nd == 0:
            return self._table.at(pc, kp, 0, 0) if pc else 0
        mean = shape.decode_context_sum // nd
        at_mean = self._table.at(pc, kp, nd, mean) if pc else self._decodes.at(nd, mean)
        longest = shape.decode_context_max
        if self._skew is None or nd == 1 or longest == mean:
            return at_mean
        alpha = self._skew.alpha(pc, nd, _skew_rate(shape, mean), longest, kp)
        if alpha == 0:
            return at_mean
        at_longest = self._table.at(pc, kp, nd, longest) if pc else self._decodes.at(nd, longest)
        if at_longest <= at_mean:
            return at_mean
        return max(1, round(at_mean + alpha * (at_longest - at_mean)))

    def of_prompts(self, shape: BatchShape) -> int:
        """What the prompts of the batch would take without its decodes."""
        if not shape.prefill_new:
            return 0
        if self._separate:
            return self._prompts_ns(shape, 0, 0)[0]
        return self._table.at(sum(shape.prefill_new), sum(shape.prefill_context), 0, 0)

    def of_decode_run(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """`at` of each step of a decode run."""
        nd = shape.decode_count
        if self._grid is None or nd == 0:
            return self._eager_run(shape, steps)
        mean, longest = shape.decode_context_sum // nd, shape.decode_context_max
        at_mean = self._decodes.run(nd, mean, steps)
        ages = np.arange(steps, dtype=np.int64)
        if nd <= self._unsaturated:
            alone: NDArray[np.int64] = (ages + longest) * self._alone_ps // 1000
            return np.maximum(at_mean, alone)
        rest, less = self._rest(self._grid, shape, mean)
        rests: NDArray[np.int64] = np.maximum(rest - less * ages, 0) // self._grid.unit
        return at_mean + rests

    def _rest(self, grid: BlockGrid, shape: BatchShape, mean: int) -> tuple[int, int]:
        """What the longest histories take after the bandwidth was full, and how much less of it
        each further step leaves, in `grid.unit`s of a nanosecond."""
        nd, longest = shape.decode_count, shape.decode_context_max
        alone_ps, shared_ps = self._alone_ps, self._shared_ps
        if nd * grid.kv_heads > grid.slots:
            # Heads come one after another, so the longest one's last block starts, on average, half
            # a head's time before the last of all; the others end a mean history later. Half of
            # its blocks run in its rest, and their bandwidth is in the look-up.
            paid_ps = alone_ps - shared_ps // 2
            ahead = 2 * grid.slots * (longest - mean) - nd * mean
            return ahead * paid_ps, nd * paid_ps
        # All start together. Histories are taken to lie on a power curve between the shortest and
        # the longest, with their mean, which keeps its form when all grow.
        spread = longest - shape.decode_context_min
        rate = _skew_rate(shape, mean) if spread else 0.0
        if not 0 < rate < 1:
            return 0, 0
        power = 1 / rate - 1
        knee = 1 - alone_ps / (nd * shared_ps)
        last = 1 - knee**power
        of_them = nd * (rate * (1 - knee ** (power + 1)) - (1 - knee) * knee**power)
        return int(2 * grid.slots * spread * (last * alone_ps - of_them * shared_ps)), 0

    def _eager_run(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """`_eager_ns` of each step.

        The sum of the histories grows by the number of members at each step, so the floor of the
        mean grows by exactly one, like both ends; the skewness stays as it is.
        """
        nd = shape.decode_count
        if nd == 0:
            return np.zeros(steps, dtype=np.int64)
        mean, longest = shape.decode_context_sum // nd, shape.decode_context_max
        at_mean = self._decodes.run(nd, mean, steps)
        if self._skew is None or nd == 1 or longest == mean:
            return at_mean
        histories = np.arange(longest, longest + steps, dtype=np.int64)
        alpha = self._skew.alphas(0, nd, _skew_rate(shape, mean), histories, 0)
        at_longest = self._decodes.run(nd, longest, steps)
        moved = np.rint(at_mean + alpha * (at_longest - at_mean)).astype(np.int64)
        stays = (alpha == 0) | (at_longest <= at_mean)
        return np.where(stays, at_mean, np.maximum(moved, 1))

    def _separate_ns(self, shape: BatchShape) -> int:
        nd = shape.decode_count
        mean = shape.decode_context_sum // nd if nd else 0
        total, chunk, history = self._prompts_ns(shape, nd, mean)
        longest = shape.decode_context_max
        if nd > 1 and longest > mean:
            at = self._table.at
            tail = at(chunk, history, 1, longest) - at(chunk, history, 1, mean)
            total += max(0, _TAIL_QUARTERS * tail // 4)
        return total

    def _prompts_ns(self, shape: BatchShape, nd: int, mean: int) -> tuple[int, int, int]:
        """(time with `nd` decodes at their mean history, chunk, history looked up)."""
        at = self._table.at
        new, context = shape.prefill_new, shape.prefill_context
        chunk = sum(new)
        if len(new) == 1:
            return at(chunk, context[0], nd, mean), chunk, context[0]
        # Twice the pairs, and twice the pairs beyond those of one chunk without history.
        pairs = sum(q * (2 * k + q) for q, k in zip(new, context, strict=True))
        surplus = pairs - chunk * chunk
        if surplus >= 0:
            history = surplus // (2 * chunk)
            return at(chunk, history, nd, mean), chunk, history
        reach = max(1, chunk // 2)
        price = at(chunk, reach, 0, 0) - at(chunk, 0, 0, 0)
        total = at(chunk, 0, nd, mean) + price * surplus // (2 * chunk * reach)
        alone = max(at(q, k, nd, mean) for q, k in zip(new, context, strict=True))
        return max(total, alone), chunk, 0


_SHORT, _LONG, _MANY = 1024, 16384, 128
"""Histories and decodes between which the profiled times are straight lines."""


def paces_ps(table: AttentionTable) -> tuple[int, int]:
    """Picoseconds that one block of threads takes for a token of history (one decode in the kernel
    of mixed batches, beside the smallest chunk), and many decodes for a token of one of them."""
    chunk = table.first_chunk
    longer = table.at(chunk, 0, 1, _LONG) - table.at(chunk, 0, 1, _SHORT)
    shared_ps = max(1, 1000 * table.at(0, 0, _MANY, _LONG) // (_MANY * _LONG))
    return max(shared_ps, 1000 * longer // (_LONG - _SHORT)), shared_ps


def _skew_rate(shape: BatchShape, mean: int) -> float:
    """Where the mean lies between the shortest and the longest history, 0..1."""
    shortest = shape.decode_context_min
    return min(1.0, max(0.0, (mean - shortest) / (shape.decode_context_max - shortest)))
