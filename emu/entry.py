"""The way into the program: `python -m emu` and the installed script."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from types import ModuleType

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
    since Python 3.11: a tenth of the start of a small run. Its `uuid` asks `platform`, which
    compiles nine regular expressions, for the name of the system.
    """
    stand_ins: dict[str, ModuleType | None] = {"typing_extensions": None}  # as if not installed
    if os.name == "posix":
        system = stand_ins["platform"] = ModuleType("platform")
        system.__dict__["system"] = lambda: os.uname().sysname
    absent = [name for name in stand_ins if name not in sys.modules]
    for name in absent:
        sys.modules[name] = stand_ins[name]  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
