"""The way into the program: `python -m emu` and the installed script.

The parser of all commands takes longer to load than a short run takes to emulate. A plain run
(`emu [run] FILE.toml` with its own options, each given once) is recognised here and started without
it. Whatever else is written goes to `emu/cli/`, which knows every command and words every error;
for a line that both understand, both make the same call (a test compares them).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from emu.process.exits import guarded

_FLAGS: Final = {
    "--quiet": ("quiet", True),
    "-q": ("quiet", True),
    "--report": ("report", True),
    "--no-report": ("report", False),
}
_VALUES: Final = {"--output": "output", "-o": "output", "--seed": "seed"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    wanted = plain_run(tokens)

    def run() -> object:
        if wanted is None:
            from emu.cli import call

            return call(tokens)
        gc.disable()  # one run, then the process ends: nothing is ever worth collecting
        from emu.runs.runner import run_command

        return run_command(**wanted)

    return guarded(run)


def plain_run(tokens: Sequence[str]) -> dict[str, Any] | None:
    """The call that a plain run asks for; None if the line is anything else, or wrong."""
    left = list(reversed(tokens))
    if left and left[-1] == "run":
        left.pop()
    if not left or left[-1].startswith("-") or not left[-1].endswith(".toml"):
        return None
    call: dict[str, Any] = {"path": Path(left.pop())}
    while left:
        option = left.pop()
        values: list[str] = []
        while left and not left[-1].startswith("-"):
            values.append(left.pop())
        value: Any
        if option in _FLAGS and not values:
            name, value = _FLAGS[option]
        elif option in _VALUES and len(values) == 1:
            name, value = _VALUES[option], values[0]
        elif option == "--set" and values:
            name, value = "overrides", tuple(values)
        else:
            return None
        if name in call:
            return None
        call[name] = value
    return _converted(call)


def _converted(call: dict[str, Any]) -> dict[str, Any] | None:
    """With the types and defaults of the command; None if a value is not of its type."""
    seed = call.get("seed")
    if seed is not None:
        if not (seed.isascii() and seed.isdigit()):
            return None
        call["seed"] = int(seed)
    if "output" in call:
        call["output"] = Path(call["output"])
    defaults = {"output": None, "seed": None, "overrides": (), "quiet": False, "report": True}
    return {**defaults, **call}
