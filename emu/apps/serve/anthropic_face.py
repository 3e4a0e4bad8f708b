"""The form of answers of Anthropic's `/v1/messages`, whole and as events."""

from __future__ import annotations

import msgspec

from emu.apps.serve.anthropic_messages import anthropic_error
from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.calls import Call
from emu.apps.serve.faces import SoloFace, Token, compact, event, named_event
from emu.apps.serve.service import Service
from emu.apps.serve.world import Exchange

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFace(SoloFace):
    """A message of one block: a text, or the use of a tool."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        number = f"{service.session}{service.next_call():08x}"
        self.answer_id = f"msg_{call.request_id or number}"

    def whole(self) -> bytes:
        """One JSON object."""
        message = self._message([self._block(is_empty=False)], self.choice.produced)
        return compact({**message, **self.extra})

    def _message(self, content: list[object], output_tokens: int) -> dict[str, object]:
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

    def _block(self, *, is_empty: bool) -> dict[str, object]:
        tool = self.tool
        if tool is None:
            return {"type": "text", "text": "" if is_empty else self.text}
        given: object = {}
        if not is_empty:
            try:
                given = msgspec.json.decode(tool.arguments)
            except msgspec.DecodeError:  # cut by the limit: stop_reason says so
                given = {}
        return {"type": "tool_use", "id": tool.call_id, "name": tool.name, "input": given}

    def _reason(self) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)."""
        script = self.choice.script
        stop = script.stop_reason if script is not None else None
        if isinstance(stop, str):
            return "stop_sequence", stop
        return _STOP_REASONS[self.choice.finish_reason], None

    def opening(self) -> bytes:
        """The message and its block begin."""
        block = self._block(is_empty=True)
        return named_event("message_start", {"message": self._message([], 0)}) + named_event(
            "content_block_start", {"index": 0, "content_block": block}
        )

    def delta(self, token: Token) -> bytes:
        """The event of a token."""
        delta = {"type": "text_delta", "text": token.text}
        if self.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": token.text}
        return named_event("content_block_delta", {"index": 0, "delta": delta})

    def closing(self) -> bytes:
        """Block and message end."""
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = {"output_tokens": self.choice.produced}
        return (
            named_event("content_block_stop", {"index": 0})
            + named_event("message_delta", {"delta": delta, "usage": usage})
            + named_event("message_stop", {})
        )

    def broken(self, error: ApiError) -> bytes:
        """An error event, and no end."""
        return b"event: error\n" + event(anthropic_error(error.status, str(error)))
