"""Answers to order: a file that says what calls are answered with.

Each line of the file (`--answers`) is a rule or a recorded conversation:

    {"match": {"contains": "rain"}, "answer": {"tool_calls": [{"name": "look", "arguments": {}}]}}
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}

The first rule that fits a call answers it, unless it has answered `times` calls. A turn of a
conversation answers the call whose messages are all that went before it; ids of tool calls do not
count. A call that nothing fits gets filler. Answers take as many tokens as the tokenizer gives
them, and the emulated time of those.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import Message
from emu.apps.serve.calls import Call, Turn, read_turn
from emu.apps.serve.script import Order, Said
from emu.errors import InputError
from emu.process.prepared import prepared

_ROLES: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table in which every key means something."""


class Match(_Strict, frozen=True):
    """Calls that a rule answers: all of what is given holds."""

    contains: str = ""
    """In the last message."""
    regex: str = ""
    """Found in the last message."""
    text: str | None = None
    """The last message, whole."""
    role: str = ""
    """Of the last message: `tool` after the result of one."""
    model: str = ""
    turn: Annotated[int, Meta(ge=1)] | None = None
    """Number of the answer in its conversation."""


class Called(_Strict, frozen=True):
    """A tool that is called."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, object] | str = {}


class Ordered(_Strict, frozen=True):
    """What is answered."""

    reasoning: str = ""
    text: str = ""
    tool_calls: list[Called] = []
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"] | None = None


class Rule(_Strict, frozen=True):
    """A line that answers calls by what they say."""

    answer: Ordered
    match: Match = Match()
    times: Annotated[int, Meta(ge=1)] | None = None
    """No more calls than this."""


class _Spoken(Struct, kw_only=True):
    """A message of a recorded conversation in OpenAI's form."""

    role: str
    content: str | list[object] | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


class _Share(Struct, rename={"source": "from"}):
    """A message in ShareGPT's form."""

    source: str
    value: str


class _Line(Struct):
    """Any line: which of its kinds it is."""

    messages: list[_Spoken] | None = None
    conversations: list[_Share] | None = None


class _Counted:
    """A rule and how often it has answered."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.regex = re.compile(rule.match.regex, re.DOTALL)
        self.order = _order(rule.answer)
        self.given = 0

    def fits(self, call: Call, last: Turn) -> bool:
        """Whether it answers this call."""
        match = self.rule.match
        if self.rule.times is not None and self.given >= self.rule.times:
            return False
        answers = sum(turn.role == "assistant" for turn in call.turns)
        return (
            match.contains in last.text
            and self.regex.search(last.text) is not None
            and match.text in (None, last.text)
            and match.role in ("", last.role)
            and match.model in ("", call.model)
            and match.turn in (None, answers + 1)
        )


class Answers:
    """All rules and conversations of a file."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises InputError."""
        self._rules: list[_Counted] = []
        self._turns: dict[tuple[Turn, ...], Order] = {}
        if path is not None:
            self._read(path)

    def find(self, call: Call) -> Order | None:
        """The answer to a call; None = filler."""
        if not call.turns:
            return None
        last = call.turns[-1]
        for one in self._rules:
            if one.fits(call, last):
                one.given += 1
                return one.order
        return self._turns.get(call.turns)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise InputError(str(path), None, "--answers", error.strerror or str(error)) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    self._take(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    problem, _, where = str(error).partition(" - at `$")
                    field = where.removesuffix("`").lstrip(".") or "$"
                    raise InputError(str(path), number, field, problem) from None
                except (ApiError, re.error) as error:
                    raise InputError(str(path), number, "match", str(error)) from None

    def _take(self, line: bytes) -> None:
        kind = msgspec.json.decode(line, type=prepared(_Line))
        if kind.messages is not None:
            self._converse(kind.messages)
        elif kind.conversations is not None:
            spoken = kind.conversations
            self._converse(
                [_Spoken(role=_ROLES.get(m.source, m.source), content=m.value) for m in spoken]
            )
        else:
            self._rules.append(_Counted(msgspec.json.decode(line, type=prepared(Rule))))

    def _converse(self, messages: list[_Spoken]) -> None:
        """Each turn of the assistant answers what went before it."""
        before: list[Turn] = []
        for index, message in enumerate(messages):
            plain = Message(message.role, message.content, message.tool_calls)
            turn = read_turn(plain, index)
            if turn.role == "assistant" and before:
                calls = [Said("tool", arguments, name) for name, arguments in turn.calls]
                parts = [Said("reasoning", message.reasoning_content or "")]
                parts += [Said("text", turn.text), *calls]
                self._turns.setdefault(tuple(before), _said(parts))
            before.append(turn)


def _order(answer: Ordered) -> Order:
    parts = [Said("reasoning", answer.reasoning), Said("text", answer.text)]
    for call in answer.tool_calls:
        given = call.arguments
        text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        parts.append(Said("tool", text, call.name))
    return _said(parts, answer.finish_reason or "")


def _said(parts: list[Said], finish: str = "") -> Order:
    """Without the parts that say nothing."""
    kept = [part for part in parts if part.text or part.name]
    return Order(tuple(kept or [Said("text", "")]), finish)
