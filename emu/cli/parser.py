"""A command's parser, made from the struct of its options: argparse does the parsing.

    options = parse("run", COMMANDS["run"], ["c.toml", "-q"])

Nothing heavy is loaded: a plain run takes this way, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from emu.config.suggestions import did_you_mean
from emu.options.declare import REQUIRED, Field, Options, fields_of
from emu.process.lean import module_of, standing_in


def _counted(one: str, many: str, count: int) -> str:
    return one if count == 1 else many


# Its words are not translated, as those of emu are not: that is half of its import.
with standing_in({"gettext": module_of("gettext", {"gettext": str, "ngettext": _counted})}):
    import argparse

_HELP_COLUMN: Final = 28
_WIDTH: Final = 96
_METAVARS: Final = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_NUMBERS: Final = {int: "whole number", float: "number"}


class Command(NamedTuple):
    """What a command is called with, and what answers it: names of things that are not loaded."""

    summary: str
    struct: str
    """`emu.module:Struct` of its options."""
    function: str
    """`emu.module:function` of that struct; gives the exit status."""
    text: str = ""
    examples: tuple[str, ...] = ()

    @property
    def options(self) -> type[Options]:
        """The struct of its options."""
        found = _load(self.struct)
        assert isinstance(found, type)
        assert issubclass(found, Options)
        return found

    @property
    def answer(self) -> Callable[[Options], object]:
        """The function that answers."""
        found: Callable[[Options], object] = _load(self.function)
        return found


def _load(name: str) -> Any:
    module, _, inner = name.partition(":")
    return getattr(importlib.import_module(module), inner)


class UsageError(Exception):
    """A line that no command understands; the text says why."""


class Parser(argparse.ArgumentParser):
    """Errors are raised, and name the nearest option."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def specs(command: Command) -> list[Field]:
    """The options of a command, in order."""
    return list(fields_of(command.options).values())


def parser_of(name: str, command: Command, parser: Parser | None = None) -> Parser:
    """The parser of one command."""
    made = parser or Parser(prog=f"emu {name}", allow_abbrev=False, add_help=False)
    made.formatter_class = _layout
    made.description = f"{command.summary}\n\n{command.text}".strip()
    if command.examples:
        made.epilog = "examples:\n" + "\n".join(f"  {line}" for line in command.examples)
    made.add_argument("-h", "--help", action="help", help="This text.")
    for field in specs(command):
        _add(made, field)
    return made


def arguments(name: str, command: Command, tokens: Sequence[str]) -> dict[str, object]:
    """What the line gives of the struct; its defaults are the struct's own. Raises UsageError."""
    parser = parser_of(name, command)
    found, rest = parser.parse_known_args(list(tokens))
    if rest:
        if rest[0].startswith("-"):
            word = rest[0].partition("=")[0]
            other = command.options.other_words.get(word, "")
            known = ["--help", *(f for field in specs(command) for f in field.flags)]
            hint = f"; say {other}" if other else did_you_mean(word, known)
            parser.error(f"unknown option {word}{hint}")
        takes = (
            "no more than that"
            if any(one.is_positional for one in specs(command))
            else ("options alone, no file")
        )
        parser.error(f"unexpected {rest[0]!r}; it takes {takes} (-h tells what)")
    return {key: value for key, value in vars(found).items() if value is not None}


def parse(name: str, command: Command, tokens: Sequence[str]) -> Options:
    """The options that a line gives. Raises UsageError."""
    return command.options(**arguments(name, command, tokens))


def _add(parser: Parser, field: Field) -> None:
    text = field.text
    if _tells(field.default):
        text += f" [{field.default}]"
    text = text.replace("%", "%%")
    is_needed = field.default is REQUIRED
    if field.kind is bool:
        action = argparse.BooleanOptionalAction if field.default is True else "store_true"
        parser.add_argument(
            *field.flags, dest=field.name, help=text, default=field.default, action=action
        )
        return
    if field.is_positional:
        parser.add_argument(
            field.name,
            help=text,
            metavar=field.name.upper(),
            nargs="+" if field.is_many else None if is_needed else "?",
            choices=field.choices or None,
            type=_converter(field),
        )
        return
    parser.add_argument(
        *field.flags,
        dest=field.name,
        required=is_needed,
        help=text,
        metavar=None if field.choices else field.option.metavar or _METAVARS[field.kind],
        action="extend" if field.is_many else "store",
        nargs="+" if field.is_many else None,
        choices=field.choices or None,
        type=_converter(field),
    )


def _tells(default: object) -> bool:
    """Whether a default says something: -1 stands for what the text explains."""
    is_flag = isinstance(default, bool)
    return not is_flag and default not in (None, "", (), REQUIRED) and default != -1


def _converter(field: Field) -> Callable[[str], object]:
    """Text -> value within its bounds."""
    kind, option = field.kind, field.option

    def convert(text: str) -> object:
        if kind not in _NUMBERS:
            return kind(text)
        try:
            value = (int(text) if kind is int else float(text)) if text.isascii() else None
        except ValueError:
            value = None
        if value is None:
            raise argparse.ArgumentTypeError(_not_a_number(field, text))
        if problem := option.problem_of(value, text):
            raise argparse.ArgumentTypeError(problem)
        return value

    return convert


def _not_a_number(field: Field, text: str) -> str:
    """What is wrong with the text of a number, and how it is written."""
    from emu.config.ways_out import instead_of_option

    hint = instead_of_option(text, is_many=field.is_many, is_part=field.option.at_most == 1)
    return f"expected a {_NUMBERS[field.kind]}, got {text!r}{hint}"


def _layout(prog: str) -> argparse.HelpFormatter:
    return _Layout(prog, max_help_position=_HELP_COLUMN, width=_WIDTH)


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Text as it was written, options with their values once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"
