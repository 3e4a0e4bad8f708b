"""Plain values as TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import msgspec


def to_toml(table: Mapping[str, object], prefix: str = "") -> str:
    """A nested mapping as TOML. None is left out."""
    text = scalars_text(table)
    for key, value in table.items():
        name = f"{prefix}{_key(key)}"
        if isinstance(value, Mapping):
            text += f"\n[{name}]\n" + to_toml(value, name + ".")
        elif _is_tables(value):
            for item in value:
                text += f"\n[[{name}]]\n" + to_toml(item, name + ".")
    return text


def _is_tables(value: object) -> TypeGuard[list[Mapping[str, object]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def scalars_text(table: Mapping[str, object]) -> str:
    """Lines of the keys whose values are no tables."""
    return "".join(
        f"{_key(key)} = {_value(value)}\n"
        for key, value in table.items()
        if value is not None and not isinstance(value, Mapping) and not _is_tables(value)
    )


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value)
