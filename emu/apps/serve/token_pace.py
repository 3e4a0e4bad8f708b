"""How late tokens of streams leave this machine, on the wall clock.

The verdict of `pace` is on answers; this is on each token after the first of a streamed answer. A
token's lateness is the wall time between the instant at which it was due and the end of the loop
over its step's tokens, in which its bytes were given to the socket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

FINE: Final = 100
"""Buckets of 0.25 ms; the others grow by a quarter each."""
BUCKETS: Final = FINE + 40
_FINE_NS: Final = 250_000
_GROWTH: Final = 1.25
_SLICE_S: Final = 30
SLICES: Final = 10
"""So many slices of half a minute are the last five minutes."""


def bucket_of(late_ns: int) -> int:
    """The bucket of a lateness."""
    if late_ns < FINE * _FINE_NS:
        return max(0, late_ns // _FINE_NS)
    more = math.log(late_ns / (FINE * _FINE_NS), _GROWTH)
    return min(BUCKETS - 1, FINE + int(more))


def most_ms(bucket: int) -> float:
    """The largest lateness in a bucket."""
    if bucket < FINE:
        return (bucket + 1) * _FINE_NS / 1e6
    return FINE * _FINE_NS / 1e6 * _GROWTH ** (bucket - FINE + 1)


class TokenPace:
    """Lateness of the tokens so far, and of the last five minutes."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.worst_ns = 0
        self._slices: list[tuple[int, list[int]]] = []

    def left(self, late_ns: int, count: int) -> None:
        """So many tokens have left now, so late."""
        self.add(max(0, late_ns), count, time.monotonic())

    def add(self, late_ns: int, count: int, now_s: float) -> None:
        """So many tokens have left so late; `now_s`: wall clock."""
        bucket = bucket_of(late_ns)
        self._slice(now_s)[bucket] += count
        self.counts[bucket] += count
        if late_ns > self.worst_ns:
            self.worst_ns = late_ns

    def add_counts(self, counts: Sequence[int], worst_ns: int, now_s: float) -> None:
        """The same, counted by another process."""
        part = self._slice(now_s)
        for bucket, count in enumerate(counts):
            part[bucket] += count
            self.counts[bucket] += count
        self.worst_ns = max(self.worst_ns, worst_ns)

    def _slice(self, now_s: float) -> list[int]:
        number = int(now_s // _SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, [0] * BUCKETS))
            self._slices = [one for one in self._slices if one[0] > number - SLICES]
        return self._slices[-1][1]

    @property
    def tokens(self) -> int:
        """Counted so far."""
        return sum(self.counts)

    def quantile_ms(self, share: float) -> float:
        """What so large a part of all tokens kept, rounded up to the bucket; 0 without tokens."""
        return _quantile_ms(self.counts, share)

    def recent_ms(self, share: float, now_s: float) -> float:
        """The same of the last five minutes."""
        oldest = int(now_s // _SLICE_S) - SLICES
        kept = [counts for number, counts in self._slices if number > oldest]
        return _quantile_ms([sum(column) for column in zip(*kept, strict=True)], share)


def _quantile_ms(counts: Sequence[int], share: float) -> float:
    left = math.ceil(share * sum(counts))
    if left == 0:
        return 0.0
    for bucket, count in enumerate(counts):
        left -= count
        if left <= 0:
            return most_ms(bucket)
    raise AssertionError("counts have changed")
