"""Files that a user names: what cannot be read is one line, not a stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from emu.errors import InputError


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
