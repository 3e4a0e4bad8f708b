"""Where a key stands in a TOML text, and errors that are given the line of their key.

`tomllib` forgets positions, so a scanner walks the text once more. It runs only after `tomllib` has
accepted the text and only when an error must be shown, so it may be lenient: it knows headers,
arrays of tables, dotted and quoted keys, inline tables, arrays and all four kinds of strings, and
reads values no further than it must to find their end.

Types and bounds are checked while the text is at hand (`load.py`). A model that the catalogue does
not know, a GPU too small for the weights or a degree that does not divide come out later, from code
that knows a key and no text: `placing` reads the file once more.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath

from emu.config.tables import Path
from emu.errors import InputError

# Compiled when they are first used: most runs are without error.
_BARE_KEY = r"[A-Za-z0-9_-]+"
_BLANK = r"[ \t]*"
_BLANK_LINES = r"(?:[ \t\r\n]+|#[^\n]*)*"
_ATOM = r"[^,\]\}\n#]*"


def locate(text: str) -> dict[Path, int]:
    """Line (1-based) of every key, table and array element of a valid TOML text."""
    return _Scanner(text).run()


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Line of a path, or of its nearest enclosing table that the text has."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.lines: dict[Path, int] = {}
        self.last_index: dict[Path, int] = {}
        self.newlines = [match.start() for match in re.finditer("\n", text)]

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while True:
            self._skip(_BLANK_LINES)
            if self.pos >= len(self.text):
                return self.lines
            if self.text[self.pos] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip_line()

    def _header(self) -> Path:
        array = self.text.startswith("[[", self.pos)
        at = self.pos
        self.pos += 2 if array else 1
        keys = self._keys()
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            last = position == len(keys) - 1
            if array and last:
                self.last_index[path] = self.last_index.get(path, -1) + 1
            self._note(path, at)
            if path in self.last_index:
                path = (*path, self.last_index[path])
                self._note(path, at)
        return path

    def _pair(self, table: Path) -> None:
        at = self.pos
        path = table
        for key in self._keys():
            path = (*path, key)
            self._note(path, at)
        self._skip(_BLANK)
        self.pos += 1  # the equals sign
        self._value(path)

    def _value(self, path: Path) -> None:
        self._skip(_BLANK)
        char = self.text[self.pos : self.pos + 1]
        if char in {'"', "'"}:
            self._string()
        elif char == "[":
            self._items(path, "]")
        elif char == "{":
            self._items(path, "}")
        else:
            self._skip(_ATOM)

    def _items(self, path: Path, end: str) -> None:
        self.pos += 1
        index = 0
        while True:
            self._skip(_BLANK_LINES)
            if self.pos >= len(self.text):
                return
            if self.text[self.pos] == end:
                self.pos += 1
                return
            if self.text[self.pos] == ",":
                self.pos += 1
                continue
            before = self.pos
            if end == "]":
                self._note((*path, index), self.pos)
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
            if self.pos == before:
                self.pos += 1

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            if self.text[self.pos : self.pos + 1] in {'"', "'"}:
                keys.append(self._quoted_key())
            else:
                match = re.compile(_BARE_KEY).match(self.text, self.pos)
                if match is None:
                    return keys
                keys.append(match.group())
                self.pos = match.end()
            self._skip(_BLANK)
            if self.text[self.pos : self.pos + 1] != ".":
                return keys
            self.pos += 1

    def _quoted_key(self) -> str:
        quote, inner = self.text[self.pos], self._string()
        if quote == '"' and "\\" in inner:
            (inner,) = tomllib.loads(f'"{inner}" = 0')
        return inner

    def _string(self) -> str:
        """Skip a string of any kind; the text between its quotes, escapes left as they are."""
        quote = self.text[self.pos]
        long = self.text.startswith(quote * 3, self.pos)
        mark = quote * 3 if long else quote
        start = self.pos = self.pos + len(mark)
        while self.pos < len(self.text) and not self.text.startswith(mark, self.pos):
            self.pos += 2 if quote == '"' and self.text[self.pos] == "\\" else 1
        inner = self.text[start : self.pos]
        self.pos += len(mark)
        while long and self.text[self.pos : self.pos + 1] == quote:  # """a"""" ends in a quote
            self.pos += 1
        return inner

    def _skip(self, pattern: str) -> None:
        match = re.compile(pattern).match(self.text, self.pos)
        if match is not None:
            self.pos = match.end()

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.pos)
        self.pos = len(self.text) if end < 0 else end

    def _note(self, path: Path, at: int) -> None:
        self.lines.setdefault(path, bisect.bisect_left(self.newlines, at) + 1)


_UNPLACED = "config"
"""Source of errors whose place does not know its file."""


@contextlib.contextmanager
def placing(source: str) -> Iterator[None]:
    """Errors about keys of the configuration file `source` get its name and the key's line."""
    try:
        yield
    except InputError as error:
        placed = placed_in(error, source)
        if placed is None:
            raise
        raise placed from error


@contextlib.contextmanager
def blaming(overrides: Sequence[str]) -> Iterator[None]:
    """Errors about keys that `--set` gave name no line: the file's is not to blame."""
    try:
        yield
    except InputError as error:
        for override in overrides:
            key = override.partition("=")[0].strip()
            if error.field == key or error.field.startswith(f"{key}."):
                raise InputError(error.source, None, error.field, error.problem) from error
        raise


def placed_in(error: InputError, source: str) -> InputError | None:
    """The error with its place in `source`; None if it has one, or is about another file."""
    named, colon, table = error.source.partition(": ")
    is_ours = named == source or error.source == _UNPLACED
    if error.line is not None or not is_ours:
        return None
    field = error.field
    if colon and named == source:  # `cluster.toml: replicas.0`, then what is wrong with it
        field = ": ".join(part for part in (table, field) if part)
    line = line_of_field(FilePath(source), (table if colon else "") or field)
    if line is None and error.source == source:
        return None
    return InputError(source, line, field, error.problem)


def line_of_field(file: FilePath, field: str) -> int | None:
    """Line of a dotted key in a TOML file, or of the nearest table around it.

    A key of an array of tables without an index is looked for in all of them.
    """
    try:
        lines = locate(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    path: Path = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    if len(path) > 1 and (path[0], 0) in lines and not isinstance(path[1], int):
        index = 0
        while (path[0], index) in lines:
            if (path[0], index, *path[1:]) in lines:
                return lines[(path[0], index, *path[1:])]
            index += 1
    for own in (path, _shared(path)):
        if own and own in lines:
            return lines[own]
    return line_of(lines, path)


def _shared(path: Path) -> Path:
    """`replicas.0.scheduler.x` stands in `scheduler.x` where the group does not say it."""
    is_of_group = path[:1] == ("replicas",) and len(path) > 3
    return path[2:] if is_of_group else ()
