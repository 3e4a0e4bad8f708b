"""What a planner sees of the load: the present, or metrics that are late, still or not there.

Which replicas there are, and in which states, a control plane knows by itself: it ordered that,
and hears when a process dies. The load (blocks, running and waiting requests, tokens) comes as
metrics through a collector. That takes `autoscale.metrics_delay_ms`, and faults may add to it,
stop it, or leave the planner with none. Several at once: none beats still, still beats late;
delays add up.

Late figures are those of the newest sample that is old enough. Samples are taken when the planner
looks, no closer than a 64th of the delay, so that memory does not grow with it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import msgspec

from emu.autoscale.snapshot import Snapshot

SAMPLES_PER_DELAY: Final = 64


class Metrics(NamedTuple):
    """The figures of a snapshot that come as metrics."""

    waiting_tokens: int
    waiting_requests: int
    outstanding: int
    tokens_in_migration: int
    scarce_decode: bool
    replicas: tuple[tuple[int, int, int], ...]
    """Blocks in use, running and waiting requests, by replica."""


def load_of(snapshot: Snapshot) -> Metrics:
    """Its load alone."""
    return Metrics(
        snapshot.waiting_tokens,
        snapshot.waiting_requests,
        snapshot.outstanding,
        snapshot.tokens_in_migration,
        snapshot.scarce_decode,
        tuple([(view.blocks_used, view.running, view.waiting) for view in snapshot.replicas]),
    )


def with_load(snapshot: Snapshot, load: Metrics) -> Snapshot:
    """States and roles of the snapshot, load of another time."""
    views = [
        msgspec.structs.replace(view, blocks_used=used, running=running, waiting=waiting)
        for view, (used, running, waiting) in zip(snapshot.replicas, load.replicas, strict=True)
    ]
    return msgspec.structs.replace(
        snapshot,
        replicas=tuple(views),
        waiting_tokens=load.waiting_tokens,
        waiting_requests=load.waiting_requests,
        outstanding=load.outstanding,
        tokens_in_migration=load.tokens_in_migration,
        scarce_decode=load.scarce_decode,
    )


class Sight:
    """Metrics on their way to one planner."""

    def __init__(self, delay_ns: int) -> None:
        """`delay_ns`: what they always take."""
        self._delay_ns = delay_ns
        self._samples: deque[tuple[int, Metrics]] = deque()
        self._is_behind = False
        """The present differs from the last sample, and it is too early for another."""
        self._stills = 0
        self._still: Metrics | None = None
        self._losses = 0

    def see(self, now: Snapshot) -> Snapshot | None:
        """What the planner decides on; None = it knows of no load and decides nothing."""
        if self._losses:
            return None
        if self._still is not None:
            return with_load(now, self._still)
        if not self._delay_ns:
            return now
        self._sample(now)
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now.now_ns - self._delay_ns:
            samples.popleft()
        return with_load(now, samples[0][1])

    def _sample(self, now: Snapshot) -> None:
        load, samples = load_of(now), self._samples
        self._is_behind = False
        if not samples:
            samples.append((now.now_ns, load))
        elif load != samples[-1][1]:
            self._is_behind = now.now_ns < self._next_ns
            if not self._is_behind:
                samples.append((now.now_ns, load))

    @property
    def _next_ns(self) -> int:
        """Earliest time of the next sample."""
        return self._samples[-1][0] + max(1, self._delay_ns // SAMPLES_PER_DELAY)

    def wake_ns(self) -> int:
        """When there will be something else to see, even if nothing changes; -1 = never."""
        if self._losses or self._still is not None or not self._samples:
            return -1
        wakes = [self._next_ns] if self._is_behind else []
        if len(self._samples) > 1:
            wakes.append(self._samples[1][0] + self._delay_ns)
        return min(wakes, default=-1)

    def freeze(self, now: Snapshot) -> None:
        """From now on the load that is seen stays as it is."""
        if self._still is None:
            seen = self.see(now)
            self._still = load_of(now if seen is None else seen)
        self._stills += 1

    def thaw(self) -> None:
        """The end of a `freeze`."""
        self._stills -= 1
        if not self._stills:
            self._still = None

    def slow(self, delay_ns: int, now: Snapshot) -> None:
        """Metrics take so much longer, or (negative) the end of that."""
        if not self._samples:
            self._sample(now)
        self._delay_ns += delay_ns
        if not self._delay_ns:
            self._samples.clear()

    def lose(self) -> None:
        """From now on none arrive."""
        self._losses += 1

    def find(self) -> None:
        """The end of a `lose`."""
        self._losses -= 1
