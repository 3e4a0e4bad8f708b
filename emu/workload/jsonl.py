"""emu's own format, JSON Lines: flat requests and sessions, mixed, in any order of arrival.

A chunk is decoded at once by msgspec and checked in one sweep. Anything that the sweep does not
like sends the chunk line by line through `emu.workload.strict`, which finds the first fault and
words it, or accepts the line (unknown fields, blank lines) and warns.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.workload.chunks import Chunk
from emu.workload.items import ID_MAX, TIME_MAX_NS, TOKENS_MAX, Block, Ints, Line, Notes, Turn
from emu.workload.strict import (
    FLAT_NAMES,
    SESSION_NAMES,
    TURN_NAMES,
    may_repeat,
    note_unknown,
    read_line,
)

if TYPE_CHECKING:
    pass


class _LooseTurn(Turn, forbid_unknown_fields=False):
    pass


class _LooseLine(Line, forbid_unknown_fields=False):
    sub_requests: list[_LooseTurn] | None = None  # type: ignore[assignment]


_FLAT_DEFAULTS: Final = tuple(
    (field.name, field.default)
    for field in msgspec.structs.fields(Line)
    if field.name in TURN_NAMES
)


class JsonlParser:
    """Turns chunks of a JSONL file into blocks."""

    name = "jsonl"
    is_absolute = False
    has_arrivals = True
    prompt_field = "input_toks"

    def __init__(self, source: str) -> None:
        self._source = source
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Line)
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._turns = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
        self._is_loose = False

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The lines of a chunk. Raises InputError at the first line that is wrong."""
        import numpy as np

        data = chunk.data
        rows = data.count(b"\n") + (not data.endswith(b"\n"))
        try:
            data.decode()
            lines = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._parse_slowly(chunk, notes)
        if len(lines) != rows or not all(map(_is_fine, lines)) or _may_repeat(data, lines):
            return self._parse_slowly(chunk, notes)
        if self._is_loose:
            self._note_unknown(data, notes)
        starts = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
        offsets = np.concatenate(([0], starts))[:rows] + chunk.offset
        numbers = np.arange(chunk.first_line, chunk.first_line + rows, dtype=np.int64)
        return make_block(lines, numbers, offsets)

    def _loosen(self) -> None:
        """The file has unknown fields: later chunks need not fall off the fast path for them."""
        self._is_loose = True
        self._decoder = msgspec.json.Decoder(_LooseLine)

    def _note_unknown(self, data: bytes, notes: Notes) -> None:
        unknown: dict[str, None] = {}
        for fields in self._names.decode_lines(data):
            session = fields.get("sub_requests")
            known = FLAT_NAMES if session is None else SESSION_NAMES
            unknown.update((name, None) for name in fields if name not in known)
            if session is not None:
                for turn in self._turns.decode(session):
                    unknown.update((name, None) for name in turn if name not in TURN_NAMES)
        for name in unknown:
            note_unknown(notes, name)

    def _parse_slowly(self, chunk: Chunk, notes: Notes) -> Block:
        import numpy as np

        lines: list[Line] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for number, offset, raw in chunk.lines():
            lines.append(read_line(self._source, number, raw, notes))
            numbers.append(number)
            offsets.append(offset)
        if notes.warnings and not self._is_loose:
            self._loosen()
        return make_block(
            lines, np.array(numbers, dtype=np.int64), np.array(offsets, dtype=np.int64)
        )


def _may_repeat(data: bytes, lines: list[Line]) -> bool:
    items = sum([1 if line.sub_requests is None else len(line.sub_requests) for line in lines])
    needed = {"arrival_time_ns": len(lines), "input_toks": items, "output_toks": items}
    return may_repeat(data, (*Line.__struct_fields__, "tool_duration_ns", "after"), needed)


def make_block(lines: list[Line], numbers: Ints, offsets: Ints) -> Block:
    """Columns of lines; the lines themselves are kept only where the columns do not say all."""
    import numpy as np

    count = len(lines)
    firsts = [line if line.sub_requests is None else line.sub_requests[0] for line in lines]
    return Block(
        np.fromiter((line.arrival_time_ns for line in lines), np.int64, count),
        np.fromiter((first.input_toks for first in firsts), np.int64, count),
        np.fromiter((first.output_toks for first in firsts), np.int64, count),
        numbers,
        offsets,
        None if all(map(_is_plain, lines)) else lines,
    )


def _is_plain(line: Line) -> bool:
    return (
        line.sub_requests is None
        and line.input_tok_ids is None
        and line.hash_ids is None
        and line.tok_id_ranges is None
        and not line.session_id
        and not line.tenant
        and not line.model
        and line.priority == 0
        and line.acceptance_rate < 0
        and not line.adapter
        and not line.images
        and line.max_output_toks == 0
        and line.deadline_ns < 0
        and line.cancel_after_ns < 0
        and line.replica < 0
        and line.handoff_ns < 0
    )


def _is_fine(line: Line) -> bool:
    """Whether a decoded line obeys every rule (else the slow path finds out which it breaks)."""
    if not 0 <= line.arrival_time_ns <= TIME_MAX_NS or abs(line.priority) > TOKENS_MAX:
        return False
    if not all(-1 <= value <= TOKENS_MAX for value in (line.replica, line.decode_replica)):
        return False
    if not -1 <= line.handoff_ns <= TIME_MAX_NS:
        return False
    if line.acceptance_rate != -1 and not 0 <= line.acceptance_rate <= 1:
        return False
    turns = line.sub_requests
    if turns is None:
        return _is_fine_turn(line)
    if not turns or any(getattr(line, name) != plain for name, plain in _FLAT_DEFAULTS):
        return False
    if any(t.after for t in turns) and not all(map(_waits_for_earlier, turns, count())):
        return False
    return all(0 <= t.tool_duration_ns <= TIME_MAX_NS and _is_fine_turn(t) for t in turns)


def _waits_for_earlier(turn: Turn, index: int) -> bool:
    after = turn.after or []
    return len(set(after)) == len(after) and all(0 <= other < index for other in after)


def _is_fine_turn(item: Line | Turn) -> bool:
    prompt, output = item.input_toks, item.output_toks
    if not (0 < prompt <= TOKENS_MAX and 0 < output <= TOKENS_MAX):
        return False
    ids = item.input_tok_ids
    if ids is not None and (len(ids) != prompt or min(ids) < 0 or max(ids) > ID_MAX):
        return False
    ids = item.output_tok_ids
    if ids is not None and (len(ids) != output or min(ids) < 0 or max(ids) > ID_MAX):
        return False
    if not (-1 <= item.deadline_ns <= TIME_MAX_NS and -1 <= item.cancel_after_ns <= TIME_MAX_NS):
        return False
    if not 1 <= item.hash_block_toks <= TOKENS_MAX:
        return False
    if item.hash_ids is not None and not _has_fine_hashes(item, item.hash_ids):
        return False
    if item.images is not None and not _has_fine_images(item, item.images):
        return False
    if item.tok_id_ranges is not None and not _has_fine_ranges(item, item.tok_id_ranges):
        return False
    return item.max_output_toks == 0 or output <= item.max_output_toks <= TOKENS_MAX


def _has_fine_hashes(item: Line | Turn, hashes: list[int]) -> bool:
    if len(hashes) > -(-item.input_toks // item.hash_block_toks):
        return False
    return not hashes or (min(hashes) >= 0 and max(hashes) <= ID_MAX)


def _has_fine_images(item: Line | Turn, images: list[tuple[int, int, int]]) -> bool:
    reached = 0
    for image, start, tokens in images:
        if not 0 <= image <= ID_MAX or start < reached or tokens < 1:
            return False
        reached = start + tokens
    return reached <= item.input_toks


def _has_fine_ranges(item: Line | Turn, ranges: list[tuple[int, int]]) -> bool:
    if item.input_tok_ids is not None or item.hash_ids is not None:
        return False
    if sum(count for _, count in ranges) != item.input_toks + item.output_toks:
        return False
    return all(
        0 <= first <= ID_MAX - count and 0 < count <= 2 * TOKENS_MAX for first, count in ranges
    )
