"""Attention of one layer from a profile bundle: one look-up for a batch, by either of two rules.

Merged (LLMServingSim 2.0): the prompts of a batch count as one chunk over the sum of their
histories, its decodes as equals at their mean history, corrected by the bundle's fitted fraction.
This is the simulator's rule, to the nanosecond.

Separate: no prompt sees another's tokens. What a prompt costs grows with its pairs of (query,
key), so the batch is looked up at the one chunk over the history that has as many pairs; where
that history would be negative (several prompts without any), the pairs too many are taken off at
the price that history has for this chunk. And in a kernel that serves prompts and decodes at
once, the longest decode is read by one block of threads to its end while the others have
finished: its time beyond that of the mean one stays exposed. In the skewed batches of three
bundles (skew.csv, whose times are sums of three calls) the excess is 0.67 to 0.93 of that
difference from 8 to 32 decodes, more at 64 on one GPU; the fitted fractions are defined at nine
chunk sizes only.

Captured. Profiles are eager: FlashAttention 2 then splits the histories of a few decodes, so that
all multiprocessors read. An engine replays decodes from a CUDA graph, captured with the model's
longest history, in which no real one is split: a (sequence, KV head) is one block of threads from
end to end, and blocks start head by head, each when a multiprocessor is free. The memory's
bandwidth is full as long as many blocks run, and idle in part when only the longest histories
are left, each at the pace of one block (that of the table's mixed kernel, which does not split
either). That rest is added to the look-up at the mean, in place of the bundle's fitted fraction,
which was fitted to a few long ones among equals. Dealing out the blocks one by one gives those
measurements to 1 to 3 % without a constant (`benchmarks.fidelity_blocks`); the closed forms here,
which need no single history, are within 3 % of it for batches like those of the measured runs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emu.catalogue.gpu import GpuSpec
from emu.latency.base import BatchShape
from emu.latency.profile.skew import SkewTable
from emu.latency.profile.tables import AttentionTable, DecodeTimes

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
