"""Attention of one layer from a profile bundle: one look-up for a batch, by either of two rules.

Merged (LLMServingSim 2.0): the prompts of a batch count as one
chunk over the sum of their histories, its decodes as equals at their mean history, corrected by
the bundle's fitted fraction. This is the simulator's rule, to the nanosecond.

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
longest history, in which no real one is split: a (sequence, KV head) is one block from end to
end. A few decodes therefore take as long as their longest at the pace of one block. Many share
the memory's bandwidth; when it has served the mean history of all, the longest has got its equal
share, more if the blocks come in several waves, and reads the rest alone. The pace of one block
is that of the table's mixed kernel, which does not split either.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from emu.latency.base import BatchShape
from emu.latency.profile_tables import AttentionTable, DecodeTimes, SkewTable

_TAIL_QUARTERS: Final = 3
"""Exposed part of the longest decode's time beyond the mean one's, in quarters."""


class LayerAttention:
    """Attention of one layer, in ns, from one table."""

    def __init__(
        self,
        table: AttentionTable,
        skew: SkewTable | None,
        *,
        separate: bool,
        sequences_at_once: float = 0.0,
    ) -> None:
        """`sequences_at_once`: decodes whose blocks fit on the GPU together, where captured graphs
        do not split histories; 0 = they do."""
        self._table = table
        self._decodes = DecodeTimes(table)
        self._skew = skew
        self._separate = separate
        self._at_once = sequences_at_once
        self._alone_ps = self._unsaturated = 0
        if sequences_at_once:
            self._alone_ps = max(0, _block_ps(table))
            self._unsaturated = _saturating(table, self._alone_ps)

    def at(self, shape: BatchShape) -> int:
        """One batch."""
        if self._separate and shape.prefill_new:
            return self._separate_ns(shape)
        if self._alone_ps and shape.decode_count:
            nd, longest = shape.decode_count, shape.decode_context_max
            eager = self._eager_ns(shape)
            if nd <= self._unsaturated:
                return max(eager, longest * self._alone_ps // 1000)
            ahead = longest - self._share(nd, shape.decode_context_sum // nd)
            return eager + ahead * self._alone_ps // 1000 if ahead > 0 else eager
        return self._eager_ns(shape)

    def _share(self, nd: int, mean: int) -> int:
        """Tokens of the longest history read when the mean history of all has been."""
        return int(mean * max(1.0, nd / self._at_once))

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
        eager = self._eager_run(shape, steps)
        if not self._alone_ps or nd == 0:
            return eager
        longest = np.arange(steps, dtype=np.int64) + shape.decode_context_max
        if nd <= self._unsaturated:
            return np.maximum(eager, longest * self._alone_ps // 1000)
        means = np.arange(steps, dtype=np.int64) + shape.decode_context_sum // nd
        shares = (means * max(1.0, nd / self._at_once)).astype(np.int64)
        ahead: NDArray[np.int64] = np.maximum(longest - shares, 0)
        return eager + ahead * self._alone_ps // 1000

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


def _block_ps(table: AttentionTable) -> int:
    """Picoseconds that one block of threads takes for a token of history: one decode in the
    kernel of mixed batches, beside the smallest chunk."""
    chunk = table.first_chunk
    longer = table.at(chunk, 0, 1, _LONG) - table.at(chunk, 0, 1, _SHORT)
    return 1000 * longer // (_LONG - _SHORT)


def _saturating(table: AttentionTable, block_ps: int) -> int:
    """Decodes whose blocks, at the pace of one alone, would read as fast as many decodes do."""
    return block_ps * _MANY * _LONG // (1000 * table.at(0, 0, _MANY, _LONG))


def _skew_rate(shape: BatchShape, mean: int) -> float:
    """Where the mean lies between the shortest and the longest history, 0..1."""
    shortest = shape.decode_context_min
    return min(1.0, max(0.0, (mean - shortest) / (shape.decode_context_max - shortest)))
