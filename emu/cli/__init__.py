"""The command line: `python -m emu CONFIG.toml`, and what stands beside it.

A thin layer: it parses, calls, prints, and turns errors into exit statuses (0 done, 1 internal
fault, 2 input error, 3 the run could not continue, 4 an invariant was violated, 130
interrupted). A command's family is imported when the command is given, and everything heavy by the
command itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cyclopts import App, CycloptsError

from emu.config.suggest import did_you_mean
from emu.process.exits import fail, guarded

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "runs": ("run", "validate", "report", "compare", "sweep"),
        "live": ("serve", "observe"),
        "measured": ("import-cluster", "reproduce", "calibrate", "trace", "profile", "fidelity"),
        "trials": ("chaos", "resilience", "experiment"),
        "catalogue": ("schema", "models", "gpus"),
    }
)
"""Module -> its commands, each a function of the same name."""


def _make_app() -> App:
    made = App(
        name="emu",
        help="Emulate a cluster that serves large language models.",
        help_on_error=False,
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,  # main() says it
    )
    for family, commands in _FAMILIES.items():
        for command in commands:
            made.command(f"emu.cli.{family}:{command.replace('-', '_')}", name=command)
    made.command(
        "emu.cli.workload:app",
        name="workload",
        help="Convert, generate, describe, scale and slice workloads.",
    )
    return made


app = _make_app()
COMMANDS: Final = frozenset(name for name in app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: call(tokens))


def call(tokens: list[str]) -> object:
    """Run the command line without the rim: errors are raised."""
    if tokens and not tokens[0].startswith("-") and tokens[0] not in COMMANDS:
        if not _names_a_file(tokens[0]):
            hint = did_you_mean(tokens[0], COMMANDS)
            return fail(f"{tokens[0]}: neither a command nor a file{hint}", 2)
        tokens.insert(0, "run")  # `emu CONFIG` is `emu run CONFIG`
    if not tokens or tokens[0] in app.help_flags:
        for command in COMMANDS:
            app[command]  # loads it: the list of all says what each does
    try:
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return fail(" ".join(str(error).split()), 2)


def _names_a_file(word: str) -> bool:
    """It is one, or looks as if it should be: then the run says what is wrong with it."""
    return "." in word or "/" in word or Path(word).exists()
