"""The way into the program: `python -m emu` and the installed script."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from emu.process.exits import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> object:
        from emu.cli import call, is_run

        if is_run(tokens):
            gc.disable()  # one run, then the process ends: nothing is ever worth collecting
        return call(tokens)

    return guarded(run)
