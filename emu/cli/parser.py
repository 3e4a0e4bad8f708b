"""A command's parser, made from the function that it calls: argparse does the parsing.

    function(**arguments(parser_of("run", function), ["c.toml", "-q"]))

The signature says what there is (positional before `*`, options behind it), the types what a value
may be, the docstring what it means (`Parameters`, `Examples`). Nothing heavy is loaded: a plain run
takes this way, too.
"""

from __future__ import annotations

import argparse
import functools
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, get_args, get_origin

from emu.config.names import did_you_mean
from emu.log import Format

# --------------------------------------------------------------------------------------------------
# How a command declares its options, and those that several commands share.
#
#     seed: Annotated[int, Parameter(name=["--seed", "-s"], validator=Number(gte=0))] = 42
#
# A parameter before `*` is positional, one behind it an option named like it. Its help stands in
# the docstring, under `Parameters`, or with the type that commands share.


class Number(NamedTuple):
    """Bounds of a number. `gte` and `lte` are the least and the most that it may be."""

    gte: float | None = None
    lte: float | None = None


class Parameter:
    """What a type does not say about an option."""

    __slots__ = ("consume_multiple", "help", "metavar", "names", "negative", "validator")

    def __init__(
        self,
        *,
        name: str | Sequence[str] = (),
        help: str = "",
        negative: str | Sequence[str] | None = None,
        consume_multiple: bool = False,
        validator: Number | None = None,
        metavar: str = "",
    ) -> None:
        self.names = (name,) if isinstance(name, str) else tuple(name)
        self.help = help
        self.negative = negative
        """None: a flag has its `--no-` form; empty: it has none."""
        self.consume_multiple = consume_multiple
        self.validator = validator
        self.metavar = metavar


def settings(help_text: str) -> Parameter:
    """The option --set, which takes several values."""
    return Parameter(name="--set", consume_multiple=True, help=help_text, metavar="KEY=VALUE")


Overrides = Annotated[tuple[str, ...], settings("KEY=VALUE, dotted keys.")]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative=(), help="Print nothing.")]
Json = Annotated[bool, Parameter(name="--json", negative=())]

_NOT_NEGATIVE = Parameter(validator=Number(gte=0))
Count = Annotated[int, _NOT_NEGATIVE]
Jobs = Annotated[
    int,
    Parameter(
        name=["--jobs", "-j"], validator=Number(gte=0), help="Processes; 0 = one for each core."
    ),
]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, _NOT_NEGATIVE]
Seed = Annotated[int, Parameter(validator=Number(gte=0), help="Seed of what is drawn.")]
LogFormat = Annotated[Format, Parameter(help="One event a line, as text or as JSON.")]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))]


# --- A command's parser ---------------------------------------------------------------------------

Command = Callable[..., object]
_REQUIRED: Final = object()
_HELP_COLUMN: Final = 28
_WIDTH: Final = 96


class UsageError(Exception):
    """A line that no command understands; the text says why."""


class Spec(NamedTuple):
    """One parameter of a command."""

    name: str
    kind: Any
    """Type of one value."""
    option: Parameter
    default: Any
    is_positional: bool
    is_many: bool
    text: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the option, the long one first."""
        name = f"--{self.name.strip('_').replace('_', '-')}"
        return tuple(sorted(self.option.names or (name,), key=len, reverse=True))


class Parser(argparse.ArgumentParser):
    """Errors are raised, and name the nearest option."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def parser_of(name: str, command: Command, parser: Parser | None = None) -> Parser:
    """The parser of one command."""
    summary, text, examples = _texts(command)
    made = parser or Parser(prog=f"emu {name}", allow_abbrev=False, add_help=False)
    made.formatter_class = _Layout
    made.description = f"{summary}\n\n{text}".strip()
    made.epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None
    made.add_argument("-h", "--help", action="help", help="This text.")
    for spec in specs(command):
        _add(made, spec)
    return made


def arguments(parser: Parser, tokens: Sequence[str]) -> dict[str, Any]:
    """What the function is called with. Raises UsageError."""
    found, rest = parser.parse_known_args(list(tokens))
    if rest:
        known = [flag for action in parser._actions for flag in action.option_strings]
        if rest[0].startswith("-"):
            word = rest[0].partition("=")[0]
            parser.error(f"unknown option {word}{did_you_mean(word, known)}")
        parser.error(f"unexpected {rest[0]!r}; it takes no more than that (-h tells what)")
    return vars(found)


@functools.cache
def specs(command: Command) -> list[Spec]:
    """The parameters of a command, in order."""
    code, hints = command.__code__, typing.get_type_hints(command, include_extras=True)
    texts = dict(_parameters(command.__doc__ or ""))
    positional = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    given = command.__defaults__ or ()
    defaults = dict(zip(positional[len(positional) - len(given) :], given, strict=True))
    defaults |= command.__kwdefaults__ or {}
    found = []
    for name in (*positional, *keywords):
        kind, option, is_many = _kind(hints[name])
        text = texts.get(name, option.help)
        default = defaults.get(name, _REQUIRED)
        found.append(Spec(name, kind, option, default, name in positional, is_many, text))
    return found


def _kind(hint: Any) -> tuple[Any, Parameter, bool]:
    """Type of one value, what else is said, whether there may be several."""
    option = Parameter()
    if get_origin(hint) is Annotated:
        hint, *said = get_args(hint)
        option = next((one for one in said if isinstance(one, Parameter)), option)
    if get_origin(hint) in (typing.Union, types.UnionType):
        inner = [one for one in get_args(hint) if one is not type(None)]
        kind, within, is_many = _kind(inner[0])
        return kind, option if option.names or option.validator else within, is_many
    if get_origin(hint) in (list, tuple):
        return get_args(hint)[0], option, True
    return hint, option, False


def _add(parser: Parser, spec: Spec) -> None:
    told: dict[str, Any] = {"help": spec.text.replace("%", "%%")}
    if spec.default is not _REQUIRED:
        told["default"] = spec.default
        if _tells(spec.default):
            told["help"] += f" [{spec.default}]".replace("%", "%%")
    if spec.kind is bool:
        _add_flag(parser, spec, told)
        return
    if get_origin(spec.kind) is Literal:
        told["choices"] = get_args(spec.kind)
    elif spec.kind is not str:
        told["type"] = _converter(spec)
    if spec.is_positional:
        many = "+" if spec.is_many else "?"
        if spec.default is not _REQUIRED or spec.is_many:
            told["nargs"] = many
        parser.add_argument(spec.name, metavar=told.pop("metavar", spec.name.upper()), **told)
        return
    if spec.is_many:
        told |= {"action": "extend", "nargs": "+"}
        told["default"] = None
    if "choices" not in told:
        told["metavar"] = spec.option.metavar or _metavar(spec.kind)
    is_required = spec.default is _REQUIRED
    parser.add_argument(*spec.flags, dest=spec.name, required=is_required, **told)


def _tells(default: object) -> bool:
    """Whether a default says something: -1 stands for what the text explains."""
    is_flag = isinstance(default, bool)
    return not is_flag and default not in (None, "", ()) and default != -1


def _add_flag(parser: Parser, spec: Spec, told: dict[str, Any]) -> None:
    if spec.option.negative is None and spec.default is not _REQUIRED:
        has_negative = spec.default is True or spec.option.names == ()
        if has_negative:
            told["action"] = argparse.BooleanOptionalAction
            parser.add_argument(*spec.flags, dest=spec.name, **told)
            return
    parser.add_argument(*spec.flags, dest=spec.name, action="store_true", **told)


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, getattr(kind, "__name__", "TEXT").upper())


def _converter(spec: Spec) -> Callable[[str], Any]:
    """Text -> value within its bounds."""
    bounds, kind = spec.option.validator, spec.kind

    def convert(text: str) -> Any:
        if kind in (int, float) and not text.isascii():
            raise ValueError
        value = kind(text)
        if bounds is not None:
            if bounds.gte is not None and not value >= bounds.gte:
                raise argparse.ArgumentTypeError(f"must be at least {bounds.gte:g}, not {text}")
            if bounds.lte is not None and not value <= bounds.lte:
                raise argparse.ArgumentTypeError(f"must be at most {bounds.lte:g}, not {text}")
        return value

    convert.__name__ = {int: "whole number", float: "number"}.get(kind, "value")
    return convert


# --- what a docstring says -----------------------------------------------------------------------
def summary_of(command: Command) -> str:
    """The first line of a command's docstring."""
    return (command.__doc__ or "").partition("\n")[0]


def _texts(command: Command) -> tuple[str, str, list[str]]:
    """First line, the text behind it, the examples."""
    lines = _dedented(command.__doc__ or "")
    sections = {"": [], "Parameters": [], "Examples": []}  # type: dict[str, list[str]]
    here = ""
    for line in lines[1:]:
        if line.strip() in sections and line.strip():
            here = line.strip()
        elif set(line.strip()) != {"-"} or not line.strip():
            sections[here].append(line)
    text = "\n".join(sections[""]).strip()
    examples = [line.strip() for line in sections["Examples"] if line.strip()]
    return summary_of(command), text, examples


def _parameters(doc: str) -> Iterator[tuple[str, str]]:
    """Name and text of each parameter that a docstring explains."""
    name, texts, is_inside = "", [], False  # type: str, list[str], bool
    for line in _dedented(doc):
        if line in ("Parameters", "Examples"):
            is_inside = line == "Parameters"
        elif is_inside and line and not line.startswith((" ", "-")):
            if name:
                yield name, " ".join(texts)
            name, texts = line.strip(), []
        elif is_inside and line.startswith(" "):
            texts.append(line.strip())
    if name:
        yield name, " ".join(texts)


def _dedented(doc: str) -> list[str]:
    """Lines of a docstring without the indentation of its function."""
    lines = doc.splitlines()
    rest = [line for line in lines[1:] if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in rest), default=0)
    return [lines[0].strip() if lines else "", *(line[margin:] for line in lines[1:])]


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Text as it was written, options with their values once."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"
