"""The form of answers of Anthropic's `/v1/messages`, whole and as events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from emu.apps.serve.anthropic_messages import anthropic_error
from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.calls import Call
from emu.apps.serve.choices import Exchange
from emu.apps.serve.faces import SoloFace, Token, compact, event, named_event
from emu.apps.serve.pace import AnswerPace
from emu.apps.serve.script import Part
from emu.apps.serve.service import Service

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool": ("input_json_delta", "partial_json"),
}
_SIGNED = "emulated"
""""Signature" of thinking."""


class MessagesFace(SoloFace):
    """A message of a block for each part: thinking, text, or the use of a tool."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        number = f"{service.session}{service.next_call():08x}"
        self.answer_id = f"msg_{call.request_id or number}"

    def whole(self) -> bytes:
        """One JSON object."""
        blocks = [self._block(part, is_empty=False) for part in self.parts]
        message = self._message(blocks, self.choice.produced)
        return compact({**message, **self.extra})

    def _message(self, content: Sequence[object], output_tokens: int) -> dict[str, object]:
        is_done = bool(content)
        reason, stop = self._reason() if is_done else (None, None)
        request = self.choice.request
        cached = request.prefix_hit_tokens
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": request.prompt_tokens - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": output_tokens,
            },
        }

    def _block(self, part: Part, *, is_empty: bool) -> dict[str, object]:
        text = "" if is_empty else self.said(self.choice, part)
        if part.kind == "text":
            return {"type": "text", "text": text}
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": "" if is_empty else _SIGNED}
        given: object = {}
        if not is_empty:
            try:
                given = msgspec.json.decode(text)
            except msgspec.DecodeError:  # cut by the limit: stop_reason says so
                given = {}
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}

    def _reason(self) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)."""
        script = self.choice.script
        stop = script.stop_reason if script is not None else None
        if isinstance(stop, str):
            return "stop_sequence", stop
        return _STOP_REASONS[self.choice.finish_reason], None

    def opening(self) -> bytes:
        """The message begins."""
        return named_event("message_start", {"message": self._message([], 0)})

    def part_begins(self, index: int) -> bytes:
        """A block begins."""
        block = self._block(self.parts[index], is_empty=True)
        return named_event("content_block_start", {"index": index, "content_block": block})

    def part_ends(self, index: int) -> bytes:
        """A block ends."""
        ended = named_event("content_block_stop", {"index": index})
        if self.parts[index].kind != "reasoning":
            return ended
        delta = {"type": "signature_delta", "signature": _SIGNED}
        return named_event("content_block_delta", {"index": index, "delta": delta}) + ended

    def delta(self, index: int, token: Token) -> bytes:
        """The event of a token."""
        kind, key = _DELTAS[self.parts[index].kind]
        delta = {"type": kind, key: token.text}
        return named_event("content_block_delta", {"index": index, "delta": delta})

    def closing(self, pace: AnswerPace) -> bytes:
        """Block and message end."""
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = {"output_tokens": self.choice.produced}
        return (
            self.last_part_ends()
            + named_event("message_delta", {"delta": delta, "usage": usage})
            + named_event("message_stop", {})
        )

    def broken(self, error: ApiError) -> bytes:
        """An error event, and no end."""
        return b"event: error\n" + event(anthropic_error(error.status, str(error)))
