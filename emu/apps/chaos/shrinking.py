"""Progress of what comes after the campaign: failing worlds made smaller."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console

from emu.apps.chaos.minimize import Shrinking
from emu.apps.chaos.telling import TOLD_EVERY_S
from emu.process.interrupts import held
from emu.runs.progress import told_every


@contextlib.contextmanager
def telling_shrinking(seed: int, shrinking: Shrinking, *, is_told: bool) -> Iterator[None]:
    """In this block a line on stderr says how far a world is minimized."""

    def line() -> str:
        return f"minimizing seed {seed}: {shrinking.told()}"

    if not is_told:
        yield
    elif sys.stderr.isatty():
        from rich.live import Live
        from rich.text import Text

        console = Console(stderr=True)
        live = Live(console=console, transient=True, get_renderable=lambda: Text(line()))
        with held():  # a thread inherits that: signals go to the main one
            live.start()
        try:
            yield
        finally:
            live.stop()
    else:
        with told_every(TOLD_EVERY_S, line):
            yield
