"""Lines of TOML as the import writes them: a value, and a key with a comment."""

from __future__ import annotations

import json


def toml_value(value: object) -> str:
    """A TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }"
    return str(value)


def toml_line(key: str, value: object, comment: str = "") -> str:
    return f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else "")
