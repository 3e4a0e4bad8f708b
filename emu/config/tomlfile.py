"""TOML files of users: text and tables, every problem one line with its place.

    text, tables = read_toml("cluster.toml", "cluster.toml")
    tables = parse_toml(text, "cluster.toml")

What tables mean is not known here; where a key stands in the text `places.py` says.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path as FilePath
from typing import Final

from emu.config import input_files
from emu.config.tables import PARTS_MAX
from emu.documents import Document
from emu.errors import InputError

_BYTES_MAX: Final = 1 << 26
"""Of a file."""
_STRING_OR_COMMENT = (
    r'"""(?:\\.|[^\\])*?"""|' + r"'''.*?'''" + r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'|#[^\n]*"
)
_LONG_KEY = rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{PARTS_MAX}}}"
_SYNTAX_PLACE = r" \(at (?:line (\d+), column (\d+)|end of document)\)$"
_KEY_TUPLE = r"\(('[^)]*?),?\)"


def read_toml(path: str | FilePath, source: str) -> tuple[str, Document]:
    """The text of a file, and what it says. `source` names it in errors. Raises InputError."""
    text = _read_text(FilePath(path), source)
    return text, parse_toml(text, source)


def _read_text(path: FilePath, source: str) -> str:
    try:
        data = input_files.read_file(path, _BYTES_MAX)
    except FileNotFoundError:
        raise InputError(source, None, "", "no such file") from None
    except IsADirectoryError:
        raise InputError(source, None, "", "is a directory, expected a TOML file") from None
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {input_files.reason(error)}"
        raise InputError(source, None, "", problem) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Offsets count from behind a byte order mark, if there is one.
        skipped = 3 if data.startswith(b"\xef\xbb\xbf") else 0
        at = error.start + skipped
        line = data.count(b"\n", 0, at) + 1
        problem = f"not valid UTF-8 (byte 0x{data[at]:02x}): save it as UTF-8"
        raise InputError(source, line, "", problem) from None


def _deepest_line(text: str) -> int:
    """The line with the most brackets that open."""
    lines = text.splitlines() or [""]
    return 1 + max(range(len(lines)), key=lambda at: lines[at].count("[") + lines[at].count("{"))


def _refuse_long_keys(text: str, source: str) -> None:
    """A dotted key of thousands of parts would take seconds and gigabytes to read."""
    if all(line.count(".") < PARTS_MAX for line in text.split("\n")):
        return

    def blank(match: re.Match[str]) -> str:
        """What may stand in place of a string (which may be part of a key) or a comment."""
        found = match.group()
        return "" if found.startswith("#") else "s" + "\n" * found.count("\n")

    bare = re.sub(_STRING_OR_COMMENT, blank, text, flags=re.DOTALL)
    found = re.search(_LONG_KEY, bare)
    if found is not None:
        line = bare.count("\n", 0, found.start()) + 1
        raise InputError(source, line, "", f"a key of more than {PARTS_MAX} parts")


def parse_toml(text: str, source: str) -> Document:
    """What a text says. `source` names it in errors. Raises InputError."""
    _refuse_long_keys(text, source)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(str(error), text, source) from None
    except RecursionError:
        raise InputError(source, _deepest_line(text), "", "nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise InputError(source, _culprit_line(text), "", f"not valid TOML: {error}") from None


def _syntax_error(message: str, text: str, source: str) -> InputError:
    match = re.search(_SYNTAX_PLACE, message)
    line: int | None = None
    field = ""
    if match is not None:
        message = message[: match.start()]
        if match.group(1):
            line, field = int(match.group(1)), f"column {match.group(2)}"
        else:
            line, field = max(1, len(text.splitlines())), "end of file"
    message = re.sub(
        _KEY_TUPLE, lambda m: m.group(1).replace("', '", ".").replace("'", ""), message
    )
    from emu.config.ways_out import instead_of_toml  # only after a mistake

    return InputError(source, line, field, f"not valid TOML: {message}{instead_of_toml(source)}")


def _culprit_line(text: str) -> int | None:
    """First line on which the text stops being readable, for errors that name no place."""
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            tomllib.loads(line)
        except tomllib.TOMLDecodeError:
            continue  # a piece of something longer
        except ValueError:
            return number
    return None
