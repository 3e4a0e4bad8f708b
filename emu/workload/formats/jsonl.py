"""emu's own format, JSON Lines: flat requests and sessions, mixed, in any order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final

import msgspec

from emu.process.prepared import prepared
from emu.workload.formats.json_fields import Place
from emu.workload.formats.json_lines import JsonLinesParser
from emu.workload.formats.jsonl_line import FLAT_NAMES, SESSION_NAMES, TURN_NAMES, read_line
from emu.workload.items import (
    ID_MAX,
    TIME_MAX_NS,
    TOKENS_MAX,
    Block,
    Ints,
    Line,
    Notes,
    Turn,
    make_block,
)


class _LooseTurn(Turn, forbid_unknown_fields=False):
    pass


class _LooseLine(Line, forbid_unknown_fields=False):
    sub_requests: list[_LooseTurn] | None = None  # type: ignore[assignment]


_OF_ONE_REQUEST: Final = slice(
    Line.__struct_fields__.index("input_toks"), Line.__struct_fields__.index("session_id")
)
"""The fields of a line that a session gives in its turns."""
_NOTHING: Final = msgspec.structs.astuple(Line())[_OF_ONE_REQUEST]


class JsonlParser(JsonLinesParser[Line]):
    """Turns chunks of a JSONL file into blocks."""

    prompt_field = "input_toks"
    once = (*Line.__struct_fields__, "tool_duration_ns", "after")
    once_in_line = SESSION_NAMES

    def __init__(self, source: str) -> None:
        super().__init__(source, Line, _LooseLine)
        self._turns = msgspec.json.Decoder(prepared(list[dict[str, msgspec.Raw]]))

    def is_fine(self, row: Line) -> bool:
        """Whether a line obeys every rule (else the slow path finds out which it breaks)."""
        return _is_fine(row)

    def needed(self, rows: list[Line]) -> Mapping[str, int]:
        """The time of each line; the lengths of each request."""
        items = sum([1 if row.sub_requests is None else len(row.sub_requests) for row in rows])
        return {"arrival_time_ns": len(rows), "input_toks": items, "output_toks": items}

    def read(self, place: Place, raw: bytes, notes: Notes) -> Line:
        """One line; raises InputError with the words for what is wrong."""
        return read_line(place, raw, notes)

    def unknown(self, fields: Mapping[str, msgspec.Raw]) -> Iterator[str]:
        """Fields of a line and its turns that are no part of the format."""
        session = fields.get("sub_requests")
        known = FLAT_NAMES if session is None else SESSION_NAMES
        yield from (name for name in fields if name not in known)
        for turn in () if session is None else self._turns.decode(session):
            yield from (name for name in turn if name not in TURN_NAMES)

    def block(self, rows: list[Line], numbers: Ints, offsets: Ints, notes: Notes) -> Block:
        """Lines as columns."""
        return make_block(rows, numbers, offsets)


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
    if not turns or msgspec.structs.astuple(line)[_OF_ONE_REQUEST] != _NOTHING:
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
