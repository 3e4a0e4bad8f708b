"""What a command answers: a table on the terminal, JSON, or nothing; notes; an exit status.

with progress(options, "points") as watch:
    result = run_sweep(options, watch)
return tell(Reply(lambda console: print_result(result, console), file), options)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from emu.apps.shared.watching import Watch, watching
from emu.options.shared import Shown
from emu.process.console import open_console


class Reply(NamedTuple):
    """What was found, in the forms that a user may ask for."""

    show: Callable[[Console], None]
    """Prints tables and sentences."""
    data: Path | Callable[[], object]
    """The same as JSON: a file that has been written, or what is to be encoded."""
    notes: Sequence[str] = ()
    """Said on standard error in every case."""
    status: int = 0


def tell(reply: Reply, options: Shown) -> int:
    """Say it as the options want it; the exit status."""
    if options.as_json:
        text = (
            reply.data.read_text(encoding="utf-8")
            if isinstance(reply.data, Path)
            else json_text(reply.data())
        )
        print(text, end="")
    elif not options.quiet:
        reply.show(open_console())
    for note in reply.notes:
        print(note, file=sys.stderr)
    return reply.status


def json_text(value: object, indent: int = 2) -> str:
    """A value as lines of JSON, `indent` spaces a level."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode() + "\n"


@contextlib.contextmanager
def progress(options: Shown, what: str) -> Iterator[Watch]:
    """A bar on a terminal; an interrupt says that the same command goes on."""
    try:
        with watching(what, wanted=not (options.quiet or options.as_json)) as watch:
            yield watch
    except KeyboardInterrupt:
        print("what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise
