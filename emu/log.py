"""The log: structured events of a run, on standard error, off unless asked for.

Written where actions are applied and nowhere else. An event has a constant name `noun.past_verb`,
the simulated time as `at_ns`, and ids under the same keys everywhere (`request_id`, `replica_id`).
The same in simulated and in live runs. `make_log` gives None when the log is off, so that each
place costs one comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, Literal, TextIO

Level = Literal["off", "debug", "info", "warning", "error"]
Format = Literal["text", "json"]
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""As `logging` numbers them, which a run without a log does not load."""


class Log:
    """Writes events at the time of one clock."""

    def __init__(self, level: Level, form: Format, stream: TextIO) -> None:
        import structlog.typing  # a run without a log does not load it

        renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
        if form == "text":
            renderer = structlog.processors.KeyValueRenderer(key_order=["at_ns", "level", "event"])
        self._logger = structlog.wrap_logger(
            structlog.PrintLogger(stream),
            processors=[structlog.processors.add_log_level, renderer],
            wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        )
        self._now_ns: Callable[[], int] = int
        self.tells_lives = _LEVELS[level] <= _LEVELS["info"]
        """Events of requests and replicas are written, not only what goes wrong."""
        self.tells_batches = level == "debug"

    def use_clock(self, now_ns: Callable[[], int]) -> None:
        """Events carry the time of this clock from now on."""
        self._now_ns = now_ns

    def debug(self, name: str, **fields: object) -> None:
        """Something that happens to most requests many times. Ask `tells_batches` before."""
        self._logger.debug(name, at_ns=self._now_ns(), **fields)

    def event(self, name: str, **fields: object) -> None:
        """Something that happens in the life of a request or a replica."""
        self._logger.info(name, at_ns=self._now_ns(), **fields)

    def warn(self, name: str, **fields: object) -> None:
        """Something that should not happen in a healthy cluster: a fault, a loss."""
        self._logger.warning(name, at_ns=self._now_ns(), **fields)


def make_log(
    level: Level = "off", form: Format = "text", stream: TextIO | None = None
) -> Log | None:
    """The log of a run, or None if it is off."""
    return None if level == "off" else Log(level, form, stream or sys.stderr)
