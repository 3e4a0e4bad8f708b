"""A struct of options: the command line, the Python function and the reference page come from it.

    class SweepOptions(Settings, Workers):
        '''What `emu sweep` is asked.'''

        sweep: Annotated[Path, Argument("Sweep file (docs/sweeps.md).")]
        draws: Annotated[int | None, Option("Draws at each point.", at_least=0)] = None

    options = SweepOptions(sweep=Path("s.toml"), jobs=2)
    options.jobs, options.draws

The annotation says what a value may be, the default stands behind it, and an option without one is
needed. Options of a base class stand behind those of the class itself. What a struct holds does not
change. A plain class and no `msgspec.Struct`: `--help` waits for no library.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, ParamSpec, TypeVar

from emu.config.suggestions import did_you_mean
from emu.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
REQUIRED: Final = object()
"""The default of what must be given."""


class Option:
    """What a type does not say about an option."""

    __slots__ = ("at_least", "at_most", "flags", "help", "metavar")

    def __init__(
        self,
        help: str,
        *flags: str,
        at_least: float | None = None,
        at_most: float | None = None,
        metavar: str = "",
    ) -> None:
        """`flags`: its names on the command line; none: `--` and the field's name."""
        self.help = help
        self.flags = flags
        self.at_least = at_least
        self.at_most = at_most
        self.metavar = metavar

    def problem_of(self, value: float, told: str = "") -> str:
        """Why a number is out of bounds; empty if it is not. `told`: as the user wrote it."""
        if self.at_least is not None and not value >= self.at_least:
            return f"must be at least {self.at_least:g}, not {told or value}"
        if self.at_most is not None and not value <= self.at_most:
            hint = (
                f"; {value:g} % is {value / 100:g}"
                if self.at_most == 1 and 5 <= value <= 100
                else ""
            )
            return f"must be at most {self.at_most:g}, not {told or value}{hint}"
        return ""


class Argument(Option):
    """An option that stands on the command line without a name, in the order of the fields."""

    __slots__ = ()


class Field(NamedTuple):
    """One option of a struct."""

    name: str
    kind: type
    """Of one value, as a command line gives it."""
    choices: tuple[str, ...]
    """What it may be, if there is a list."""
    option: Option
    default: object
    """REQUIRED if it must be given."""
    is_many: bool

    @property
    def is_positional(self) -> bool:
        """Whether it stands on the command line without a name."""
        return isinstance(self.option, Argument)

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the option, the long one first."""
        name = f"--{self.name.replace('_', '-')}"
        return tuple(sorted(self.option.flags or (name,), key=len, reverse=True))

    @property
    def text(self) -> str:
        """What it means."""
        return self.option.help

    def problem_of(self, value: object) -> str:
        """Why a value is out of bounds; empty if it is not."""
        values = value if isinstance(value, (list, tuple)) else (value,)
        numbers = (one for one in values if isinstance(one, (int, float)))
        return next((said for one in numbers if (said := self.option.problem_of(one))), "")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of all structs of options."""

    command: ClassVar[str] = ""
    """What errors begin with."""
    other_words: ClassVar[dict[str, str]] = {}
    """Names that others give to options, and what the option is called here."""
    in_order: ClassVar[tuple[str, ...]] = ()
    """Fields that Python takes by their place, too."""
    known_fields: ClassVar[dict[str, Field]] = {}
    """The options of this very class, once they were asked for (`fields_of`)."""

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        if not kw_only:
            cls.in_order = (*cls.in_order, *cls.__annotations__)

    def __init__(self, *values: object, **given: object) -> None:
        """Raises InputError for what is unknown, missing or out of bounds."""
        given |= zip(self.in_order, values, strict=False)
        fields = fields_of(type(self))
        for name in given:
            if name not in fields:
                problem = f"no such option{did_you_mean(name, fields)}"
                raise InputError(self.command, None, name, problem)
        for name, field in fields.items():
            value = given.get(name, field.default)
            if value is REQUIRED:
                raise InputError(self.command, None, field.flags[0], "is missing")
            if problem := field.problem_of(value):
                raise InputError(self.command, None, field.flags[0], problem)
            self.__dict__[name] = value

    def given_of(self, names: Sequence[str]) -> str:
        """The first of these options that is not as it is by default; empty if all are."""
        fields = fields_of(type(self))
        return next((one for one in names if self.__dict__[one] != fields[one].default), "")

    def refuse(self, names: Sequence[str], problem: str) -> None:
        """Raises InputError for the first of these options that was given: it has no effect."""
        if name := self.given_of(names):
            raise InputError(self.command, None, fields_of(type(self))[name].flags[0], problem)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"options do not change: {name}")

    def __repr__(self) -> str:
        fields = fields_of(type(self))
        told = [f"{k}={v!r}" for k, v in self.__dict__.items() if v != fields[k].default]
        return f"{type(self).__name__}({', '.join(told)})"


def fields_of(struct: type[Options]) -> dict[str, Field]:
    """The options of a struct by name: those in order, its own, then those of its bases."""
    if "known_fields" not in struct.__dict__:
        struct.known_fields = _read(struct)
    return struct.known_fields


def _read(struct: type[Options]) -> dict[str, Field]:
    hints: dict[str, object] = {}
    for base in struct.__mro__:
        if base is Options:
            break
        own = base.__dict__.get("__annotations__", {})  # noqa: RUF063  # loads no inspect
        if any(isinstance(hint, str) for hint in own.values()):
            of_all = typing.get_type_hints(base, include_extras=True)
            own = {name: of_all[name] for name in own}
        for name, hint in own.items():
            if typing.get_origin(hint) is Annotated:
                hints.setdefault(name, hint)
    return {name: _field(struct, name, hints[name]) for name in (*struct.in_order, *hints)}


def _field(struct: type[Options], name: str, hint: object) -> Field:
    hint, option = typing.get_args(hint)
    assert isinstance(option, Option)
    default = next((b.__dict__[name] for b in struct.__mro__ if name in b.__dict__), REQUIRED)
    kind, choices, is_many = _kind(hint)
    return Field(name, kind, choices, option, default, is_many)


def _kind(hint: object) -> tuple[type, tuple[str, ...], bool]:
    """Type of one value, its choices, whether there may be several.

    Of several types the command line takes a sequence before one value, a path before a text, a
    text before a number.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [_kind(one) for one in inner if one is not types.NoneType]
        return min(found, key=lambda one: (not one[2], _RANK.index(one[0])))
    if origin in (tuple, list, Sequence):
        kind, choices, _ = _kind(inner[0])
        return kind, choices, True
    if origin is Literal:
        return str, inner, False
    return hint if isinstance(hint, type) else object, (), False


_RANK: Final = (Path, str, float, int, bool, object)


def takes(struct: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Give a function of a struct the options as keyword arguments, with their types.

    @takes(PlanOptions)
    def plan(options: PlanOptions) -> Answer: ...

    plan("Llama-3.1-8B", gpu="H100", rate=20.0)
    """

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*values: P.args, **given: P.kwargs) -> R:
            return function(struct(*values, **given))

        assert isinstance(struct, type)
        assert issubclass(struct, Options)
        _tell(call, struct)
        return call

    return decorate


def _tell(function: Callable[..., object], struct: type[Options]) -> None:
    """Signature and text of a function for `help()` and notebooks."""
    import inspect  # what has a Python function has it loaded

    fields = fields_of(struct)
    hints = typing.get_type_hints(struct)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if field.name in struct.in_order
            else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is REQUIRED else field.default,
            annotation=hints[field.name],
        )
        for field in fields.values()
    ]
    told = [f"{field.name}: {field.text}" for field in fields.values()]
    function.__doc__ = "\n    ".join([f"{(function.__doc__ or '').rstrip()}\n", *told])
    function.__dict__["__signature__"] = inspect.Signature(parameters)
