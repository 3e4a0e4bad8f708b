"""When a process that serves looks for cycles: a little at a time, and whole while nothing waits.

Python's own rule counts objects that were made and not deleted. Of a server whose calls come and go
alike that is nearly none, so that seconds pass between two looks, and each then goes through all of
500 calls under way (80,000 objects, 40 ms) while their tokens are due. Here what is new is looked
at each tenth of a second, 1 ms of it; what has survived one look is left alone until no call is
under way, or for ten minutes: few cycles live that long (a call's are those of its coroutines).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

_YOUNG: Final = 20_000
"""Objects after which Python looks for itself at what is new, between two ticks."""
_NEVER: Final = 1_000_000_000
_LEAST: Final = 500
"""Fewer objects more than at the last look are not worth one."""
_WHOLE_S: Final = 600.0
"""Between two looks at everything, while calls are under way."""
_IDLE_S: Final = 5.0
"""The same while none is."""


class Garbage:
    """Takes the collector over from `begin` to `end`; `tick` is called some times a second."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._before = gc.get_threshold()
        self._whole_s = clock_s()
        self._is_clean = True
        """Nothing new has survived a look since everything was looked at."""

    def begin(self) -> None:
        """What is loaded stays."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
        self._whole_s = self._clock_s()

    def end(self) -> None:
        """Python's own rule holds again."""
        gc.set_threshold(*self._before)

    def tick(self, *, is_idle: bool) -> None:
        """Look at what is new, or at everything. `is_idle`: no call is under way."""
        if gc.get_count()[0] > _LEAST:
            self._is_clean = False
            gc.collect(0)
        rest_s = _IDLE_S if is_idle else _WHOLE_S
        if not self._is_clean and self._clock_s() - self._whole_s > rest_s:
            gc.collect()
            self._is_clean, self._whole_s = True, self._clock_s()
