"""What an answer says: the text of each of its tokens, where it ends, and why.

Most answers are plain filler, whose pieces follow from where it starts; those have no script. A
script is made for an answer that must obey something: `stop`, a JSON schema, a regular expression,
a choice, a tool call, or that must show log-probabilities. It is made before the request enters,
because the number of its tokens is what the emulated engine has to produce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from emu.apps.serve.regex_filler import text_for
from emu.apps.serve.schema_filler import json_for
from emu.apps.serve.tokenizer import Tokenizer, filler_ids, split_tokens


class ToolCall(Struct, frozen=True):
    """One call of a function."""

    call_id: str
    name: str
    arguments: str


class Constraint(Struct, kw_only=True, frozen=True):
    """What the answer must be; nothing given = free text."""

    schema: object = None
    """A JSON schema, or True for any JSON object."""
    regex: str = ""
    options: tuple[str, ...] = ()
    tool: str = ""
    """Name of the function that is called; `schema` is that of its arguments."""


FREE: Final = Constraint()


class Script(Struct, kw_only=True):
    """The tokens of one answer."""

    pieces: list[str]
    """Text of each token as the model writes it."""
    shown: list[str]
    """Text that each token adds to the answer: held back while it may become a stop string."""
    ids: list[int]
    finish: str
    """"stop", "length" or "tool_calls"; empty = "length" exactly if the limit is reached."""
    stop_reason: str | int | None = None
    tool: ToolCall | None = None
    tool_head: int = 0
    """Tokens before the arguments: the call's name."""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.shown)


def make_script(
    tokenizer: Tokenizer,
    constraint: Constraint,
    *,
    start: int,
    seed: int,
    length: int,
    budget: int,
    call_id: str,
) -> Script:
    """A free answer of `length` tokens, or what the constraint makes it, of at most `budget`.

    Raises CannotFill.
    `start` is the first filler token.
    """
    if constraint is FREE:
        pieces = [tokenizer.pieces[(start + i) % len(tokenizer.pieces)] for i in range(length)]
        ids = [int(i) for i in filler_ids(tokenizer, start, length)]
        return Script(pieces=pieces, shown=list(pieces), ids=ids, finish="")
    tool = None
    head: list[str] = []
    if constraint.tool:
        arguments = json_for(constraint.schema, seed)
        tool = ToolCall(call_id, constraint.tool, arguments)
        head = split_tokens(tokenizer, constraint.tool)
        text = arguments
    elif constraint.options:
        text = constraint.options[seed % len(constraint.options)]
    elif constraint.regex:
        text = text_for(constraint.regex, seed)
    elif constraint.schema is True:
        text = json_for({"type": "object", "properties": {"answer": {"type": "string"}}}, seed)
    else:
        text = json_for(constraint.schema, seed)
    pieces = [*head, *split_tokens(tokenizer, text)] or [""]
    is_whole = len(pieces) <= budget
    pieces = pieces[:budget]
    finish = ("tool_calls" if tool else "stop") if is_whole else "length"
    ids = [_first_id(tokenizer, piece) for piece in pieces]
    script = Script(pieces=pieces, shown=list(pieces), ids=ids, finish=finish, tool=tool)
    if tool is not None:
        script.tool_head = min(len(head), len(pieces))
        cut = "".join(pieces[script.tool_head :])
        script.tool = ToolCall(call_id, tool.name, cut)
    return script


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
    if ends is not None:
        count, cut, reason = ends
        script.pieces, script.ids = script.pieces[:count], script.ids[:count]
        script.finish, script.stop_reason = "stop", reason
        if script.tool is not None:
            arguments = "".join(script.pieces[script.tool_head :])
            script.tool = ToolCall(script.tool.call_id, script.tool.name, arguments)
        text = "".join(script.pieces)
        if isinstance(reason, str):
            text = text[: cut + len(reason)] if keeps_stop else text[:cut]
    else:
        text = "".join(script.pieces)
    hold = 0 if keeps_stop else max((len(stop) for stop in stops), default=1) - 1
    shown, written, given = [], 0, 0
    for piece in script.pieces:
        written += len(piece)
        upto = max(given, min(written - hold, len(text)))
        shown.append(text[given:upto])
        given = upto
    if shown:
        shown[-1] += text[given:]
    script.shown = shown


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
