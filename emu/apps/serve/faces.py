"""Forms of an answer: how the tokens that an exchange has so far become bytes.

A face keeps what has been sent in `Choice.sent` and decides nothing else.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import filler_text
from emu.apps.serve.world import Choice

DONE = b"data: [DONE]\n\n"


class Face(Protocol):
    """What `Reply` asks for."""

    def whole(self) -> bytes:
        """The answer that is not streamed; everything has ended."""
        ...

    def opening(self) -> bytes:
        """Events before the first token's."""
        ...

    def news(self, after: int) -> bytes:
        """Events of tokens that have not been sent; `after` > 0: no more tokens than that."""
        ...

    def closing(self) -> bytes:
        """Events after the last token's."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """The answer ends in its middle."""
        ...


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(content) + b"\n\n"


def compact(content: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(content, separators=(",", ":")).encode()


def answer_text(service: Service, choice: Choice) -> str:
    """The whole text of an answer."""
    if choice.script is not None:
        return choice.script.text
    return filler_text(service.tokenizer, choice.start, choice.tokens)
