"""Objects of a user's own classes, made and their errors told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from emu.errors import EmuError, InputError, PluginError

if TYPE_CHECKING:
    pass
from emu.plugins.blame import lacks, place_of, told, what_it_is
from emu.plugins.loading import check_plugin
from emu.plugins.named import KINDS


def make_plugin(
    path: str,
    key: str,
    *arguments: object,
    context: object = None,
    options: object = None,
    source: str = "config",
) -> Any:
    """An object of the class of that name, made from `arguments`.

    A constructor with a parameter `context` gets the `context`. `options`: the keys of its table,
    for a class that has `Options`. Raises InputError (at the config key) if it cannot be made so,
    or lacks something.
    """
    import inspect

    found = check_plugin(path, key, source)
    keywords: dict[str, object] = {}
    try:
        signature = inspect.signature(found)
        if "context" in signature.parameters and context is not None:
            keywords["context"] = context
        if options is not None:
            keywords["options"] = options
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        problem = f"{path}{place_of(found)} cannot be made from ({kinds}): {error}"
        raise InputError(source, None, key, problem) from None
    except ValueError:
        pass  # a constructor in C has no signature: it is tried
    try:
        made = _told_by_its_methods(found)(*arguments, **keywords)
    except (KeyboardInterrupt, EmuError):
        raise
    except BaseException as error:
        problem = f"{path}{place_of(found)} cannot be made: {told(error)}"
        raise InputError(source, None, key, problem) from None
    _check_made(made, found, path, key, source)
    return made


def _check_made(made: object, found: type, path: str, key: str, source: str) -> None:
    """Refuse an object that lacks what its key asks for. Raises InputError."""
    kind = KINDS.get(key)
    if kind is None:
        return
    missing = [n for n in (*kind.methods, *kind.attributes) if not hasattr(made, n)]
    if missing:
        raise InputError(source, None, key, lacks(path, found, missing))
    for name in kind.methods:
        method = getattr(made, name)
        if not callable(method):
            problem = f"{name} is {what_it_is(method)}, expected a method"
            raise InputError(source, None, key, f"{path}{place_of(found)}: {problem}")


@functools.lru_cache(maxsize=256)
def _told_by_its_methods(found: type) -> type:
    """The class with public methods whose StopIteration or GeneratorExit is a PluginError.

    A coroutine that such an exception passes takes it for an end: Python's own makes a
    RuntimeError of it, a compiled one returns. Methods of emu's own bases stay as they are.
    """
    methods: dict[str, object] = {}
    for one in reversed(found.__mro__):
        if one.__module__.partition(".")[0] == "emu":
            continue
        for name, member in vars(one).items():
            if isinstance(member, FunctionType) and not name.startswith("_"):
                methods[name] = _telling(member)
            elif name in methods:
                del methods[name]  # overridden by something else
    if not methods:
        return found
    same = {"__module__": found.__module__, "__qualname__": found.__qualname__}
    kind: type = type(found)(found.__name__, (found,), {**methods, **same, "__slots__": ()})
    return kind


def _telling(method: FunctionType) -> Callable[..., Any]:
    """A method whose exceptions that no coroutine lets pass are told as a PluginError."""

    @functools.wraps(method)
    def telling(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
            raise PluginError(told(error)) from error

    return telling
