"""The formats of workload files: their names, how each is told by its first bytes, its reader.

for one in formats():
    print(one.name)
source = open_source(Opening(path=Path("trace.csv"), source="trace.csv"), "auto")
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Final, Protocol

import msgspec

from emu.errors import InputError, InputErrors
from emu.workload.formats.csv_dialects import DIALECTS, Dialect, dialect_of, split_header
from emu.workload.formats.csv_named import KEY, named_dialect, unknown_header
from emu.workload.formats.csv_parser import CsvParser
from emu.workload.formats.text_file import CHUNK_BYTES, Chunk, TextFile
from emu.workload.items import Block, Ints, Notes
from emu.workload.source import Opening, Source

_FEW_BYTES: Final = 1 << 16
"""A smaller file is read without numpy, whose import would cost more than the emulation."""


class Format(msgspec.Struct, frozen=True):
    """One format of `workload.format`."""

    name: str
    open: Callable[[Opening, TextFile], Source]


def _open_jsonl(opening: Opening, file: TextFile) -> Source:
    from emu.workload.formats.jsonl import JsonlParser

    return ParsedFile(file, JsonlParser(opening.source))


def _open_mooncake(opening: Opening, file: TextFile) -> Source:
    from emu.workload.formats.mooncake import MooncakeParser

    return ParsedFile(file, MooncakeParser(opening.source))


def _open_sharegpt(opening: Opening, file: TextFile) -> Source:
    from emu.workload.formats.sharegpt import ShareGptSource

    return ShareGptSource(opening, file)


def _open_servegen(opening: Opening, file: TextFile | None = None) -> Source:
    if not opening.path.is_dir():
        raise InputError(opening.source, None, "", "is no folder; ServeGen's clients are one")
    from emu.workload.formats.servegen import ServeGenSource

    return ServeGenSource(opening)


def _open_csv(dialect: Dialect) -> Callable[[Opening, TextFile], Source]:
    def open_csv(opening: Opening, file: TextFile) -> Source:
        header: list[str] | None = split_header(_first_line(file.head()))
        if dialect.default_header and all(c.replace(".", "").isdigit() for c in header or ()):
            header = None
        return _parsed(opening, file, dialect, header)

    return open_csv


def _parsed(
    opening: Opening, file: TextFile, dialect: Dialect, header: list[str] | None
) -> ParsedFile:
    rows = [split_header(line) for line in file.head().split(b"\n", 2)[:2]]
    csv = CsvParser(opening.source, dialect, header, rows[-1 if header is not None else 0])
    csv.takes_few = opening.is_few or file.size_bytes <= _FEW_BYTES
    return ParsedFile(file, csv)


def _open_named(opening: Opening, file: TextFile) -> Source:
    """A CSV table whose columns the user named."""
    lines = file.head().split(b"\n", 2)
    header = split_header(lines[0])
    row = split_header(lines[1]) if len(lines) > 1 else []
    dialect = named_dialect(opening.columns, header, row, opening.source)
    return _parsed(opening, file, dialect, header)


def _open_log(name: str) -> Callable[[Opening, TextFile], Source]:
    def open_log(opening: Opening, file: TextFile) -> Source:
        from emu.workload.logs.log_source import LogSource

        return LogSource(file, name)

    return open_log


_JSONL: Final = Format("jsonl", _open_jsonl)
_MOONCAKE: Final = Format("mooncake", _open_mooncake)
_SHAREGPT: Final = Format("sharegpt", _open_sharegpt)
_SERVEGEN: Final = Format("servegen", _open_servegen)
"""A folder (`emu/workload/formats/servegen.py`)."""
_CSV: Final = {one.name: Format(one.name, _open_csv(one)) for one in DIALECTS}


def formats() -> tuple[Format, ...]:
    """Every format that is read: the one list of their names. Loads the readers of logs."""
    from emu.workload.logs.log_formats import LOG_FORMATS

    logs = [Format(one.name, _open_log(one.name)) for one in LOG_FORMATS]
    return (_JSONL, _MOONCAKE, _SHAREGPT, _SERVEGEN, *_CSV.values(), *logs)


def open_source(opening: Opening, name: str) -> Source:
    """The reader of a file; `name` "auto" looks at the content. A folder is ServeGen's.

    Raises InputError.
    """
    if name == _SERVEGEN.name or (name == "auto" and opening.path.is_dir()):
        return _named(_SERVEGEN, _open_servegen(opening))
    file = TextFile(opening.path, opening.source)
    head = file.head()
    if opening.is_few:
        file.chunk_bytes = _bytes_of(head, opening.limit)
    if not head.strip():
        raise InputError(opening.source, 1, "$", "the file is empty")
    if opening.columns:
        if name not in ("auto", "csv"):
            raise InputError(opening.source, None, KEY, f"names columns of a CSV, not of {name}")
        if head.lstrip()[:1] in (b"[", b"{"):
            raise InputError(opening.source, 1, KEY, "names columns of a CSV; this file is JSON")
        return _named(_CSV["csv"], _open_named(opening, file))
    if name == "auto":
        found = _recognise(head, opening.source)
    else:
        found = _CSV.get(name) or next(one for one in formats() if one.name == name)
    return _named(found, found.open(opening, file))


def _bytes_of(head: bytes, lines: int) -> int:
    """How much to read at once for so many lines, a header and a few that are left out."""
    end = 0
    for _ in range(lines + lines // 16 + 2):
        end = head.find(b"\n", end) + 1
        if not end:
            return _FEW_BYTES
    return end


def _named(found: Format, reader: Source) -> Source:
    reader.name = found.name
    return reader


class Parser(Protocol):
    """Turns a chunk of a text file into a block."""

    is_absolute: bool
    has_arrivals: bool
    prompt_field: str

    def read_models(self) -> None:
        """Requests may name one of several models."""

    def begin(self, notes: Notes) -> None:
        """A pass begins."""

    def how(self) -> tuple[Hashable, ...]:
        """All that its blocks depend on beside the file; empty: they are more than columns."""

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The lines of a chunk; raises InputError at the first wrong one."""


_LAST: Final[dict[tuple[Hashable, ...], tuple[list[Block], Notes]]] = {}
"""The last small file of columns alone, by what its blocks depend on: a plan or a sweep reads the
same one for each of its runs, and reading takes longer than a tenth of some."""
_ERRORS_MAX: Final = 20
"""Lines of a file that are told to be wrong."""


def _halves(chunk: Chunk) -> list[Chunk]:
    """A chunk cut at the end of a line near its middle; none if it is one line."""
    data = chunk.data
    cut = data.rfind(b"\n", 0, len(data) // 2) + 1 or data.find(b"\n", 0, len(data) - 1) + 1
    if not cut:
        return []
    line = chunk.first_line + data.count(b"\n", 0, cut)
    return [
        Chunk(data[:cut], chunk.first_line, chunk.offset),
        Chunk(data[cut:], line, chunk.offset + cut),
    ]


class ParsedFile(Source):
    """A file whose lines are independent of each other."""

    def __init__(self, file: TextFile, parser: Parser) -> None:
        self._file = file
        self._parser = parser
        self.is_absolute = parser.is_absolute
        self.has_arrivals = parser.has_arrivals
        self.prompt_field = parser.prompt_field
        self.is_small = file.size_bytes <= CHUNK_BYTES

    def read_models(self) -> None:
        """Requests may name one of several models."""
        self._parser.read_models()

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All lines, in the order of the file.

        Raises InputError, or InputErrors with the first `_ERRORS_MAX` lines that are wrong.
        """
        self._parser.begin(notes)
        how = self._parser.how()
        if not how or not self.is_small or self._file.chunk_bytes < CHUNK_BYTES:
            yield from self._read(notes)
            return
        key = (self._file.path, self._file.stamp, *how)
        if key not in _LAST:
            own = Notes()
            blocks = list(self._read(own))
            _LAST.clear()
            _LAST[key] = blocks, own
        blocks, own = _LAST[key]
        for reason, count in own.skipped.items():
            notes.skip(reason, count)
        for block in blocks:
            yield block.copy()

    def _read(self, notes: Notes) -> Iterator[Block]:
        chunks = self._file.chunks()
        for chunk in chunks:
            try:
                block = self._parser.parse(chunk, notes)
            except InputError as error:
                raise self._with_others(error, chunk, chunks) from None
            yield block

    def _with_others(self, error: InputError, chunk: Chunk, chunks: Iterator[Chunk]) -> InputError:
        """The errors of all lines of the chunk and of those behind it, if there are several."""
        errors: list[InputError] = []
        for each in chain([chunk], chunks):
            errors += self._errors(each, _ERRORS_MAX + 1 - len(errors))
            if len(errors) > _ERRORS_MAX:
                break
        if len(errors) <= 1:
            return error
        more = f"more lines are wrong from line {errors[-1].line} on"
        return InputErrors(errors[:_ERRORS_MAX], more if len(errors) > _ERRORS_MAX else "")

    def _errors(self, chunk: Chunk, at_most: int) -> list[InputError]:
        """What is wrong in a chunk, line by line, up to so many lines: halves of halves."""
        try:
            self._parser.parse(chunk, Notes())
        except InputError as error:
            halves = _halves(chunk)
            if not halves:
                return [error]
            errors: list[InputError] = []
            for half in halves:
                errors += self._errors(half, at_most - len(errors))
                if len(errors) >= at_most:
                    break
            return errors or [error]
        return []

    def rows_at(self, offsets: Ints) -> Iterator[Block]:
        """The lines at these offsets, in this order (line numbers are then meaningless)."""
        for data in self._file.lines_at(offsets):
            # Line 2: a chunk that starts at line 1 would begin with a header.
            yield self._parser.parse(Chunk(data, 2, 0), Notes())


_OWN_FIELDS: Final = frozenset(("arrival_time_ns", "input_toks", "output_toks", "sub_requests"))


def _first_line(head: bytes) -> bytes:
    return head.split(b"\n", 1)[0]


def _recognise(head: bytes, source: str) -> Format:
    start = head.lstrip()
    if start[:1] in (b"[", b"{"):
        from emu.workload.logs.log_formats import format_of

        own = _OWN_FIELDS if start[:1] == b"{" else ()
        log = format_of(start)
        if log is not None and not any(f'"{field}"'.encode() in start for field in own):
            return Format(log.name, _open_log(log.name))
    if start.startswith(b"["):
        return _SHAREGPT
    if start.startswith(b"{"):
        return _recognise_json(start, source)
    header = _first_line(head)
    dialect = dialect_of(split_header(header))
    if dialect is not None:
        return _CSV[dialect.name]
    if b"," not in header:
        for mark, name in ((b";", "semicolons"), (b"\t", "tabs")):
            if mark in header:
                raise InputError(source, 1, "$", f"columns are separated by {name}, not by commas")
        if head.startswith(b"PAR1"):
            problem = "is Parquet; write its rows as CSV or JSON lines (docs/workloads.md)"
            raise InputError(source, None, "", problem)
        begins = header[:40].decode("utf-8", "replace")
        problem = f"neither JSON lines nor a table with commas: it begins with {begins!r}"
        raise InputError(source, 1, "$", problem)
    raise unknown_header(split_header(header), source)


def _recognise_json(start: bytes, source: str) -> Format:
    try:
        fields = msgspec.json.decode(_first_line(start))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Cut off, malformed, or an object that spans lines.
        if b'"conversations"' in start:
            return _SHAREGPT
        return _MOONCAKE if b'"input_length"' in start.split(b"\n", 1)[0] else _JSONL
    if "conversations" in fields or "conversation" in fields:
        return _SHAREGPT
    if "input_length" in fields and "input_toks" not in fields:
        return _MOONCAKE
    if _OWN_FIELDS.isdisjoint(fields):
        names = ", ".join(list(fields)[:8])
        known = "see docs/workloads.md for the formats that are read"
        raise InputError(
            source, 1, "$", f"format cannot be recognized from the fields {names}; {known}"
        )
    return _JSONL
