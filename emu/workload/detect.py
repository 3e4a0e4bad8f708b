"""Which format a workload file has, from its first bytes, and the source that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from emu.errors import InputError
from emu.workload.chunks import CHUNK_BYTES, Chunk, TextFile
from emu.workload.csvformats import DIALECTS, CsvParser, Dialect, dialect_of, split_header
from emu.workload.items import Block, Ints, Notes

_FEW_LINES: Final = 1_000
_FEW_BYTES: Final = 1 << 16
"""So little is read without numpy, whose import would cost more than the emulation."""

LOG_FORMATS: Final = (
    *("otel", "litellm", "gateway", "aiperf", "inference-perf", "guidellm", "vllm-bench"),
)
"""Logs and results of real servers (`emu/workload/logs.py`)."""


class Source(Protocol):
    """Where lines come from: a file or a generator. Two passes give the same blocks."""

    name: str
    is_absolute: bool
    """Arrivals are dates; the first becomes 0."""
    has_arrivals: bool
    prompt_field: str
    """How the format calls the prompt's length, for messages."""

    @property
    def is_small(self) -> bool:
        """One block may be kept between the passes."""

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All lines, in order; what is left out is counted in `notes`."""

    def rows_at(self, offsets: Ints) -> Iterator[Block]:
        """The lines at these offsets, in this order."""


class Parser(Protocol):
    """Turns a chunk of a text file into a block."""

    name: str
    is_absolute: bool
    has_arrivals: bool
    prompt_field: str

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The lines of a chunk; raises InputError at the first wrong one."""


class ParsedFile:
    """A file whose lines are independent of each other."""

    def __init__(self, file: TextFile, parser: Parser) -> None:
        self._file = file
        self._parser = parser
        self.name = parser.name
        self.is_absolute = parser.is_absolute
        self.has_arrivals = parser.has_arrivals
        self.prompt_field = parser.prompt_field

    def read_models(self) -> None:
        """Requests may name one of several models."""
        if isinstance(self._parser, CsvParser):
            self._parser.read_models()

    @property
    def is_small(self) -> bool:
        """The whole file is one chunk."""
        return self._file.size_bytes <= CHUNK_BYTES

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All lines, in the order of the file."""
        if isinstance(self._parser, CsvParser):
            self._parser.warn_unknown(notes)
        for chunk in self._file.chunks():
            yield self._parser.parse(chunk, notes)

    def rows_at(self, offsets: Ints) -> Iterator[Block]:
        """The lines at these offsets, in this order (line numbers are then meaningless)."""
        for data in self._file.lines_at(offsets):
            # Line 2: a chunk that starts at line 1 would begin with a header.
            yield self._parser.parse(Chunk(data, 2, 0), Notes())


def open_source(
    path: Path,
    source: str,
    format: str,
    tokenizer: tuple[Path, str] | None,
    seed: int = 0,
    *,
    sessions: bool = False,
    think_s: float = 0.0,
    limit: int = 0,
) -> Source:
    """The reader of a file; `format` "auto" looks at the content. A folder is ServeGen's.

    `source` and the second part of `tokenizer` are the paths as the user wrote them. `seed`: of
    what a model draws. `sessions`, `think_s`: of ShareGPT's conversations. `limit`: lines that are
    used (0 = all), a hint of how much to read at once.
    """
    if path.is_dir() and format in ("auto", "servegen"):
        from emu.workload.published import ServeGenSource

        return ServeGenSource(path, source, seed)
    if format == "servegen":
        raise InputError(source, None, "", "is no folder; ServeGen's clients are one")
    is_few = 0 < limit <= _FEW_LINES
    file = TextFile(path, source, _FEW_BYTES if is_few else CHUNK_BYTES)
    head = file.head()
    if not head.strip():
        raise InputError(source, 1, "$", "the file is empty")
    name = _recognise(head, source) if format == "auto" else format
    if name in LOG_FORMATS:
        from emu.workload.logs import LogSource

        return LogSource(file, name)
    if name == "jsonl":
        from emu.workload.jsonl import JsonlParser

        return ParsedFile(file, JsonlParser(source))
    if name == "mooncake":
        from emu.workload.published import MooncakeParser

        return ParsedFile(file, MooncakeParser(source))
    if name == "sharegpt":
        from emu.workload.published import ShareGptSource  # with the parser of whole JSON files

        return ShareGptSource(file, tokenizer, sessions=sessions, think_s=think_s, seed=seed)
    dialect = next(dialect for dialect in DIALECTS if dialect.name == name)
    csv = CsvParser(source, dialect, _header(head, dialect))
    csv.takes_few = is_few or file.size_bytes <= _FEW_BYTES
    return ParsedFile(file, csv)


def _header(head: bytes, dialect: Dialect) -> list[str] | None:
    header = split_header(_first_line(head))
    if dialect.default_header and all(cell.replace(".", "").isdigit() for cell in header):
        return None
    return header


_OWN_FIELDS: Final = frozenset(("arrival_time_ns", "input_toks", "output_toks", "sub_requests"))


def _first_line(head: bytes) -> bytes:
    return head.split(b"\n", 1)[0]


def _recognise(head: bytes, source: str) -> str:
    start = head.lstrip()
    if start[:1] in (b"[", b"{"):
        from emu.workload.logs import recognise_log

        own = _OWN_FIELDS if start[:1] == b"{" else ()
        name = recognise_log(start)
        if name and not any(f'"{field}"'.encode() in start for field in own):
            return name
    if start.startswith(b"["):
        return "sharegpt"
    if start.startswith(b"{"):
        return _recognise_json(start, source)
    header = _first_line(head)
    dialect = dialect_of(split_header(header))
    if dialect is not None:
        return dialect.name
    if b"," not in header:
        for mark, name in ((b";", "semicolons"), (b"\t", "tabs")):
            if mark in header:
                raise InputError(source, 1, "$", f"columns are separated by {name}, not by commas")
        return "jsonl"
    known = "; set workload.format, or name the columns as docs/workloads.md says"
    raise InputError(source, 1, "$", f"format cannot be recognized from the header{known}")


def _recognise_json(start: bytes, source: str) -> str:
    try:
        fields = msgspec.json.decode(_first_line(start))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Cut off, malformed, or an object that spans lines.
        if b'"conversations"' in start:
            return "sharegpt"
        return "mooncake" if b'"input_length"' in start.split(b"\n", 1)[0] else "jsonl"
    if "conversations" in fields or "conversation" in fields:
        return "sharegpt"
    if "input_length" in fields and "input_toks" not in fields:
        return "mooncake"
    if _OWN_FIELDS.isdisjoint(fields):
        names = ", ".join(list(fields)[:8])
        known = "see docs/workloads.md for the formats that are read"
        raise InputError(
            source, 1, "$", f"format cannot be recognized from the fields {names}; {known}"
        )
    return "jsonl"
