"""Files that a user names: what cannot be read is one line, not a stack."""

from __future__ import annotations

from pathlib import Path

from emu.errors import InputError


def read_input(path: Path, field: str = "") -> bytes:
    """The bytes of a file. `field`: the key or option that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        raise InputError(str(path), None, field, problem) from None
