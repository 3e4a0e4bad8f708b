"""Mooncake traces, JSON Lines: times in ms, lengths, and ids of 512-token prompt blocks.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}`.
The ids feed prefix caching: equal ids at the same place mean equal prefixes. More ids than the
prompt has blocks are cut with a warning; rows without prompt or output are skipped and counted.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from emu.units import NS_PER_MS
from emu.workload.chunks import Chunk, exact_decimal
from emu.workload.items import ID_MAX, TIME_MAX_NS, TOKENS_MAX, Block, Line, Notes
from emu.workload.jsonl import (
    Place,
    may_repeat,
    note_unknown,
    read_ids,
    read_int,
    read_object,
    show,
)

BLOCK_TOKENS: Final = 512
_NAMES: Final = frozenset(("timestamp", "input_length", "output_length", "hash_ids"))
_TIME_MAX_MS: Final = TIME_MAX_NS // NS_PER_MS


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


class _LooseRow(_Row, forbid_unknown_fields=False):
    pass


class MooncakeParser:
    """Turns chunks of a Mooncake file into blocks."""

    name = "mooncake"
    is_absolute = False
    has_arrivals = True
    prompt_field = "input_length"

    def __init__(self, source: str) -> None:
        self._source = source
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Row)
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._is_loose = False

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The rows of a chunk. Raises InputError at the first row that is wrong."""
        data = chunk.data
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        try:
            data.decode()
            rows = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._parse_slowly(chunk, notes)
        needed = dict.fromkeys(("timestamp", "input_length", "output_length"), count)
        if (
            len(rows) != count
            or not all(map(_is_fine, rows))
            or may_repeat(data, _Row.__struct_fields__, needed)
        ):
            return self._parse_slowly(chunk, notes)
        if self._is_loose:
            for fields in self._names.decode_lines(data):
                for name in fields:
                    if name not in _NAMES:
                        note_unknown(notes, name)
        starts = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
        offsets = np.concatenate(([0], starts))[:count] + chunk.offset
        numbers = np.arange(chunk.first_line, chunk.first_line + count, dtype=np.int64)
        return _block(rows, numbers, offsets, notes)

    def _parse_slowly(self, chunk: Chunk, notes: Notes) -> Block:
        rows: list[_Row] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for number, offset, raw in chunk.lines():
            rows.append(_read_row(Place(self._source, number), raw, notes))
            numbers.append(number)
            offsets.append(offset)
        if notes.warnings and not self._is_loose:
            self._is_loose = True
            self._decoder = msgspec.json.Decoder(_LooseRow)
        return _block(rows, np.array(numbers, np.int64), np.array(offsets, np.int64), notes)


def _is_fine(row: _Row) -> bool:
    ids = row.hash_ids
    return (
        type(row.timestamp) is int
        and 0 <= row.timestamp <= _TIME_MAX_MS
        and 0 <= row.input_length <= TOKENS_MAX
        and 0 <= row.output_length <= TOKENS_MAX
        and (not ids or (min(ids) >= 0 and max(ids) <= ID_MAX))
    )


def _read_row(place: Place, raw: bytes, notes: Notes) -> _Row:
    fields = read_object(place, raw)
    for name in fields:
        if name not in _NAMES:
            note_unknown(notes, name)
    if "timestamp" not in fields:
        raise place.error("timestamp", "required field is missing")
    stamp = fields["timestamp"]
    if type(stamp) not in (int, float):
        raise place.error("timestamp", f"must be a number, not {show(stamp)}")
    if not 0 <= stamp <= _TIME_MAX_MS:
        raise place.error(
            "timestamp", f"must be between 0 and {_TIME_MAX_MS} ms, not {show(stamp)}"
        )
    prompt = read_int(place, fields, "input_length", 0, TOKENS_MAX)
    output = read_int(place, fields, "output_length", 0, TOKENS_MAX)
    return _Row(stamp, prompt, output, read_ids(place, fields, "hash_ids"))


def _arrival_ns(stamp: int | float) -> int:
    if isinstance(stamp, int):
        return stamp * NS_PER_MS
    exact = exact_decimal(repr(stamp), 6)
    assert exact is not None
    return exact


def _block(rows: list[_Row], numbers: Any, offsets: Any, notes: Notes) -> Block:
    lines, kept = [], []
    with_ids = False
    for index, row in enumerate(rows):
        if not row.output_length or not row.input_length:
            empty = "input_length" if row.output_length else "output_length"
            notes.skip(f"rows with {empty} 0")
            continue
        ids = row.hash_ids
        if ids and len(ids) > (blocks := -(-row.input_length // BLOCK_TOKENS)):
            notes.warn("hash_ids beyond the prompt's blocks of 512 tokens are ignored")
            ids = ids[:blocks]
        with_ids = with_ids or bool(ids)
        lines.append(
            Line(_arrival_ns(row.timestamp), row.input_length, row.output_length, hash_ids=ids)
        )
        kept.append(index)
    if len(kept) < len(rows):
        numbers, offsets = numbers[kept], offsets[kept]
    return Block(
        np.fromiter((line.arrival_time_ns for line in lines), np.int64, len(lines)),
        np.fromiter((line.input_toks for line in lines), np.int64, len(lines)),
        np.fromiter((line.output_toks for line in lines), np.int64, len(lines)),
        numbers,
        offsets,
        lines if with_ids else None,
    )
