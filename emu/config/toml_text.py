"""Plain tables as TOML text: just what configurations need."""

from __future__ import annotations

from typing import Any

from emu.documents import Document


def toml_text(tables: Document) -> str:
    """Scalars first, then tables and arrays of tables, in order."""
    lines: list[str] = []
    _table(tables, "", lines)
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import json

        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _table(table: Document, prefix: str, lines: list[str]) -> None:
    for key, value in table.items():
        if value is not None and not isinstance(value, dict) and not _is_tables(value):
            lines.append(f"{key} = {_value(value)}")
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            _table(value, f"{name}.", lines)
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{name}]]"]
                _table(item, f"{name}.", lines)
