"""Files: those that a user names (what cannot be read is one line), examples in the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.names import unknown_value
from emu.errors import InputError

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
SCHEMA_DIRECTIVE: Final = "#:schema "
"""The first line of a configuration may say so which schema an editor is to check it by."""


def read_input(path: Path, field: str = "") -> bytes:
    """The bytes of a file. `field`: the key or option that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        raise InputError(str(path), None, field, problem) from None


def json_object(path: Path, line: int | None, text: bytes) -> dict[str, Any]:
    """A JSON object that is a whole file, or a line of one."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), line, "", f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(str(path), line, "", "expected a JSON object")
    return value


def examples() -> list[str]:
    """Names of the examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.toml"))


def example_text(name: str) -> str:
    """An example as it stands in a user's own directory. Raises InputError for other names."""
    if name not in examples():
        raise InputError("init", None, "--example", unknown_value(name, examples()))
    text = (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8")
    if text.startswith(SCHEMA_DIRECTIVE):
        text = text.partition("\n")[2]
    # In the repository examples lie in configs/ and write to runs/ beside it.
    text = re.sub(r'^dir = "(?:\.\./)+', 'dir = "', text, flags=re.MULTILINE)
    text = re.sub(r"(?:python -m )?emu (\w+ )?configs/[\w./-]+\.toml", r"emu \1cluster.toml", text)
    return re.sub(r"configs/(?:experiments/)?([\w-]+)\.toml", r"\1.toml", text)


# --------------------------------------------------------------------------------------------------
# Plain tables as TOML text: just what configurations need.


def toml_text(tables: dict[str, Any]) -> str:
    """Scalars first, then tables and arrays of tables, in order."""
    lines: list[str] = []
    _table(tables, "", lines)
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _table(table: dict[str, Any], prefix: str, lines: list[str]) -> None:
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
