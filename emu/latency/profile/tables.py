"""Look-up tables of measured layer times: pure numbers, no files.

Owns the interpolation rules of the profile backend (LLMServingSim 2.0): 1-D curves, the 4-D
attention grid and the 2-D expert table (the skew correction is in `skew.py`).
All times are integer nanoseconds, interpolation is linear on raw values in float64, and results
are truncated, so the order of operations is part of the contract: scalar and vectorized paths
perform the same float operations in the same order and agree bit by bit.

Does not know layers, models or batches (`backend.py`), nor files (`bundle.py`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray


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
