"""What an answer says: the text of each of its tokens, where it ends, and why.

Most answers are plain filler, whose pieces follow from where it starts; those have no script. A
script is made for an answer that must obey something: `stop`, a JSON schema, a regular expression,
a choice, tool calls, an order (`answers.py`), or that must show reasoning or log-probabilities. It
is made before the request enters, because the number of its tokens is what the emulated engine has
to produce.

An answer is a row of parts: reasoning, text, calls of tools. Each token belongs to one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from msgspec import Struct, structs

from emu.apps.serve.regex_filler import text_for
from emu.apps.serve.schema_filler import json_for
from emu.apps.serve.tokenizer import Tokenizer, filler_ids, split_tokens

Kind = Literal["reasoning", "text", "tool"]


class Said(Struct, frozen=True):
    """A part of an answer before it is cut into tokens."""

    kind: Kind
    text: str
    """Or the arguments of the call."""
    name: str = ""
    """Of the tool."""


class Order(Struct, frozen=True):
    """An answer that was given word by word."""

    parts: tuple[Said, ...]
    finish: str = ""
    """As in `Script`; empty = as the parts say."""


class Part(Struct, frozen=True):
    """Tokens of an answer that are of one kind."""

    kind: Kind
    begin: int
    end: int
    head: int = 0
    """Tokens at the begin that name the tool."""
    name: str = ""
    call_id: str = ""


class Constraint(Struct, kw_only=True, frozen=True):
    """What the answer must be; nothing given = free text."""

    schema: object = None
    """A JSON schema, or True for any JSON object."""
    regex: str = ""
    options: tuple[str, ...] = ()
    tools: tuple[tuple[str, object], ...] = ()
    """Functions that are called: names, and schemas of their arguments."""
    sections: tuple[tuple[str, object], ...] = ()
    """Texts, and after each a value of a schema, plain where it is a text; None = no value."""


FREE: Final = Constraint()


class Script(Struct, kw_only=True):
    """The tokens of one answer."""

    pieces: list[str]
    """Text of each token as the model writes it."""
    shown: list[str]
    """Text that each token adds to its part: held back while it may become a stop string."""
    ids: list[int]
    finish: str
    """"stop", "length" or "tool_calls"; empty = "length" exactly if the limit is reached."""
    stop_reason: str | int | None = None
    parts: tuple[Part, ...] = ()
    """All tokens, in order; empty = one text."""

    def text_of(self, part: Part) -> str:
        """What a part says; the arguments of a call."""
        return "".join(self.shown[part.begin + part.head : part.end])

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and calls."""
        if not self.parts:
            return "".join(self.shown)
        return "".join(self.text_of(part) for part in self.parts if part.kind == "text")

    @property
    def reasoning_tokens(self) -> int:
        """Tokens before the answer proper."""
        return sum(part.end - part.begin for part in self.parts if part.kind == "reasoning")


class Room(Struct, frozen=True, kw_only=True):
    """How long an answer may be, and what numbers it."""

    start: int
    """First filler token."""
    seed: int
    length: int
    """Tokens of a free answer."""
    budget: int
    """Most tokens of any."""
    reasoning_tokens: int = 0
    call_id: str = ""


def make_script(
    tokenizer: Tokenizer, constraint: Constraint, room: Room, order: Order | None = None
) -> Script:
    """An answer as ordered, as the constraint makes it, or free. Raises CannotFill."""
    if order is not None:
        return _compose(tokenizer, room, [], order.parts, order.finish)
    thinks = min(room.reasoning_tokens, room.length - 1) if room.reasoning_tokens else 0
    if constraint is FREE:
        script = _filler(tokenizer, room.start, room.length)
        if thinks:
            script.parts = (Part("reasoning", 0, thinks), Part("text", thinks, room.length))
        return script
    said = list(_constrained(constraint, room.seed))
    head = _filler(tokenizer, room.start, thinks).pieces
    return _compose(tokenizer, room, head, said, "")


def _filler(tokenizer: Tokenizer, start: int, length: int) -> Script:
    pieces = [tokenizer.pieces[(start + i) % len(tokenizer.pieces)] for i in range(length)]
    ids = [int(i) for i in filler_ids(tokenizer, start, length)]
    return Script(pieces=pieces, shown=list(pieces), ids=ids, finish="")


def _constrained(constraint: Constraint, seed: int) -> Iterator[Said]:
    """What a constraint asks for."""
    for index, (name, schema) in enumerate(constraint.tools):
        yield Said("tool", json_for(schema, seed + index), name)
    if constraint.tools:
        return
    if constraint.options:
        text = constraint.options[seed % len(constraint.options)]
    elif constraint.regex:
        text = text_for(constraint.regex, seed)
    elif constraint.schema is True:
        text = json_for({"type": "object", "properties": {"answer": {"type": "string"}}}, seed)
    elif constraint.sections:
        text = "".join(before + _plain(schema, seed) for before, schema in constraint.sections)
    else:
        text = json_for(constraint.schema, seed)
    yield Said("text", text)


def _plain(schema: object, seed: int) -> str:
    """A value of a schema as prose has it: a text without quotes; nothing without a schema."""
    if schema is None:
        return ""
    text = json_for(schema, seed)
    value: object = json.loads(text)
    return str(value) if isinstance(value, str | bool) else text


def _compose(
    tokenizer: Tokenizer, room: Room, thinking: list[str], said: Sequence[Said], finish: str
) -> Script:
    """Parts as tokens, cut where the room ends."""
    pieces = list(thinking)
    parts = [Part("reasoning", 0, len(thinking))] if thinking else []
    for one in said:
        head = split_tokens(tokenizer, one.name) if one.kind == "tool" else []
        begin = len(pieces)
        pieces += head
        pieces += split_tokens(tokenizer, one.text)
        if len(pieces) == begin and len(said) > 1:
            continue  # nothing said
        call_id = f"{room.call_id}-{len(parts)}" if one.kind == "tool" else ""
        parts.append(Part(one.kind, begin, len(pieces), len(head), one.name, call_id))
    if not pieces:
        pieces, parts = [""], [Part("text", 0, 1)]
    is_whole = len(pieces) <= room.budget
    pieces = pieces[: room.budget]
    calls = any(part.kind == "tool" for part in parts)
    end = finish or ("tool_calls" if calls else "stop")
    script = Script(
        pieces=pieces,
        shown=[],
        ids=[_first_id(tokenizer, piece) for piece in pieces],
        finish=end if is_whole else "length",
        parts=tuple(parts),
    )
    _show(script, "".join(pieces), 0)
    return script


def _show(script: Script, text: str, hold: int) -> None:
    """Say which text each token adds: the `text` of all, with the last `hold` characters back.

    Nothing is held back beyond its part, and a tool's name is shown with its call.
    """
    count = len(script.pieces)
    script.parts = tuple(
        structs.replace(part, end=min(part.end, count), head=min(part.head, count - part.begin))
        for part in script.parts
        if part.begin < count
    )
    heads = {i for p in script.parts for i in range(p.begin, p.begin + p.head)}
    ends = {part.begin + part.head - 1 for part in script.parts}
    ends |= {part.end - 1 for part in script.parts}
    shown, written, given = [], 0, 0
    for position, piece in enumerate(script.pieces):
        written += len(piece)
        held = 0 if position in ends else hold
        upto = max(given, min(written - held, len(text)))
        shown.append("" if position in heads else text[given:upto])
        given = upto
    if shown:
        shown[-1] += text[given:]
    script.shown = shown


def _first_id(tokenizer: Tokenizer, piece: str) -> int:
    ids: Sequence[int] = tokenizer.encode(piece).tolist() if piece else []
    return int(ids[0]) if len(ids) else 0


def apply_stops(
    script: Script, stops: Sequence[str], *, keeps_stop: bool, stop_ids: Sequence[int], least: int
) -> None:
    """End the answer at the first stop string or stop token; hold back what may become one.

    `least`: `min_tokens`, before which nothing stops.
    """
    ends = _first_stop(script, stops, stop_ids, least)
    text = "".join(script.pieces)
    if ends is not None:
        count, cut, reason = ends
        script.pieces, script.ids = script.pieces[:count], script.ids[:count]
        script.finish, script.stop_reason = "stop", reason
        text = "".join(script.pieces)
        if isinstance(reason, str):
            text = text[: cut + len(reason)] if keeps_stop else text[:cut]
    _show(script, text, 0 if keeps_stop else max((len(s) for s in stops), default=1) - 1)


def _first_stop(
    script: Script, stops: Sequence[str], stop_ids: Sequence[int], least: int
) -> tuple[int, int, str | int] | None:
    """(tokens up to and with the stop, characters before it, which)."""
    text = ""
    for count, (piece, token_id) in enumerate(zip(script.pieces, script.ids, strict=True), 1):
        before = len(text)
        text += piece
        if count < least:
            continue
        if token_id in stop_ids:
            return count, len(text), token_id
        found = [
            (at, stop)
            for stop in stops
            if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, stop = min(found)
            return count, at, stop
    return None
