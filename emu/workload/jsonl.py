"""emu's own format, JSON Lines: flat requests and sessions, mixed, in any order of arrival.

A chunk is decoded at once by msgspec and checked in one sweep. Anything that the sweep does not
like sends the chunk line by line through `emu.workload.jsonl`, which finds the first fault and
words it, or accepts the line (unknown fields, blank lines) and warns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.errors import InputError
from emu.process.prepared import prepared
from emu.workload.chunks import Chunk
from emu.workload.items import ID_MAX, TIME_MAX_NS, TOKENS_MAX, Block, Ints, Line, Notes, Turn

# --------------------------------------------------------------------------------------------------
# One JSONL line, field by field: the exact words for what is wrong with it.
#
# Slow on purpose (see `emu.workload.jsonl`); it accepts exactly the lines that obey the format, and
# is the definition of the format. Also used for the strict fields of other JSON formats.

TURN_NAMES: Final = frozenset(Turn.__struct_fields__)
FLAT_NAMES: Final = frozenset(Line.__struct_fields__) - {"sub_requests"}
SESSION_NAMES: Final = frozenset(
    (
        "arrival_time_ns",
        "session_id",
        "tenant",
        "model",
        "priority",
        "acceptance_rate",
        "adapter",
        "sub_requests",
    )
)

if TYPE_CHECKING:
    pass


class Place:
    """Where a value stands, for messages: file, line, and the path within the line."""

    def __init__(self, source: str, line: int, path: str = "") -> None:
        self.source = source
        self.line = line
        self.path = path

    def inside(self, path: str) -> Place:
        """A place further in."""
        return Place(self.source, self.line, self.path + path)

    def error(self, field: str, problem: str) -> InputError:
        """The error for a field at this place."""
        return InputError(self.source, self.line, self.path + field, problem)


def read_line(source: str, number: int, raw: bytes, notes: Notes) -> Line:
    """The line, or InputError. Unknown fields are noted in `notes`, once for each name."""
    place = Place(source, number)
    fields = read_object(place, raw)
    session = "sub_requests" in fields
    _note_unknown(place, fields, SESSION_NAMES if session else FLAT_NAMES, notes)
    line = Line(
        arrival_time_ns=read_int(place, fields, "arrival_time_ns", 0, TIME_MAX_NS),
        session_id=_read_text(place, fields, "session_id"),
        tenant=_read_text(place, fields, "tenant"),
        model=_read_text(place, fields, "model"),
        priority=read_int(place, fields, "priority", -TOKENS_MAX, TOKENS_MAX, 0),
        acceptance_rate=_read_rate(place, fields, "acceptance_rate"),
        adapter=_read_text(place, fields, "adapter"),
    )
    if session:
        line.sub_requests = _read_turns(place, fields["sub_requests"], notes)
    else:
        line.replica = read_int(place, fields, "replica", -1, TOKENS_MAX, -1)
        line.decode_replica = read_int(place, fields, "decode_replica", -1, TOKENS_MAX, -1)
        line.handoff_ns = read_int(place, fields, "handoff_ns", -1, TIME_MAX_NS, -1)
        _read_turn(place, fields, line)
    return line


def read_object(place: Place, raw: bytes) -> dict[str, Any]:
    """A JSON object, or InputError: bad UTF-8, bad JSON, something else."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise place.error("$", f"not valid UTF-8 (byte {error.start})") from None
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise place.error("$", "nested too deeply") from None
    except msgspec.DecodeError as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise place.error("$", f"not valid JSON: {problem[:1].lower()}{problem[1:]}") from None
    if not isinstance(value, dict):
        raise place.error("$", f"must be a JSON object, not {show(value)}")
    repeated = repeated_key(raw)
    if repeated is not None:
        raise place.error(repeated, "is given twice in one object")
    return value


class _Repeated(Exception):
    """A key that an object gives twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _Repeated(name)
    return {}


def repeated_key(raw: bytes) -> str | None:
    """A key that some object of this JSON text gives twice; None if there is none."""
    try:
        json.loads(raw, object_pairs_hook=_once)
    except _Repeated as error:
        return str(error.args[0])
    except (ValueError, RecursionError):  # read by another parser: it has judged the text
        return None
    return None


def may_repeat(data: bytes, names: Iterable[str], needed: Mapping[str, int]) -> bool:
    """True if an object of these lines may give one of these keys twice.

    `needed`: keys that are in every object, and of how many objects. Looks at the bytes between
    braces, where each key may stand once: a key within a string, or one with an escape, is a false
    alarm for `repeated_key` to judge.
    """
    if b"\\" in data:
        return True
    for key in names:
        name = b'"%b"' % key.encode()
        count = data.count(name)
        if count <= 1 or count == needed.get(key):
            continue
        if key in SESSION_NAMES:  # never in a turn, and perhaps behind the turns
            parts = data.split(b"\n")
        else:
            parts = data.replace(b"{", b"\n").replace(b"}", b"\n").split(b"\n")
        if any(part.count(name) > 1 for part in parts):
            return True
    return False


def read_int(
    place: Place,
    fields: dict[str, Any],
    name: str,
    low: int,
    high: int,
    default: int | None = None,
) -> int:
    """An integer of [low, high]; `default` None = the field is required."""
    if name not in fields:
        if default is None:
            raise place.error(name, "required field is missing")
        return default
    return check_int(place, name, fields[name], low, high)


def check_int(place: Place, name: str, value: Any, low: int, high: int) -> int:
    """The value if it is an integer of [low, high]."""
    if type(value) is not int:
        raise place.error(name, f"must be an integer, not {show(value)}")
    if value < low:
        raise place.error(name, f"must be at least {low}, not {value}")
    if value > high:
        raise place.error(name, f"must be at most {high}, not {value}")
    return value


def read_ids(place: Place, fields: dict[str, Any], name: str) -> list[int] | None:
    """A list of ids; absent and null are None."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise place.error(name, f"must be a list of integers, not {show(value)}")
    for index, item in enumerate(value):
        check_int(place, f"{name}[{index}]", item, 0, ID_MAX)
    return value


def show(value: Any) -> str:
    """A value as JSON, cut to fit in a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _note_unknown(
    place: Place, fields: dict[str, Any], known: frozenset[str], notes: Notes
) -> None:
    for name in fields:
        if name not in known:
            note_unknown(notes, name)


def note_unknown(notes: Notes, name: str) -> None:
    """Warn once about a field that is not part of the format."""
    notes.warn(f"unknown field {name!r} is ignored")


def _read_text(place: Place, fields: dict[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise place.error(name, f"must be a string, not {show(value)}")
    return value


def _read_rate(place: Place, fields: dict[str, Any], name: str) -> float:
    """A number of [0, 1]; -1 where it is absent."""
    value = fields.get(name, -1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise place.error(name, f"must be a number, not {show(value)}")
    if value != -1 and not 0 <= value <= 1:
        raise place.error(name, f"must be from 0 to 1, not {show(value)}")
    return float(value)


def _read_turns(place: Place, value: Any, notes: Notes) -> list[Turn]:
    if not isinstance(value, list):
        raise place.error("sub_requests", f"must be a list, not {show(value)}")
    if not value:
        raise place.error("sub_requests", "must have at least one sub-request")
    turns = []
    for index, fields in enumerate(value):
        if not isinstance(fields, dict):
            problem = f"must be a JSON object, not {show(fields)}"
            raise place.error(f"sub_requests[{index}]", problem)
        inner = place.inside(f"sub_requests[{index}].")
        _note_unknown(inner, fields, TURN_NAMES, notes)
        turn = Turn(tool_duration_ns=read_int(inner, fields, "tool_duration_ns", 0, TIME_MAX_NS, 0))
        turn.after = _read_after(inner, fields, index)
        _read_turn(inner, fields, turn)
        turns.append(turn)
    return turns


def _read_after(place: Place, fields: dict[str, Any], index: int) -> list[int] | None:
    after = read_ids(place, fields, "after")
    for position, other in enumerate(after or ()):
        if other >= index:
            problem = f"must be a sub-request before this one ({index}), not {other}"
            raise place.error(f"after[{position}]", problem)
        if other in (after or ())[:position]:
            raise place.error(f"after[{position}]", f"names sub-request {other} twice")
    return after


def _read_turn(place: Place, fields: dict[str, Any], item: Line | Turn) -> None:
    item.input_toks = read_int(place, fields, "input_toks", 1, TOKENS_MAX)
    item.output_toks = read_int(place, fields, "output_toks", 1, TOKENS_MAX)
    item.input_tok_ids = _read_token_ids(place, fields, "input_tok_ids", item.input_toks)
    item.output_tok_ids = _read_token_ids(place, fields, "output_tok_ids", item.output_toks)
    item.tok_id_ranges = _read_ranges(place, fields, item.input_toks + item.output_toks)
    item.hash_block_toks = read_int(place, fields, "hash_block_toks", 1, TOKENS_MAX, 512)
    item.hash_ids = read_ids(place, fields, "hash_ids")
    blocks = -(-item.input_toks // item.hash_block_toks)
    if item.hash_ids is not None and len(item.hash_ids) > blocks:
        problem = f"has {len(item.hash_ids)} ids, but input_toks fills only {blocks} blocks"
        raise place.error("hash_ids", problem)
    item.max_output_toks = read_int(place, fields, "max_output_toks", 0, TOKENS_MAX, 0)
    if 0 < item.max_output_toks < item.output_toks:
        problem = f"must be at least output_toks ({item.output_toks}), not {item.max_output_toks}"
        raise place.error("max_output_toks", problem)
    item.deadline_ns = read_int(place, fields, "deadline_ns", -1, TIME_MAX_NS, -1)
    item.cancel_after_ns = read_int(place, fields, "cancel_after_ns", -1, TIME_MAX_NS, -1)
    item.images = _read_images(place, fields, item.input_toks)


def _read_token_ids(
    place: Place, fields: dict[str, Any], name: str, tokens: int
) -> list[int] | None:
    ids = read_ids(place, fields, name)
    if ids is not None and len(ids) != tokens:
        counted = name.replace("_tok_ids", "_toks")
        raise place.error(name, f"has {len(ids)} ids, but {counted} is {tokens}")
    return ids


def _read_images(
    place: Place, fields: dict[str, Any], tokens: int
) -> list[tuple[int, int, int]] | None:
    value = fields.get("images")
    if value is None:
        return None
    if not isinstance(value, list):
        raise place.error("images", f"must be a list of triples, not {show(value)}")
    images, reached = [], 0
    for index, one in enumerate(value):
        name = f"images[{index}]"
        if not isinstance(one, list) or len(one) != 3:
            problem = f"must be [identity, first token, tokens], not {show(one)}"
            raise place.error(name, problem)
        image = check_int(place, f"{name}[0]", one[0], 0, ID_MAX)
        start = check_int(place, f"{name}[1]", one[1], reached, TOKENS_MAX)
        count = check_int(place, f"{name}[2]", one[2], 1, TOKENS_MAX)
        reached = start + count
        if reached > tokens:
            raise place.error(name, f"ends after token {reached}, but input_toks is {tokens}")
        images.append((image, start, count))
    return images


def _read_ranges(place: Place, fields: dict[str, Any], tokens: int) -> list[tuple[int, int]] | None:
    value = fields.get("tok_id_ranges")
    if value is None:
        return None
    if not isinstance(value, list):
        raise place.error("tok_id_ranges", f"must be a list of pairs, not {show(value)}")
    ranges = []
    for index, pair in enumerate(value):
        name = f"tok_id_ranges[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise place.error(name, f"must be a pair [first id, count], not {show(pair)}")
        count = check_int(place, f"{name}[1]", pair[1], 1, 2 * TOKENS_MAX)
        first = check_int(place, f"{name}[0]", pair[0], 0, ID_MAX - count)
        ranges.append((first, count))
    total = sum(count for _, count in ranges)
    if total != tokens:
        problem = f"covers {total} tokens, but input_toks + output_toks is {tokens}"
        raise place.error("tok_id_ranges", problem)
    for name in ("input_tok_ids", "hash_ids"):
        if fields.get(name) is not None:
            raise place.error(name, "cannot be given together with tok_id_ranges")
    return ranges


# --- emu's own format -----------------------------------------------------------------------------


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
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(prepared(Line))
        self._names = msgspec.json.Decoder(prepared(dict[str, msgspec.Raw]))
        self._turns = msgspec.json.Decoder(prepared(list[dict[str, msgspec.Raw]]))
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
        self._decoder = msgspec.json.Decoder(prepared(_LooseLine))

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
