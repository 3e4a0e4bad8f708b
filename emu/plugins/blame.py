"""Whose code an error comes from, and one line about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from emu.errors import EmuError, PluginError

if TYPE_CHECKING:
    pass


FILES: Final[set[str]] = set()
"""Source files of classes that were loaded, and of what they import from their own folders."""


def blamed(error: BaseException) -> BaseException:
    """The error of a run, as a PluginError if it arose in the code of a user's class."""
    if isinstance(error, (EmuError, KeyboardInterrupt)) or not isinstance(
        error, (Exception, SystemExit)
    ):
        return error
    if not _frames(error.__traceback__):
        return error
    problem = PluginError(told(error))
    problem.__cause__ = error
    return problem


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """File, line and function of the frames of users' classes, the outermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in FILES:
            found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found


def told(error: BaseException) -> str:
    """An exception in one line, with the place in the user's own code."""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        what = f"{type(error).__name__}: {error.msg}"
        return f"{what} ({error.filename}:{error.lineno})"
    if isinstance(error, SystemExit):
        what = f"it ends the process (SystemExit {error.code!r})"
    frames = _frames(error.__traceback__)
    if frames:
        file, line, function = frames[-1]
        inside = "" if function == "<module>" else f" in {function}"
        what += f" ({file}:{line}{inside})"
    return what


def what_it_is(found: object) -> str:
    """What something is that is no class."""
    if isinstance(found, ModuleType):
        return "a module"
    if callable(found):
        return "a function"
    return f"a value of type {type(found).__name__}"


def place_of(found: Any) -> str:
    """Where something stands."""
    file = module_file(getattr(found, "__module__", None) or "")
    return f" ({file})" if file else ""


def module_file(name: str) -> str | None:
    """The file of a module that was imported; None if it has none, or was not."""
    module = sys.modules.get(name)
    return None if module is None else vars(module).get("__file__")


def lacks(path: str, found: Any, missing: Sequence[str]) -> str:
    """What a class has not, and where it stands."""
    return f"{path}{place_of(found)} lacks {', '.join(missing)}"


def guarded(work: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    """`fail` gets any exception of `work`, with its traceback.

    It stands here because this module is not compiled: a compiled handler binds an exception
    without the frames that it came through, and those tell whose code is at fault.
    """
    try:
        work()
    except BaseException as error:
        fail(error)
