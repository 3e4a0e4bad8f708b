"""The command line: `python -m emu CONFIG.toml`, and what stands beside it.

A thin layer: it parses, calls, prints, and turns errors into exit statuses (0 done, 1 internal
fault, 2 input error, 3 the run could not continue, 4 an invariant was violated, 130
interrupted). A command's module is imported when the command is given, and everything heavy by the
command itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from emu.cli.commands import COMMANDS, GROUPS, HEADINGS
from emu.cli.parser import Command, Parser, UsageError, parse, parser_of
from emu.config.suggestions import did_you_mean
from emu.process.exits import fail, guarded

FIRST_WORDS: Final = frozenset(name.partition(" ")[0] for name in COMMANDS)
"""What a line can begin with, beside the name of a file."""
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
        from emu.plugins.named import allow, forbid

        forbid()
        try:
            return call([word for word in words if word != NO_PLUGINS])
        finally:
            allow()
    if not words or words[0] in _HELP or words == ["help"]:
        print(overview())
        return 0
    if words[0] == "--version":
        from emu.process.version import __version__, version_line

        print(version_line(__version__))
        return 0
    if words[0] not in FIRST_WORDS and not words[0].startswith("-") and not _names_a_file(words[0]):
        hint = did_you_mean(words[0], FIRST_WORDS)
        return fail(f"{words[0]}: neither a command nor a file{hint}", 2)
    name = words.pop(0) if words[0] in FIRST_WORDS else "run"  # `emu CONFIG` is `emu run CONFIG`
    if name == "run" and not words:
        return _explain_run()
    try:
        if name in GROUPS:
            name, words = _within(name, words)
        command = COMMANDS[name]
        options = parse(name, command, words)
    except UsageError as error:
        return fail(str(error), 2)
    except SystemExit as done:  # argparse has printed the help that was asked for
        return done.code
    return command.answer(options)


def is_run(tokens: Sequence[str]) -> bool:
    """True if the line asks for one run."""
    if not tokens or tokens[0].startswith("-"):
        return False
    return tokens[0] == "run" or (tokens[0] not in FIRST_WORDS and _names_a_file(tokens[0]))


def groups() -> dict[str, tuple[str, ...]]:
    """Heading -> first words of the commands below it."""
    return {
        heading: tuple(dict.fromkeys(name.partition(" ")[0] for name in commands))
        for heading, commands in HEADINGS.items()
    }


def root_parser() -> Parser:
    """One parser of all commands, for what completes or describes command lines."""
    root = Parser(prog="emu", add_help=False)
    root.add_argument("-h", "--help", action="help", help="Every command.")
    root.add_argument("--version", action="store_true", help="Version, revision and build.")
    level = root.add_subparsers(parser_class=Parser)
    inner_levels = {
        name: level.add_parser(name, help=summary, add_help=False).add_subparsers(
            parser_class=Parser
        )
        for name, summary in GROUPS.items()
    }
    for path, command in COMMANDS.items():
        name, _, inner = path.partition(" ")
        holder = inner_levels[name] if inner else level
        made = holder.add_parser(inner or name, help=command.summary, add_help=False)
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
    return GROUPS[name] if name in GROUPS else COMMANDS[name].summary


def _inner(group: str) -> Mapping[str, Command]:
    """The commands of a group by their second words."""
    split = {name: name.partition(" ") for name in COMMANDS}
    return {words[2]: COMMANDS[name] for name, words in split.items() if words[0] == group}


def _within(group: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """The command of a group that the first word means, and what follows."""
    inner = _inner(group)
    if not words or words[0] in _HELP:
        lines = [f"usage: emu {group} COMMAND [OPTIONS]", ""]
        lines += [f"  {name:<16}{command.summary}" for name, command in inner.items()]
        print("\n".join(lines))
        raise SystemExit(0 if words else 2)
    if words[0] not in inner:
        raise UsageError(f"emu {group}: unknown command {words[0]}{did_you_mean(words[0], inner)}")
    return f"{group} {words[0]}", list(words[1:])


def _explain_run() -> int:
    """`emu run` alone: what it needs."""
    from emu.config.input_files import examples

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
