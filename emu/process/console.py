"""Where tables go: the terminal as wide as it is, a file or pipe as wide as the tables need."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


PIPE_COLUMNS: Final = 160
_ASKED: Final = {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"}
"""Variables with which a user asks for more than plain text of that width."""
_EMOJI: Final = re.compile(r":\S+:")
_STROKES: Final = str.maketrans("", "", "┏━┳┓┃┡╇┩│└─┴┘")


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


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool) -> list[str]:
    """The lines of a table as the console draws it; `right` aligns all columns but the first."""
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]

    def line(left: str, between: str, end: str, cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return left + between.join(f" {cell} " for cell in padded) + end

    def rule(left: str, stroke: str, between: str, end: str) -> str:
        return left + between.join(stroke * (width + 2) for width in widths) + end

    return [
        rule("┏", "━", "┳", "┓"),
        line("┃", "┃", "┃", heads),
        rule("┡", "━", "╇", "┩"),
        *(line("│", "│", "│", row) for row in rows),
        rule("└", "─", "┴", "┘"),
    ]


def is_drawn(lines: Sequence[str]) -> bool:
    """Whether the lines of a table, without its rules, are what the console would draw: they fit,
    and hold nothing that is wide, styled or not printable."""
    words = "".join(lines).translate(_STROKES)
    is_styled = "[" in words or _EMOJI.search(words) is not None
    fits = max(map(len, lines)) <= PIPE_COLUMNS
    return fits and words.isascii() and words.isprintable() and not is_styled
