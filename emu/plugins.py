"""Classes that a user names by import path (`package.module:Class`)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from emu.errors import InputError


def make_plugin(
    path: str,
    key: str,
    *arguments: object,
    needs: Sequence[str] = (),
    base: type[Any] | None = None,
) -> Any:
    """The object named `package.module:Class`, made from `arguments`; it has what it `needs`.

    `base`: the class that it derives from, or whose public members it has all.
    Raises InputError (at the config key) if it cannot be imported or made so, or lacks something.
    """
    import inspect  # 10 ms, for those who have a class of their own

    found = load_plugin(path, key)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise InputError("config", None, key, _lacks(path, found, missing))
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        problem = f"{path} cannot be made from ({kinds}): {error}"
        raise InputError("config", None, key, problem) from None
    made = found(*arguments)
    wanted = list(needs)
    if base is not None and not isinstance(made, base):
        wanted += [name for name in dir(base) if not name.startswith("_")]
    missing = [name for name in wanted if not hasattr(made, name)]
    if missing:
        problem = _lacks(path, found, missing)
        hint = "" if base is None else f"; derive it from {base.__module__}.{base.__name__}"
        raise InputError("config", None, key, problem + hint)
    return made


def _lacks(path: str, found: Any, missing: Sequence[str]) -> str:
    """What a class has not, and where it stands."""
    module = sys.modules.get(getattr(found, "__module__", ""))
    file = getattr(module, "__file__", None)
    place = f" ({file})" if file else ""
    return f"{path}{place} lacks {', '.join(missing)}"


def load_plugin(path: str, key: str, source: str = "config") -> Any:
    """The object named `package.module:Name`. Raises InputError (at the config key) if it fails."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise InputError(source, None, key, f"unknown name {path!r}; or give package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:  # also of ":Name" and ".module:Name"
        raise InputError(source, None, key, f"cannot import {module_name!r}: {error}") from None
    if not hasattr(module, name):
        raise InputError(source, None, key, f"module {module_name!r} has no {name!r}")
    return getattr(module, name)
