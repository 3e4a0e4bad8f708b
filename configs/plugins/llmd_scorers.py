"""llm-d's router: weighted scorers and the highest total, ties broken at random.

    [router]
    policy = "./llmd_scorers.py:WeightedScorers"
    [router.own]
    prefix_weight = 2.0

After the inference scheduler of llm-d (plugins prefix-cache-scorer, queue-scorer,
kv-cache-utilization-scorer, max-score-picker). Every scorer gives each replica 0 to 1; its defaults
weigh the prefix twice. `prefix` counts only whole cached prompt tokens, `queue` spreads replicas
between the longest queue (0) and the shortest (1), `kv` is the free part of the KV blocks.
"""

from collections.abc import Sequence

import msgspec

from emu.policy import Context, RequestView
from emu.routing.signal import Signal


class Weights(msgspec.Struct):
    """Keys of `[router.own]`."""

    prefix_weight: float = 2.0
    queue_weight: float = 1.0
    kv_weight: float = 1.0


class WeightedScorers:
    """Sum of weighted scores; the best of them, at random among equals."""

    Options = Weights

    def __init__(self, context: Context, options: Weights) -> None:
        self._context, self._weights = context, options

    def choose(self, request: RequestView, signals: Sequence[Signal]) -> int:
        """Index of the replica with the highest total."""
        totals, weights = [0.0] * len(signals), self._weights
        for weight, scores in (
            (weights.prefix_weight, self._prefix(request, signals)),
            (weights.queue_weight, self._queue(signals)),
            (weights.kv_weight, [1 - s.blocks_used / s.blocks_total for s in signals]),
        ):
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        best = max(totals)
        winners = [index for index, total in enumerate(totals) if total == best]
        if len(winners) == 1:
            return winners[0]
        return winners[int(self._context.rng.integers(len(winners)))]

    def _prefix(self, request: RequestView, signals: Sequence[Signal]) -> list[float]:
        """Part of the prompt that each replica has cached."""
        cached = [self._context.prefix_tokens(s.replica_id, request) for s in signals]
        return [tokens / request.prompt_tokens for tokens in cached]

    @staticmethod
    def _queue(signals: Sequence[Signal]) -> list[float]:
        """1 for the shortest queue, 0 for the longest, 1 for all if they are equal."""
        longest = max(signal.waiting for signal in signals)
        shortest = min(signal.waiting for signal in signals)
        if longest == shortest:
            return [1.0] * len(signals)
        return [(longest - signal.waiting) / (longest - shortest) for signal in signals]
