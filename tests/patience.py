"""How long a test waits for what is sure to come: limits for hangs, not measures of speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""A machine may be ten times slower than this one, and busy."""


def until(holds: Callable[[], object], *, every_s: float = 0.01) -> None:
    """Wait for something that another process does."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(every_s)
