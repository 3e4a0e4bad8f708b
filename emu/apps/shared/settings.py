"""Overrides as a command line has them, read as values."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from emu.errors import InputError


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as values. Raises InputError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError("--set", None, text, "expected KEY=VALUE")
        try:
            settings[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            settings[key.strip()] = value.strip()
    return settings
