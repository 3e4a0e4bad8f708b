"""Where the compute times of rows come from: the protocol, and measured bundles.

A source is pure; times are integer ns of one rank. The roofline's are in `roofline_times.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError
from emu.latency.base import BatchShape, next_decode_shape
from emu.latency.profile.bundle import Bundle


class LayerTimes(Protocol):
    """Times of single layers."""

    @property
    def sections(self) -> Mapping[str, Sequence[str]]:
        """Layer names in order: prologue, pre_attn, post_attn, mlp_dense, mlp_moe, head."""
        ...

    def layer_ns(self, layer: str, tokens: int, logits: int) -> int:
        """A layer whose time follows from counts. 0 = this layer takes no time here."""
        ...

    def attention_ns(self, shape: BatchShape) -> int:
        """The attention of one layer; 0 if the batch has nothing for it."""
        ...

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same for each of so many decode iterations in a row."""
        ...

    def expert_ns(self, tokens: int, activated: int, batch_tokens: int) -> int:
        """The experts of one rank: tokens that come to it, experts of it that are used.

        `batch_tokens` are those of the whole batch, for sources that route by themselves.
        `activated` is the number of these experts.
        """
        ...


def counts(shape: BatchShape) -> tuple[int, int]:
    """(tokens, rows of logits) of a step, padded to the group's largest member.

    Every request makes a row of logits, even in the middle of its prompt; padding counts as so
    many decodes.
    """
    tokens = shape.new_tokens
    pad = max(0, shape.padded_tokens - tokens)
    items = len(shape.prefill_new) + shape.decode_count + pad
    return tokens + pad, max(shape.sequences, items)


class BundleTimes:
    """Measured layer times of one bundle and tensor-parallel degree."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.sections = bundle.architecture.sections
        self._counted: dict[tuple[str, int], int] = {}

    def layer_ns(self, layer: str, tokens: int, logits: int) -> int:
        """Look a layer up by tokens, or by rows of logits where the bundle says so."""
        bundle = self.bundle
        by_logits = bundle.architecture.category[layer] == "per_sequence"
        count = max(1, logits if by_logits else tokens)
        key = (layer, count)
        cost = self._counted.get(key)
        if cost is None:
            curve = (bundle.per_sequence if by_logits else bundle.dense)[layer]
            cost = self._counted[key] = curve.at(count)
        return cost

    def attention_ns(self, shape: BatchShape) -> int:
        """All prompts merged into one chunk, decodes at their mean history, corrected for skew."""
        table, decodes = self.bundle.attention, shape.decode_count
        new, context = sum(shape.prefill_new), sum(shape.prefill_context)
        if decodes == 0:
            return table.at(new, context, 0, 0) if new else 0
        mean, longest = shape.decode_context_sum // decodes, shape.decode_context_max
        at_mean = table.at(new, context, decodes, mean)
        skew = self.bundle.skew
        if skew is None or decodes == 1 or longest == mean:
            return at_mean
        shortest = shape.decode_context_min
        rate = min(1.0, max(0.0, (mean - shortest) / (longest - shortest)))
        alpha = skew.alpha(new, decodes, rate, longest, context)
        if alpha == 0:
            return at_mean
        at_longest = table.at(new, context, decodes, longest)
        if at_longest <= at_mean:
            return at_mean
        return max(1, round(at_mean + alpha * (at_longest - at_mean)))

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """One look-up after another."""
        each = (next_decode_shape(shape, step) for step in range(steps))
        return np.array([self.attention_ns(one) for one in each], dtype=np.int64)

    def expert_ns(self, tokens: int, activated: int, batch_tokens: int) -> int:
        """The expert table. Raises InputError if the bundle has none."""
        experts = self.bundle.experts
        if experts is None:
            raise InputError(self.bundle.directory, None, "moe.csv", "the bundle has no experts")
        return experts.at(max(1, tokens), max(1, activated))
