"""The form of answers of OpenAI's `/v1/responses`, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.calls import Call
from emu.apps.serve.faces import SoloFace, Token, compact, named_event
from emu.apps.serve.service import Service
from emu.apps.serve.world import Exchange

Stage = Literal["in_progress", "completed", "failed"]


class ResponsesFace(SoloFace):
    """A response of one item: a message of one part, or the call of a function."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        number = f"{service.session}{service.next_call():08x}"
        self.answer_id = f"resp_{call.request_id or number}"
        self._item_id = f"{'msg' if self.tool is None else 'fc'}_{number}"
        self._sequence = 0

    def whole(self) -> bytes:
        """One JSON object."""
        return compact(self._response("completed"))

    @property
    def _end(self) -> Literal["completed", "incomplete"]:
        """How an answer that broke nowhere ends: whole, or cut by the client's limit."""
        is_cut = self.choice.finish_reason == "length" and self.call.max_tokens is not None
        return "incomplete" if is_cut else "completed"

    def _response(self, stage: Stage) -> dict[str, object]:
        is_done = stage == "completed"
        end = self._end if is_done else stage
        details = {"reason": "max_output_tokens"} if end == "incomplete" else None
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created_s,
            "model": self.model,
            "status": end,
            "incomplete_details": details,
            "error": None,
            "output": [self._item(end)] if is_done else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": 1.0,
            "top_p": 1.0,
            "usage": self._usage() if is_done else None,
        }

    def _usage(self) -> dict[str, object]:
        request, produced = self.choice.request, self.choice.produced
        return {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": {"cached_tokens": request.prefix_hit_tokens},
            "output_tokens": produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": request.prompt_tokens + produced,
        }

    def _item(self, status: str, *, is_empty: bool = False) -> dict[str, object]:
        tool = self.tool
        if tool is not None:
            return {
                "type": "function_call",
                "id": self._item_id,
                "call_id": tool.call_id,
                "name": tool.name,
                "arguments": "" if is_empty else tool.arguments,
                "status": status,
            }
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": [] if is_empty else [_part(self.text)],
        }

    def _event(self, kind: str, content: Mapping[str, object]) -> bytes:
        """An event of the response, numbered."""
        data = {"sequence_number": self._sequence, **content}
        self._sequence += 1
        return named_event(f"response.{kind}", data)

    def _of_item(self, kind: str, content: Mapping[str, object]) -> bytes:
        """An event of the item: of the function's arguments, or of the message's one part."""
        place: dict[str, object] = {"item_id": self._item_id, "output_index": 0}
        if self.tool is None:
            place["content_index"] = 0
        return self._event(kind, {**place, **content})

    def opening(self) -> bytes:
        """The response, the item and its part begin."""
        response = self._response("in_progress")
        item = self._item("in_progress", is_empty=True)
        begun = self._event("created", {"response": response})
        begun += self._event("in_progress", {"response": response})
        begun += self._event("output_item.added", {"output_index": 0, "item": item})
        if self.tool is None:
            begun += self._of_item("content_part.added", {"part": _part("")})
        return begun

    def delta(self, token: Token) -> bytes:
        """The event of a token."""
        if self.tool is not None:
            return self._of_item("function_call_arguments.delta", {"delta": token.text})
        return self._of_item("output_text.delta", {"delta": token.text, "logprobs": []})

    def closing(self) -> bytes:
        """Part, item and response end."""
        tool = self.tool
        if tool is not None:
            called = {"name": tool.name, "arguments": tool.arguments}
            ended = self._of_item("function_call_arguments.done", called)
        else:
            text = self.text
            ended = self._of_item("output_text.done", {"text": text, "logprobs": []})
            ended += self._of_item("content_part.done", {"part": _part(text)})
        item = self._item(self._end)
        ended += self._event("output_item.done", {"output_index": 0, "item": item})
        return ended + self._event(self._end, {"response": self._response("completed")})

    def broken(self, error: ApiError) -> bytes:
        """The response has failed."""
        problem = {"code": str(error.code), "message": str(error)}
        response = {**self._response("failed"), "error": problem}
        return self._event("failed", {"response": response})


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": []}
