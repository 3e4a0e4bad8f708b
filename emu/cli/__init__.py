"""The command line: `python -m emu CONFIG.toml`, and what stands beside it.

A thin layer: it parses, calls, prints, and turns errors into exit statuses (0 done, 1 internal
fault, 2 input error, 3 the run could not continue, 4 an invariant was violated, 130
interrupted). A command's module is imported when the command is given, and everything heavy by the
command itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from emu.cli.parser import Command, Parser, UsageError, arguments, parser_of, specs, summary_of
from emu.config.names import did_you_mean
from emu.process.exits import fail, guarded

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "start": ("init", "completion", "schema", "models", "gpus"),
        "runs": (
            *("run", "validate", "report", "compare", "sweep"),
            *(
                "plot",
                "rerun",
                "story",
                "bundle",
                "log",
                "plan",
                "chaos",
                "resilience",
                "experiment",
            ),
        ),
        "live": (
            *("serve", "observe", "learn", "calibrate"),
            *("import-cluster", "reproduce", "trace", "profile", "fidelity"),
            *("collective", "parity"),
        ),
        "workload": ("workload", "whatif", "export"),
    }
)
"""Module -> its commands, each a function of the same name."""

_HEADINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Start": ("init", "validate", "run", "models", "gpus", "workload"),
        "Look at runs": ("report", "compare", "story", "export"),
        "Many runs": ("plan", "whatif", "sweep", "experiment"),
        "Publish": ("plot", "rerun", "bundle", "log"),
        "Faults": ("resilience", "chaos"),
        "Live": ("serve", "observe"),
        "Measurements and other systems": (
            *("learn", "fidelity", "reproduce", "profile", "import-cluster"),
        ),
        "ASTRA-Sim": ("collective", "parity"),
        "Tools": ("trace", "schema", "completion"),
    }
)
_MODULES: Final = {name: module for module, names in _FAMILIES.items() for name in names}
COMMANDS: Final = frozenset(_MODULES)
_EXAMPLES: Final = """\
examples:
  emu init                              a cluster file to start from
  emu run cluster.toml                  emulate it: a table, and a report page in runs/
  emu cluster.toml --set router.policy=round_robin -o runs/other
  emu compare runs/quickstart runs/other
  emu init capacity.toml --example autoscale

emu COMMAND --help tells a command's options; docs/index.md leads by what you want to do."""
_HELP: Final = ("-h", "--help")
NO_PLUGINS: Final = "--no-plugins"
"""With every command: configurations may not name classes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: call(tokens))


def call(tokens: Sequence[str]) -> object:
    """Run the command line without the rim: errors are raised."""
    words = list(tokens)
    if NO_PLUGINS in words:
        from emu.plugins import allow, forbid

        forbid()
        try:
            return call([word for word in words if word != NO_PLUGINS])
        finally:
            allow()
    if not words or words[0] in _HELP:
        print(overview())
        return 0
    if words[0] == "--version":
        from emu.process.version import __version__, version_line

        print(version_line(__version__))
        return 0
    if words[0] not in COMMANDS and not words[0].startswith("-") and not _names_a_file(words[0]):
        hint = did_you_mean(words[0], COMMANDS)
        return fail(f"{words[0]}: neither a command nor a file{hint}", 2)
    name = words.pop(0) if words[0] in COMMANDS else "run"  # `emu CONFIG` is `emu run CONFIG`
    if name == "run" and not words:
        return _explain_run()
    try:
        command = command_of(name)
        while isinstance(command, Mapping):  # a group of commands
            command, name, words = _within(command, name, words)
        parser = parser_of(name, command)
        given = arguments(parser, words)
    except UsageError as error:
        return fail(str(error), 2)
    except SystemExit as done:  # argparse has printed the help that was asked for
        return done.code
    positional = []
    for spec in specs(command):
        if spec.is_many and given[spec.name] is None:
            given[spec.name] = ()
        if spec.is_positional:
            positional.append(given.pop(spec.name))
    return command(*positional, **given)


def is_run(tokens: Sequence[str]) -> bool:
    """True if the line asks for one run."""
    if not tokens or tokens[0].startswith("-"):
        return False
    return tokens[0] == "run" or (tokens[0] not in COMMANDS and _names_a_file(tokens[0]))


def command_of(name: str) -> Command | Mapping[str, Command]:
    """The function of a command, or the functions of a group of commands."""
    module = importlib.import_module(f"emu.cli.{_MODULES[name]}")
    found: Command | Mapping[str, Command] = (
        module.COMMANDS if name == "workload" else getattr(module, name.replace("-", "_"))
    )
    return found


def every_command() -> dict[str, Command]:
    """All commands by their full names, those of groups included (`workload convert`)."""
    found: dict[str, Command] = {}
    for name in (name for group in groups().values() for name in group):
        command = command_of(name)
        if isinstance(command, Mapping):
            found |= {f"{name} {inner}": function for inner, function in command.items()}
        else:
            found[name] = command
    return found


def groups() -> dict[str, tuple[str, ...]]:
    """Heading -> commands below it; what has no heading stands at the end."""
    placed = {name for names in _HEADINGS.values() for name in names}
    rest = tuple(name for name in _MODULES if name not in placed)
    return {**_HEADINGS, **({"More": rest} if rest else {})}


def root_parser() -> Parser:
    """One parser of all commands, for what completes or describes command lines."""
    root = Parser(prog="emu", add_help=False)
    root.add_argument("-h", "--help", action="help", help="Every command.")
    root.add_argument("--version", action="store_true", help="Version, revision and build.")
    level = root.add_subparsers(parser_class=Parser)
    groups: dict[str, Any] = {}
    for path, command in every_command().items():
        name, _, inner = path.partition(" ")
        holder, word = level, name
        if inner:
            if name not in groups:
                group = level.add_parser(name, help=_summary(name), add_help=False)
                groups[name] = group.add_subparsers(parser_class=Parser)
            holder, word = groups[name], inner
        made = holder.add_parser(word, help=summary_of(command), add_help=False)
        parser_of(path, command, made)
    return root


def overview() -> str:
    """Every command in its group, with what it does."""
    lines = ["usage: emu COMMAND [OPTIONS]        emu CONFIG.toml [OPTIONS]", ""]
    lines += ["Emulate a cluster that serves large language models."]
    for heading, group in groups().items():
        lines += ["", f"{heading}:"]
        lines += [f"  {name:<16}{_summary(name)}" for name in group]
    lines += [
        "",
        "Everywhere: --help, --no-plugins (no code from configurations); on its own: --version",
        "",
        _EXAMPLES,
    ]
    return "\n".join(lines)


def _summary(name: str) -> str:
    command = command_of(name)
    if isinstance(command, Mapping):
        return f"{sys.modules[f'emu.cli.{_MODULES[name]}'].SUMMARY}."
    return summary_of(command)


def _within(
    group: Mapping[str, Command], name: str, words: list[str]
) -> tuple[Command, str, list[str]]:
    """The command of a group that the first word means."""
    if not words or words[0] in _HELP:
        lines = [f"usage: emu {name} COMMAND [OPTIONS]", ""]
        lines += [f"  {inner:<16}{summary_of(command)}" for inner, command in group.items()]
        print("\n".join(lines))
        raise SystemExit(0 if words else 2)
    if words[0] not in group:
        raise UsageError(f"emu {name}: unknown command {words[0]}{did_you_mean(words[0], group)}")
    return group[words[0]], f"{name} {words[0]}", words[1:]


def _explain_run() -> int:
    """`emu run` alone: what it needs."""
    from emu.config.names import examples

    print(
        "emu run needs a configuration:\n"
        "  emu init                 writes cluster.toml, with comments\n"
        "  emu run cluster.toml     emulates it and writes a report\n"
        f"Other examples: emu init --example NAME, of {', '.join(examples())}.\n"
        "emu run --help tells the options.",
        file=sys.stderr,
    )
    return 2


def _names_a_file(word: str) -> bool:
    """It is one, or looks as if it should be: then the run says what is wrong with it."""
    return "." in word or "/" in word or Path(word).exists()
