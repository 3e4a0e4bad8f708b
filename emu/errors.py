"""The error tree of emu.

    EmuError
    ├── InputError            a user's file, key or value is wrong: one line, exit status 2
    │   └── InputErrors       several lines of a workload are: one line for each
    ├── RunError              the run cannot continue: exit status 3
    │   ├── Deadlock          work outstanding, nothing scheduled
    │   ├── Zeno              too many events at one instant
    │   ├── LimitReached      a limit that the user set was reached
    │   ├── Stalled           simulated time goes on without progress
    │   └── PluginError       a class of the user's own failed in the run
    └── InvariantViolation    our own bug: exit status 4, carries time, object and its story
        ├── InvalidTransition
        └── UnexpectedEvent

Anything else that escapes is an internal fault: the command line says so and exits with 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

DISTRIBUTION: Final = "emu-llm"
"""Name in the package registry; `emu` is the name of the import and of the command."""


def printable(text: str) -> str:
    """The text with control characters as escapes: a terminal shows them and does not obey them."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


_PART_CHARS_MAX: Final = 1_000
"""Of a file's name, a key or a problem in a message: more than any path or list of names has."""


def _clipped(text: str) -> str:
    """A part of a message that repeats what a user wrote, however long that was."""
    if len(text) <= _PART_CHARS_MAX:
        return text
    half = _PART_CHARS_MAX // 4
    return f"{text[:half]}... ({len(text):,} characters) ...{text[-half:]}"


def shown(value: object) -> str:
    """A value in few characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable_lines(text: str) -> str:
    """`printable` of each line."""
    return "\n".join(map(printable, text.split("\n")))


class EmuError(Exception):
    """Base of every error that emu raises on purpose."""

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """What a cell of a notebook shows (IPython's protocol): the line of the command line."""
        return [f"{type(self).__name__}: {printable_lines(str(self))}"]


class InputError(EmuError):
    """A user's input is wrong.

    Prints as `SOURCE:LINE: FIELD: PROBLEM`, or `SOURCE: FIELD: PROBLEM` when no line applies.
    """

    exit_status = 2

    def __init__(self, source: str, line: int | None, field: str, problem: str) -> None:
        self.source = source
        self.line = line
        self.field = field
        self.problem = problem
        where = source if line is None else f"{source}:{line}"
        told = ": ".join(_clipped(part) for part in (where, field, problem) if part)
        super().__init__(printable(told))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, int | None, str, str]]:
        """How it comes out of another process: with its parts."""
        return InputError, (self.source, self.line, self.field, self.problem)


class InputErrors(InputError):
    """Several lines of a user's file are wrong; it prints each of them as one line."""

    def __init__(self, errors: Sequence[InputError], more: str = "") -> None:
        """`errors`: at least one; its parts are those of the first. `more`: what is said below."""
        first = errors[0]
        super().__init__(first.source, first.line, first.field, first.problem)
        self.errors = list(errors)
        self.more = more
        self.args = ("\n".join([*map(str, errors), *([more] if more else [])]),)

    def __reduce__(self) -> tuple[type[InputErrors], tuple[list[InputError], str]]:  # type: ignore[override]
        return InputErrors, (self.errors, self.more)


def install_hint(extra: str) -> str:
    """How an extra is installed."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextlib.contextmanager
def needs_extra(extra: str, source: str, field: str = "") -> Iterator[None]:
    """Imports of this block need an extra: without it, one line says how it is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "emu"):
            raise
        problem = f"needs the package {package}: {install_hint(extra)}"
        raise InputError(source, None, field, problem) from None


class RunError(EmuError):
    """The run cannot continue."""

    exit_status = 3


class Deadlock(RunError):
    """Requests are outstanding, and no actor can ever run again."""


class Zeno(RunError):
    """Simulated time stands still while events go on."""


class LimitReached(RunError):
    """A limit that the user set (simulated time, events) was reached."""


class Stalled(RunError):
    """Simulated time goes on, and no request gets a token or ends."""


class PluginError(RunError):
    """A class of the user's own raised an exception, or answered what it must not."""


class PaceLost(RunError):
    """Live mode: the machine was too slow for the emulation, and `--strict-pace` was given."""


class InvariantViolation(EmuError):
    """One of emu's own invariants does not hold."""

    exit_status = 4

    def __init__(self, what: str, *, at_ns: int | None = None, story: Sequence[str] = ()) -> None:
        self.what = what
        self.at_ns = at_ns
        self.story = list(story)
        head = what if at_ns is None else f"at {at_ns} ns: {what}"
        super().__init__("\n  ".join([head, *self.story]))

    def _render_traceback_(self) -> list[str]:
        """A bug of emu shows where it arose, for the report."""
        import traceback

        return "".join(traceback.format_exception(self)).splitlines()


class InvalidTransition(InvariantViolation):
    """A replica was asked to change its state in a way that the table does not allow."""


class UnexpectedEvent(InvariantViolation):
    """An actor received an event that its state does not provide for."""
