"""Forms of an answer: how the tokens that an exchange has so far become bytes.

The model of all of them is the same. An answer opens, each of its tokens is one `Token`, it closes
or breaks off; an answer that is not streamed is written whole. A face says how each of these reads
in its interface, keeps what has been sent in `Choice.sent`, and decides nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.calls import Call
from emu.apps.serve.choices import Choice, Exchange
from emu.apps.serve.pace import AnswerPace
from emu.apps.serve.script import Part
from emu.apps.serve.service import Service
from emu.apps.serve.stencils import Stencil
from emu.apps.serve.tokenizer import filler_text

DONE = b"data: [DONE]\n\n"


class Token(NamedTuple):
    """One token of an answer, as a stream shows it."""

    position: int
    text: str
    """What it adds to its part: to reasoning, text, or the arguments of a call."""
    is_last: bool


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(content) + b"\n\n"


def named_event(kind: str, content: Mapping[str, object]) -> bytes:
    """The same, with its kind as its name and as the first key of its content."""
    return f"event: {kind}\n".encode() + event({"type": kind, **content})


def compact(content: object) -> bytes:
    """JSON without spaces."""
    return _compact(content).encode()


_compact: Final = json.JSONEncoder(separators=(",", ":")).encode


class Face:
    """One form of the answer to a call, and what all forms need."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        self.service = service
        self.call = call
        self.exchange = exchange
        self.created_s = int(time.time())
        self.answer_id = ""
        self.extra: dict[str, object] = {}
        """Further keys of a whole answer."""

    @property
    def model(self) -> str:
        """The model's name, as the client gave it."""
        return self.call.model or self.service.model

    def text_of(self, choice: Choice) -> str:
        """The whole text of an answer."""
        if choice.script is not None:
            return choice.script.text
        return filler_text(self.service.tokenizer, choice.start, choice.tokens)

    @staticmethod
    def parts_of(choice: Choice) -> tuple[Part, ...]:
        """Parts of an answer, in order."""
        if choice.script is not None and choice.script.parts:
            return choice.script.parts
        return (Part("text", 0, choice.tokens),)

    def said(self, choice: Choice, part: Part) -> str:
        """What a part of an answer says."""
        if choice.script is None or not choice.script.parts:
            return self.text_of(choice)
        return choice.script.text_of(part)

    def unsent(self, choice: Choice, after: int) -> Iterator[Token]:
        """Tokens that are there and have not been sent; each counts as sent when it is taken.

        `after` > 0: no more tokens of the answer than that.
        """
        script, pieces = choice.script, self.service.tokenizer.pieces
        end = choice.produced if after == 0 else min(choice.produced, after)
        last = choice.tokens - 1
        while choice.sent < end:
            position = choice.sent
            choice.sent += 1
            if script is None:
                text = pieces[(choice.start + position) % len(pieces)]
            else:
                text = script.shown[position]
            yield Token(position, text, position >= last)

    def whole(self) -> bytes:
        """The answer that is not streamed; everything has ended."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Events before the first token's."""
        return b""

    def news(self, after: int) -> bytes:
        """Events of the tokens that `unsent` gives: those with a number above `after`."""
        raise NotImplementedError

    @property
    def stencil(self) -> Stencil | None:
        """What all further events are made by, where that is so simple; None = `news` knows."""
        return None

    def closing(self, pace: AnswerPace) -> bytes:
        """Events after the last token's; `pace`: how late the answer was."""
        return DONE

    def broken(self, error: ApiError) -> bytes:
        """The answer ends in its middle, and has no end."""
        return event(error.body)


class SoloFace(Face):
    """A form in which a call has one answer, and each of its tokens is one event."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        self.choice = exchange.choices[0]

        self.parts = self.parts_of(self.choice)
        self._at = -1
        """Index of the part that the stream is in."""

    @property
    def text(self) -> str:
        """The whole text."""
        return self.text_of(self.choice)

    def news(self, after: int) -> bytes:
        """The events of each token that has not been sent, with those of parts that it begins."""
        return b"".join(self._events(token) for token in self.unsent(self.choice, after))

    def _events(self, token: Token) -> bytes:
        begun = b""
        while self._at < 0 or token.position >= self.parts[self._at].end:
            if self._at + 1 == len(self.parts):
                break
            if self._at >= 0:
                begun += self.part_ends(self._at)
            self._at += 1
            begun += self.part_begins(self._at)
        return begun + self.delta(self._at, token)

    def last_part_ends(self) -> bytes:
        """Before the answer closes."""
        return self.part_ends(self._at) if self._at >= 0 else b""

    def part_begins(self, index: int) -> bytes:
        """Events before the first token of a part."""
        return b""

    def part_ends(self, index: int) -> bytes:
        """Events after its last one."""
        return b""

    def delta(self, index: int, token: Token) -> bytes:
        """The event of a token of a part."""
        raise NotImplementedError


FaceMaker = Callable[[Service, Call, Exchange], Face]
