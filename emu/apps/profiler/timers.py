"""How long one call takes on the device: the median of several, caches cold, launches hidden.

On a GPU each call is preceded by writes over a buffer larger than the last-level cache: what a
layer reads is then in memory, as it is in a running model, where other layers lie between two
uses of a weight. They are repeated until they take `_LEAD_US`, so that the host has enqueued all
launches of the call before the device reaches the first. The time between two events without
anything in between is taken off. Before all this the device is kept busy until its clocks are up.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Final, Protocol

Call = Callable[[], object]

_LEAD_US: Final = 300.0
"""Longer than the host takes to launch what one layer needs (some 10 us for each of a few)."""
_AWAKE_S: Final = 0.3


class Timer(Protocol):
    """Times calls on one device."""

    def time_us(self, call: Call) -> float:
        """Median duration of one call, us."""
        ...


class CpuTimer:
    """Wall clock of synchronous calls: for miniatures on a CPU."""

    def __init__(self, repeats: int = 3) -> None:
        self.repeats = repeats

    def time_us(self, call: Call) -> float:
        """Median of a few calls after one that warms up."""
        call()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


class CudaTimer:
    """Events on the current CUDA stream."""

    def __init__(self, torch: ModuleType, repeats: int = 5) -> None:
        self._torch = torch
        self.repeats = repeats
        cache_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        self._over = torch.empty(max(4 * cache_bytes, 256 << 20), dtype=torch.int8, device="cuda")
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        self._events = pairs
        self._writes = 1
        self._empty_us = 0.0
        self._keep_busy(_AWAKE_S)
        self._writes = math.ceil(_LEAD_US / max(1.0, self._median_us(self._over.zero_)))
        self._empty_us = min(self._median_us(_nothing) for _ in range(3))

    def _keep_busy(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._over.zero_()
            self._torch.cuda.synchronize()

    def time_us(self, call: Call) -> float:
        """Median after two calls that warm up; at least 0.1."""
        call()
        call()
        return max(0.1, self._median_us(call))

    def _median_us(self, call: Call) -> float:
        for start, end in self._events:
            for _ in range(self._writes):
                self._over.zero_()
            start.record()
            call()
            end.record()
        self._torch.cuda.synchronize()
        times: list[float] = [start.elapsed_time(end) * 1000 for start, end in self._events]
        return statistics.median(times) - self._empty_us


def _nothing() -> None:
    """The time between two events."""
