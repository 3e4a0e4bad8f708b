"""A bar for many runs: in a terminal, in a cell of a notebook, or nowhere."""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Watch = Callable[[int, int, str], None]
"""Told (runs done, runs known, a line) whenever something changes."""


def _silent(done: int, known: int, line: str) -> None:
    """A watch that shows nothing."""


@contextlib.contextmanager
def watching(what: str, *, wanted: bool = True) -> Iterator[Watch]:
    """A bar while the block runs, where there is something to look at."""
    if wanted and _in_notebook():
        yield _cell_bar(what)
    elif wanted and sys.stderr.isatty():
        with Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=None, line="")
            yield lambda done, known, line: bar.update(task, completed=done, total=known, line=line)
    else:
        yield _silent


def _in_notebook() -> bool:
    """Whether a kernel shows what is displayed (a terminal of IPython is a terminal)."""
    shell: Any = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return running is not None and type(running).__name__ != "TerminalInteractiveShell"


def _cell_bar(what: str) -> Watch:
    """A bar of HTML that is replaced as runs end; it needs no widgets."""
    display: Any = sys.modules["IPython"].display
    shown = display.display(display.HTML(""), display_id=True)

    def told(done: int, known: int, line: str) -> None:
        text = html.escape(f"{done} of {known} {what} {line}".strip())
        bar = f'<progress value="{done}" max="{max(known, 1)}"></progress> {text}'
        shown.update(display.HTML(bar))

    return told
