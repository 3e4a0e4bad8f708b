"""Classes that a user names by import path (`package.module:Class`)."""

from __future__ import annotations

import importlib
from typing import Any

from emu.errors import InputError


def load_plugin(path: str, key: str) -> Any:
    """The object named `package.module:Name`. Raises InputError (at the config key) if it fails."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise InputError(
            "config", None, key, f"unknown name {path!r}; or give package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError("config", None, key, f"cannot import {module_name!r}: {error}") from None
    if not hasattr(module, name):
        raise InputError("config", None, key, f"module {module_name!r} has no {name!r}")
    return getattr(module, name)
