"""Files of JSON Lines, one object a request: the reader that all such formats share.

A chunk is decoded at once by msgspec and checked in one sweep. Anything that the sweep does not
like sends the chunk line by line through the format's own `read`, which finds the first fault and
words it, or accepts the line (unknown fields, blank lines) and warns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from emu.process.prepared import prepared
from emu.workload.formats.json_fields import Place, note_unknown
from emu.workload.formats.text_file import Chunk
from emu.workload.items import Block, Ints, Notes

Row = TypeVar("Row")


class JsonLinesParser(Generic[Row]):
    """Turns chunks into blocks; a format derives from it and says what its rows are."""

    is_absolute = False
    has_arrivals = True
    prompt_field: str
    once: tuple[str, ...]
    """Keys that an object may give once."""
    once_in_line: frozenset[str] = frozenset()
    """Those of them that stand in a line's outermost object alone, perhaps behind others."""

    def __init__(self, source: str, row: type[Row], loose: type[Row]) -> None:
        """`loose`: `row` with unknown fields let through."""
        self._source = source
        self._loose = loose
        self._decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(prepared(row))
        self._names = msgspec.json.Decoder(prepared(dict[str, msgspec.Raw]))
        self._is_loose = False

    def read_models(self) -> None:
        """Lines say which model they ask for anyway."""

    def begin(self, notes: Notes) -> None:
        """A pass begins: nothing to say before its lines are read."""

    def is_fine(self, row: Row) -> bool:
        """Whether a decoded row obeys every rule of the format."""
        raise NotImplementedError

    def needed(self, rows: list[Row]) -> Mapping[str, int]:
        """Keys that are in every object, and of how many objects of these rows."""
        raise NotImplementedError

    def read(self, place: Place, raw: bytes, notes: Notes) -> Row:
        """One line, field by field; raises InputError with the words for what is wrong."""
        raise NotImplementedError

    def unknown(self, fields: Mapping[str, msgspec.Raw]) -> Iterator[str]:
        """Fields of an object that are no part of the format."""
        raise NotImplementedError

    def block(self, rows: list[Row], numbers: Ints, offsets: Ints, notes: Notes) -> Block:
        """Rows as columns."""
        raise NotImplementedError

    def how(self) -> tuple[Hashable, ...]:
        """Its blocks may be more than columns."""
        return ()

    def parse(self, chunk: Chunk, notes: Notes) -> Block:
        """The lines of a chunk. Raises InputError at the first line that is wrong."""
        import numpy as np

        data = chunk.data
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        try:
            data.decode()
            rows = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._parse_slowly(chunk, notes)
        if (
            len(rows) != count
            or not all(map(self.is_fine, rows))
            or self._may_repeat(data, self.needed(rows))
        ):
            return self._parse_slowly(chunk, notes)
        if self._is_loose:
            for fields in self._names.decode_lines(data):
                note_unknown(self.unknown(fields), notes)
        starts = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
        offsets = np.concatenate(([0], starts))[:count] + chunk.offset
        numbers = np.arange(chunk.first_line, chunk.first_line + count, dtype=np.int64)
        return self.block(rows, numbers, offsets, notes)

    def _parse_slowly(self, chunk: Chunk, notes: Notes) -> Block:
        import numpy as np

        rows: list[Row] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for number, offset, raw in chunk.lines():
            rows.append(self.read(Place(self._source, number), raw, notes))
            numbers.append(number)
            offsets.append(offset)
        if notes.warnings and not self._is_loose:
            # The file has unknown fields: later chunks need not fall off the fast path for them.
            self._is_loose = True
            self._decoder = msgspec.json.Decoder(prepared(self._loose))
        return self.block(rows, np.array(numbers, np.int64), np.array(offsets, np.int64), notes)

    def _may_repeat(self, data: bytes, needed: Mapping[str, int]) -> bool:
        """True if an object of these lines may give a key twice.

        Looks at the bytes between braces, where each key may stand once: a key within a string, or
        one with an escape, is a false alarm for `repeated_key` to judge.
        """
        if b"\\" in data:
            return True
        for key in self.once:
            name = b'"%b"' % key.encode()
            count = data.count(name)
            if count <= 1 or count == needed.get(key):
                continue
            if key in self.once_in_line:
                parts = data.split(b"\n")
            else:
                parts = data.replace(b"{", b"\n").replace(b"}", b"\n").split(b"\n")
            if any(part.count(name) > 1 for part in parts):
                return True
        return False
