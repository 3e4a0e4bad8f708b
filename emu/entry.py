"""The way into the program: `python -m emu` and the installed script."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from emu.process import compiled
from emu.process.lean import leave_out_docs_of_numpy, load_pathlib, module_of, standing_in

load_pathlib()  # before another module asks for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    from emu.process.exits import guarded

    tokens = list(sys.argv[1:] if arguments is None else arguments)

    if notice := compiled.build().notice():
        print(notice, file=sys.stderr, flush=True)

    def run() -> object:
        gc.disable()  # importing makes many objects and no garbage
        from emu.cli import call, is_run

        if is_run(tokens):
            leave_out_docs_of_numpy()
            load_msgspec()  # one run, then the process ends: nothing is ever worth collecting
        else:
            gc.enable()
        return call(tokens)

    return guarded(run)


def load_msgspec() -> None:
    """Import msgspec without `typing_extensions`, which loads `inspect` and nine more modules.

    It asks for that package first and takes what it needs of it, all of which `typing` has had
    since Python 3.11: a tenth of the start of a small run. Its `uuid` asks `platform`, which
    compiles nine regular expressions, for the name of the system.
    """
    stand_ins: dict[str, ModuleType | None] = {"typing_extensions": None}  # as if not installed
    if os.name == "posix":
        stand_ins["platform"] = module_of("platform", {"system": lambda: os.uname().sysname})
    with standing_in(stand_ins):
        import msgspec  # noqa: F401
