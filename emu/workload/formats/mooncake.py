"""Mooncake traces, JSON Lines: times in ms, lengths, and ids of 512-token prompt blocks.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}`.
The ids feed prefix caching: equal ids at the same place mean equal prefixes. More ids than the
prompt has blocks are cut with a warning; rows without prompt or output are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import numpy as np

from emu.units import NS_PER_MS
from emu.workload.formats.decimals import exact_decimal
from emu.workload.formats.json_fields import (
    Place,
    note_unknown,
    read_ids,
    read_int,
    read_object,
    show,
)
from emu.workload.formats.json_lines import JsonLinesParser
from emu.workload.items import ID_MAX, TIME_MAX_NS, TOKENS_MAX, Block, Ints, Line, Notes

BLOCK_TOKENS: Final = 512
_TIME_MAX_MS: Final = TIME_MAX_NS // NS_PER_MS


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


class _LooseRow(_Row, forbid_unknown_fields=False):
    pass


class MooncakeParser(JsonLinesParser[_Row]):
    """Turns chunks of a Mooncake file into blocks."""

    prompt_field = "input_length"
    once = _Row.__struct_fields__

    def __init__(self, source: str) -> None:
        super().__init__(source, _Row, _LooseRow)

    def is_fine(self, row: _Row) -> bool:
        """Whether a row obeys every rule."""
        ids = row.hash_ids
        return (
            type(row.timestamp) is int
            and 0 <= row.timestamp <= _TIME_MAX_MS
            and 0 <= row.input_length <= TOKENS_MAX
            and 0 <= row.output_length <= TOKENS_MAX
            and (not ids or (min(ids) >= 0 and max(ids) <= ID_MAX))
        )

    def needed(self, rows: list[_Row]) -> Mapping[str, int]:
        """All but the ids, once in each row."""
        return dict.fromkeys(("timestamp", "input_length", "output_length"), len(rows))

    def unknown(self, fields: Mapping[str, object]) -> Iterator[str]:
        """Fields of a row that are no part of the format."""
        return (name for name in fields if name not in self.once)

    def read(self, place: Place, raw: bytes, notes: Notes) -> _Row:
        """One row; raises InputError with the words for what is wrong."""
        fields = read_object(place, raw)
        note_unknown(self.unknown(fields), notes)
        return _read_row(place, fields)

    def block(self, rows: list[_Row], numbers: Ints, offsets: Ints, notes: Notes) -> Block:
        """Rows as columns; those without prompt or output are left out and counted."""
        return _block(rows, numbers, offsets, notes)


def _read_row(place: Place, fields: Mapping[str, object]) -> _Row:
    if "timestamp" not in fields:
        raise place.error("timestamp", "required field is missing")
    stamp = fields["timestamp"]
    if isinstance(stamp, bool) or not isinstance(stamp, int | float):
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


def _block(rows: list[_Row], numbers: Ints, offsets: Ints, notes: Notes) -> Block:
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
