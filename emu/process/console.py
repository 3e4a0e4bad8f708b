"""Where tables go: the terminal as wide as it is, a file or pipe as wide as the tables need."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console


PIPE_COLUMNS: Final = 160
_ASKED: Final = {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"}
"""Variables with which a user asks for more than plain text of that width."""


def is_plain() -> bool:
    """Whether tables go to a file or pipe as plain text of `PIPE_COLUMNS`."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return not (sys.stdout.isatty() or _ASKED & os.environ.keys()) and encoding == "utf8"


def open_console(min_columns: int = 0) -> Console:
    """The console of a command's result; figures are not colored.

    `min_columns`: below it lines wrap, which is better than figures cut in half.
    """
    from rich.console import Console  # most runs print nothing with it

    console = Console(highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        min_columns = max(min_columns, PIPE_COLUMNS)
    return Console(width=min_columns, highlight=False) if console.width < min_columns else console
