"""A struct of options: from Python and from a command line, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest

import emu
from emu.cli.commands import COMMANDS
from emu.cli.parser import Command, UsageError, parse
from emu.errors import InputError
from emu.options.declare import Argument, Option, Options, fields_of, takes
from emu.options.shared import Workers


class Named(Options, kw_only=False):
    """What Python takes in order."""

    name: Annotated[str, Option("A name.")] = "none"


class Question(Named, Workers):
    """A question."""

    command = "ask"

    file: Annotated[Path, Argument("A file.")]
    kinds: Annotated[str | Sequence[str], Option("Kinds.", "--kind")] = ()
    count: Annotated[int, Option("How many.", at_least=1, at_most=9)] = 3
    sizes: Annotated[Sequence[float], Option("Sizes.", at_least=0)] = ()
    goal: Annotated[Literal["high", "low"], Option("Which end.")] = "high"
    is_fast: Annotated[bool, Option("In haste.", "--fast")] = False
    page: Annotated[bool, Option("With a page.")] = True


ASK = Command("Ask.", f"{__name__}:Question", f"{__name__}:ask")


@takes(Question)
def ask(options: Question) -> str:
    """Ask something."""
    return f"{options.name} {options.count}"


def test_a_line_and_python_give_the_same() -> None:
    words = "a.txt --kind x y --kind z --count 4 --sizes 1.5 2 --goal low --fast --no-page -j 2"
    given = Question(
        file=Path("a.txt"),
        kinds=["x", "y", "z"],
        count=4,
        sizes=[1.5, 2.0],
        goal="low",
        is_fast=True,
        page=False,
        jobs=2,
    )
    assert vars(parse("ask", ASK, words.split())) == vars(given)
    assert vars(parse("ask", ASK, ["a.txt"])) == vars(Question(file=Path("a.txt")))


def test_own_options_come_before_those_of_groups() -> None:
    names = ["name", "file", "kinds", "count", "sizes", "goal", "is_fast", "page", "ray", "jobs"]
    assert list(fields_of(Question)) == names


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "ask: --file: is missing"),
        ({"file": Path("a"), "coutn": 3}, "ask: coutn: no such option; did you mean count?"),
        ({"file": Path("a"), "count": 0}, "ask: --count: must be at least 1, not 0"),
        ({"file": Path("a"), "count": 10}, "ask: --count: must be at most 9, not 10"),
        ({"file": Path("a"), "sizes": [1.0, -1.0]}, "ask: --sizes: must be at least 0, not -1.0"),
    ],
)
def test_what_is_wrong_is_one_line(given: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        Question(**given)
    assert str(caught.value) == problem


def test_a_line_is_held_to_the_same_bounds() -> None:
    with pytest.raises(UsageError, match="--count: must be at most 9, not 10"):
        parse("ask", ASK, ["a.txt", "--count", "10"])


def test_options_do_not_change() -> None:
    options = Question(file=Path("a"))
    with pytest.raises(AttributeError, match="do not change"):
        options.count = 4  # type: ignore[misc]
    assert repr(Question(file=Path("a"), count=4)) == f"Question(file={Path('a')!r}, count=4)"


def test_a_function_takes_the_options_as_arguments() -> None:
    assert ask("x", file=Path("a"), count=4) == "x 4"
    signature = inspect.signature(ask)
    assert list(signature.parameters) == list(fields_of(Question))
    assert signature.parameters["name"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert "count: How many." in (ask.__doc__ or "")


def test_a_plan_from_python_has_the_options_of_the_command() -> None:
    python = set(inspect.signature(emu.plan).parameters)
    line = set(fields_of(COMMANDS["plan"].options))
    assert line - python == {"quiet", "as_json"}
    assert python <= line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_what_its_entry_names(name: str) -> None:
    command = COMMANDS[name]
    assert fields_of(command.options)
    (taken,) = inspect.signature(command.answer).parameters.values()
    assert taken.annotation in (command.options.__name__, command.options)
