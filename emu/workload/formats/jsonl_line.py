"""One line of emu's JSONL, field by field: the exact words for what is wrong with it.

Slow on purpose (see `emu/workload/formats/json_lines.py`); it accepts exactly the lines that obey
the format, and is the definition of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from emu.workload.formats.json_fields import (
    Place,
    check_int,
    note_unknown,
    read_ids,
    read_int,
    read_object,
    show,
)
from emu.workload.items import ID_MAX, TIME_MAX_NS, TOKENS_MAX, Line, Notes, Turn

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


def read_line(place: Place, raw: bytes, notes: Notes) -> Line:
    """The line, or InputError. Unknown fields are noted in `notes`, once for each name."""
    fields = read_object(place, raw)
    session = "sub_requests" in fields
    known = SESSION_NAMES if session else FLAT_NAMES
    note_unknown((name for name in fields if name not in known), notes)
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


def _read_text(place: Place, fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise place.error(name, f"must be a string, not {show(value)}")
    return value


def _read_rate(place: Place, fields: Mapping[str, object], name: str) -> float:
    """A number of [0, 1]; -1 where it is absent."""
    value = fields.get(name, -1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise place.error(name, f"must be a number, not {show(value)}")
    if value != -1 and not 0 <= value <= 1:
        raise place.error(name, f"must be from 0 to 1, not {show(value)}")
    return float(value)


def _read_turns(place: Place, value: object, notes: Notes) -> list[Turn]:
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
        note_unknown((name for name in fields if name not in TURN_NAMES), notes)
        turn = Turn(tool_duration_ns=read_int(inner, fields, "tool_duration_ns", 0, TIME_MAX_NS, 0))
        turn.after = _read_after(inner, fields, index)
        _read_turn(inner, fields, turn)
        turns.append(turn)
    return turns


def _read_after(place: Place, fields: Mapping[str, object], index: int) -> list[int] | None:
    after = read_ids(place, fields, "after")
    for position, other in enumerate(after or ()):
        if other >= index:
            problem = f"must be a sub-request before this one ({index}), not {other}"
            raise place.error(f"after[{position}]", problem)
        if other in (after or ())[:position]:
            raise place.error(f"after[{position}]", f"names sub-request {other} twice")
    return after


def _read_turn(place: Place, fields: Mapping[str, object], item: Line | Turn) -> None:
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
    place: Place, fields: Mapping[str, object], name: str, tokens: int
) -> list[int] | None:
    ids = read_ids(place, fields, name)
    if ids is not None and len(ids) != tokens:
        counted = name.replace("_tok_ids", "_toks")
        raise place.error(name, f"has {len(ids)} ids, but {counted} is {tokens}")
    return ids


def _read_images(
    place: Place, fields: Mapping[str, object], tokens: int
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


def _read_ranges(
    place: Place, fields: Mapping[str, object], tokens: int
) -> list[tuple[int, int]] | None:
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
