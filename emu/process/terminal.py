"""Where tables go: the terminal as wide as it is, a file or pipe as wide as the tables need."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_PIPE_COLUMNS = 160


def open_console(min_columns: int = 0) -> Console:
    """The console of a command's result; figures are not colored.

    `min_columns`: below it lines wrap, which is better than figures cut in half.
    """
    console = Console(highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        min_columns = max(min_columns, _PIPE_COLUMNS)
    return Console(width=min_columns, highlight=False) if console.width < min_columns else console
