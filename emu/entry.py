"""The way into the program: `python -m emu` and the installed script."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from emu.process import compiled
from emu.process.exits import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)

    if notice := compiled.build().notice():
        print(notice, file=sys.stderr, flush=True)

    def run() -> object:
        from emu.cli import call, is_run

        if is_run(tokens):
            gc.disable()  # one run, then the process ends: nothing is ever worth collecting
            load_msgspec()
        return call(tokens)

    return guarded(run)


def load_msgspec() -> None:
    """Import msgspec without `typing_extensions`, which loads `inspect` and nine more modules.

    It asks for that package first and takes what it needs of it, all of which `typing` has had
    since Python 3.11: a tenth of the start of a small run.
    """
    name = "typing_extensions"
    if name not in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules[name]
