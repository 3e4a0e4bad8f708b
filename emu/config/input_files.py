"""Files that a user names: what cannot be read is one line; examples in the package."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from emu.config.suggestions import unknown_value
from emu.documents import Document
from emu.errors import InputError

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"


SCHEMA_DIRECTIVE: Final = "#:schema "
"""The first line of a configuration may say so which schema an editor is to check it by."""


_PIECE_BYTES: Final = 1 << 16
"""Read at once of a file that does not tell its size: memory for so much is taken at each read."""
INPUT_BYTES_MAX: Final = 1 << 32
"""What is read into memory as a whole."""


def read_input(path: Path, field: str = "") -> bytes:
    """The bytes of a file. `field`: the key or option that names it."""
    try:
        return read_file(path, INPUT_BYTES_MAX)
    except (OSError, ValueError) as error:
        raise InputError(str(path), None, field, reason(error)) from None


def reason(error: OSError | ValueError) -> str:
    """Why a file could not be read: in the words of the operating system, if it has some."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_file(path: Path, bytes_max: int) -> bytes:
    """The bytes of a regular file. Raises OSError, or ValueError for what is none or too large."""
    problem = no_file(path)
    if problem:
        raise ValueError(problem)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size) if 0 < size <= bytes_max else b""
        more = b"" if size > bytes_max else file.read(_PIECE_BYTES)
        while more and len(data) <= bytes_max:  # some of /proc tell no size, a log grows
            data += more
            more = file.read(_PIECE_BYTES)
    if size > bytes_max or len(data) > bytes_max:
        raise ValueError(f"is larger than {bytes_max >> 20} MiB")
    return data


def no_file(path: Path) -> str:
    """Why a path that is there is not a regular file: a device has no end, a pipe may have none.

    Empty for files, and for directories, which opening refuses. Raises OSError.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    is_pipe, is_socket = stat.S_ISFIFO(mode), stat.S_ISSOCK(mode)
    kind = "pipe" if is_pipe else "socket" if is_socket else "device"
    return f"is a {kind}, expected a regular file"


def json_object(path: Path, line: int | None, text: bytes) -> Document:
    """A JSON object that is a whole file, or a line of one."""
    import msgspec  # the parser of commands needs words alone

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
