"""The form of answers of OpenAI's `/v1/responses`, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.calls import Call
from emu.apps.serve.choices import Exchange
from emu.apps.serve.faces import SoloFace, Token, compact, named_event
from emu.apps.serve.pace import AnswerPace
from emu.apps.serve.script import Part
from emu.apps.serve.service import Service

_PREFIXES: Final = {"reasoning": "rs", "text": "msg", "tool": "fc"}
_STREAMS: Final = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "tool": "function_call_arguments",
}
Stage = Literal["in_progress", "completed", "failed"]


class ResponsesFace(SoloFace):
    """A response of an item for each part: reasoning, a message, the call of a function."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        super().__init__(service, call, exchange)
        number = f"{service.session}{service.next_call():08x}"
        self.answer_id = f"resp_{call.request_id or number}"
        self._item_ids = [
            f"{_PREFIXES[part.kind]}_{number}" + (f"{index:02x}" if index else "")
            for index, part in enumerate(self.parts)
        ]
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
            "output": self._items(end) if is_done else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": 1.0,
            "top_p": 1.0,
            "usage": self._usage() if is_done else None,
        }

    def _usage(self) -> dict[str, object]:
        request, produced = self.choice.request, self.choice.produced
        script = self.choice.script
        thought = 0 if script is None else script.reasoning_tokens
        return {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": {"cached_tokens": request.prefix_hit_tokens},
            "output_tokens": produced,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": request.prompt_tokens + produced,
        }

    def _items(self, end: str) -> list[dict[str, object]]:
        """All items; only the last one can be cut."""
        last = len(self.parts) - 1
        return [self._item(i, "completed" if i < last else end) for i in range(last + 1)]

    def _item(self, index: int, status: str, *, is_empty: bool = False) -> dict[str, object]:
        part, item_id = self.parts[index], self._item_ids[index]
        text = "" if is_empty else self.said(self.choice, part)
        if part.kind == "tool":
            return {
                "type": "function_call",
                "id": item_id,
                "call_id": part.call_id,
                "name": part.name,
                "arguments": text,
                "status": status,
            }
        content = [] if is_empty else [_part(part, text)]
        if part.kind == "reasoning":
            item = {"type": "reasoning", "id": item_id, "summary": []}
            return {**item, "content": content, "status": status}
        item = {"type": "message", "id": item_id, "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _event(self, kind: str, content: Mapping[str, object]) -> bytes:
        """An event of the response, numbered."""
        data = {"sequence_number": self._sequence, **content}
        self._sequence += 1
        return named_event(f"response.{kind}", data)

    def _of_item(self, index: int, kind: str, content: Mapping[str, object]) -> bytes:
        """An event of an item: of the function's arguments, or of the message's one part."""
        place: dict[str, object] = {"item_id": self._item_ids[index], "output_index": index}
        if self.parts[index].kind != "tool":
            place["content_index"] = 0
        return self._event(kind, {**place, **content})

    def opening(self) -> bytes:
        """The response begins."""
        response = self._response("in_progress")
        begun = self._event("created", {"response": response})
        return begun + self._event("in_progress", {"response": response})

    def part_begins(self, index: int) -> bytes:
        """An item and its part begin."""
        item = self._item(index, "in_progress", is_empty=True)
        begun = self._event("output_item.added", {"output_index": index, "item": item})
        part = self.parts[index]
        if part.kind != "tool":
            begun += self._of_item(index, "content_part.added", {"part": _part(part, "")})
        return begun

    def delta(self, index: int, token: Token) -> bytes:
        """The event of a token."""
        kind = self.parts[index].kind
        more: dict[str, object] = {"logprobs": []} if kind == "text" else {}
        return self._of_item(index, f"{_STREAMS[kind]}.delta", {"delta": token.text, **more})

    def part_ends(self, index: int) -> bytes:
        """A part and its item end."""
        part = self.parts[index]
        text, kind = self.said(self.choice, part), _STREAMS[part.kind]
        if part.kind == "tool":
            done = {"name": part.name, "arguments": text}
            ended = self._of_item(index, f"{kind}.done", done)
        else:
            more: dict[str, object] = {"logprobs": []} if part.kind == "text" else {}
            ended = self._of_item(index, f"{kind}.done", {"text": text, **more})
            ended += self._of_item(index, "content_part.done", {"part": _part(part, text)})
        is_last = index == len(self.parts) - 1
        item = self._item(index, self._end if is_last else "completed")
        return ended + self._event("output_item.done", {"output_index": index, "item": item})

    def closing(self, pace: AnswerPace) -> bytes:
        """Part, item and response end."""
        ended = self.last_part_ends()
        return ended + self._event(self._end, {"response": self._response("completed")})

    def broken(self, error: ApiError) -> bytes:
        """The response has failed."""
        problem = {"code": str(error.code), "message": str(error)}
        response = {**self._response("failed"), "error": problem}
        return self._event("failed", {"response": response})


def _part(part: Part, text: str) -> dict[str, object]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}
