"""An intake whose instants are known: that of a part of a run, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

from emu.latency.front_end import Intake


class KnownIntake(Intake):
    """The intake of a part of the requests, whose instants were computed for all of them."""

    def __init__(self, ready_ns: Iterator[int]) -> None:
        """`ready_ns`: of each request of this part, in order of arrival."""
        self._ready = ready_ns

    def ready_ns(self, now_ns: int, prompt_tokens: int, pin: int = -1) -> int:
        """When the next request is with an engine."""
        return next(self._ready)
