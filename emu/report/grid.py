"""Words in rows and columns, for a terminal or a cell of a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.table import Table

Cells = Sequence[Sequence[str]]
_COLUMNS_MAX: Final = 1_000
"""Of a table as text: it is never wrapped."""


def rich_table(title: str, headings: Sequence[str], cells: Cells) -> Table:
    """A table of the terminal; the first column is to the left."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if index else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def text_table(title: str, headings: Sequence[str], cells: Cells, notes: Sequence[str] = ()) -> str:
    """The same as text."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=_COLUMNS_MAX,
        highlight=False,
        force_terminal=False,
        force_jupyter=False,  # it would be shown at once
    )
    console.print(rich_table(title, headings, cells))
    written = console.file
    assert isinstance(written, io.StringIO)
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    return "\n".join([*lines, *notes])


def html_table(title: str, headings: Sequence[str], cells: Cells, notes: Sequence[str] = ()) -> str:
    """The same as HTML; a notebook has the style."""

    def line(tag: str, texts: Sequence[str]) -> str:
        style = ' style="text-align:left"'
        parts = (
            f"<{tag}{'' if index else style}>{html.escape(text)}</{tag}>"
            for index, text in enumerate(texts)
        )
        return f"<tr>{''.join(parts)}</tr>"

    return (
        f"<table><caption>{html.escape(title)}</caption><thead>{line('th', headings)}</thead>"
        f"<tbody>{''.join(line('td', row) for row in cells)}</tbody></table>"
        + "".join(f"<p><small>{html.escape(note)}</small></p>" for note in notes)
    )
