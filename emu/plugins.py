"""Classes that a user names by import path (`package.module:Class`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from emu.errors import InputError


def make_plugin(path: str, key: str, *arguments: object, needs: Sequence[str]) -> Any:
    """The object named `package.module:Class`, made from `arguments`; it has what it `needs`.

    Raises InputError (at the config key) if it cannot be imported or made so, or lacks something.
    """
    import inspect  # 10 ms, for those who have a class of their own

    found = load_plugin(path, key)
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        problem = f"{path} cannot be made from ({kinds}): {error}"
        raise InputError("config", None, key, problem) from None
    made = found(*arguments)
    for name in needs:
        if not hasattr(made, name):
            raise InputError("config", None, key, f"{path} has no {name!r}")
    return made


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
