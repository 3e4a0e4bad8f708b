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

    def __init__(self, table: AttentionTable, skew: SkewTable | None, *, separate: bool) -> None:
        self._table = table
        self._decodes = DecodeTimes(table)
        self._skew = skew
        self._separate = separate

    def at(self, shape: BatchShape) -> int:
        """One batch."""
        if self._separate and shape.prefill_new:
            return self._separate_ns(shape)
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
        """`at` of each step of a decode run.

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


def _skew_rate(shape: BatchShape, mean: int) -> float:
    """Where the mean lies between the shortest and the longest history, 0..1."""
    shortest = shape.decode_context_min
    return min(1.0, max(0.0, (mean - shortest) / (shape.decode_context_max - shortest)))
