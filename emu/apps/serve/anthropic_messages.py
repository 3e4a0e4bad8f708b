"""Anthropic's `/v1/messages`: the body as a chat, the events of its answer, its errors."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import (
    NAME_MAX,
    ChatBody,
    Function,
    KvTransfer,
    Message,
    Tool,
    decode_body,
)
from emu.apps.serve.calls import Call, chat_call
from emu.apps.serve.faces import answer_text, compact
from emu.apps.serve.service import Service
from emu.apps.serve.tokenizer import Tokenizer
from emu.apps.serve.world import Choice, Exchange

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicTool(Struct):
    """One of `tools`."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class AnthropicChoice(Struct):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMessage(Struct):
    """One of `messages`."""

    role: str
    content: str | list[Any]


class CountBody(Struct, kw_only=True):
    """`/v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Any] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    metadata: dict[str, Any] | None = None
    kv_transfer_params: KvTransfer | None = None


def read_messages(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body. Raises ApiError."""
    body = decode_body(data, MessagesBody)
    user = (body.metadata or {}).get("user_id")
    chat = _chat(body)
    chat.max_tokens = body.max_tokens
    chat.stream = body.stream
    chat.stop = body.stop_sequences
    chat.user = user if isinstance(user, str) and len(user) <= NAME_MAX else None
    chat.kv_transfer_params = body.kv_transfer_params
    return chat_call(chat, tokenizer)


def count_tokens(data: bytes, tokenizer: Tokenizer) -> tuple[str, int]:
    """(model, tokens of the prompt) of a body. Raises ApiError."""
    call = chat_call(_chat(decode_body(data, CountBody)), tokenizer)
    return call.model, len(call.prompts[0])


def _chat(body: CountBody) -> ChatBody:
    if (body.thinking or {}).get("type") == "enabled":
        raise ApiError(400, "thinking is not supported", param="thinking")
    found = []
    if body.system:
        found.append(Message("system", body.system))
    for index, message in enumerate(body.messages):
        found.append(_message(message, index))
    tools = []
    for index, tool in enumerate(body.tools or []):
        if tool.type not in (None, "custom"):
            problem = f"tools of type {tool.type!r} are not supported"
            raise ApiError(400, problem, param=f"tools.{index}")
        tools.append(Tool(Function(tool.name, tool.description, tool.input_schema)))
    choice: str | dict[str, Any] | None = None
    if body.tool_choice is not None:
        kind = body.tool_choice.type
        choice = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
        if kind == "tool":
            choice = {"type": "function", "function": {"name": body.tool_choice.name}}
        if choice is None:
            raise ApiError(400, f"there is no tool_choice {kind!r}", param="tool_choice")
    return ChatBody(messages=found, model=body.model, tools=tools or None, tool_choice=choice)


def _message(message: AnthropicMessage, index: int) -> Message:
    if isinstance(message.content, str):
        return Message(message.role, message.content)
    texts: list[str] = []
    role = message.role
    for given in message.content:
        part: dict[str, Any] = given if isinstance(given, dict) else {}
        kind = part.get("type")
        if kind == "text":
            texts.append(str(part.get("text", "")))
        elif kind == "tool_use":
            texts.append(msgspec.json.encode([part.get("name"), part.get("input")]).decode())
        elif kind == "tool_result":
            role = "tool"
            content = part.get("content", "")
            texts.append(content if isinstance(content, str) else _texts(content, index))
        elif kind != "thinking":
            problem = f"parts of type {kind!r} are not supported"
            raise ApiError(400, problem, param=f"messages.{index}.content")
    return Message(role, "".join(texts))


def _texts(content: Any, index: int) -> str:
    parts = [p for p in content if isinstance(p, dict)] if isinstance(content, list) else []
    if not parts or not all(part.get("type") == "text" for part in parts):
        raise ApiError(400, "only text parts are supported", param=f"messages.{index}.content")
    return "".join(str(part.get("text", "")) for part in parts)


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's envelope of an error."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class MessagesFace:
    """The form of the answer."""

    def __init__(self, service: Service, call: Call, exchange: Exchange) -> None:
        self._service = service
        self._call = call
        self._choice: Choice = exchange.choices[0]
        number = f"{service.session}{service.next_call():08x}"
        self.answer_id = f"msg_{call.request_id or number}"
        self.extra: dict[str, Any] = {}

    def _block(self, *, is_empty: bool) -> dict[str, Any]:
        script = self._choice.script
        if script is None or script.tool is None:
            text = "" if is_empty else answer_text(self._service, self._choice)
            return {"type": "text", "text": text}
        given: Any = {}
        if not is_empty:
            try:
                given = msgspec.json.decode(script.tool.arguments)
            except msgspec.DecodeError:  # cut by the limit: stop_reason says so
                given = {}
        block = {"type": "tool_use", "id": script.tool.call_id, "name": script.tool.name}
        return {**block, "input": given}

    def _reason(self) -> tuple[str, str | None]:
        script = self._choice.script
        stop = script.stop_reason if script is not None else None
        if isinstance(stop, str):
            return "stop_sequence", stop
        return _STOP_REASONS[self._choice.finish_reason], None

    def _message(self, **more: Any) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model or self._service.model,
            **more,
        }

    def _usage(self, output_tokens: int) -> dict[str, int]:
        request = self._choice.request
        cached = request.prefix_hit_tokens
        return {
            "input_tokens": request.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": output_tokens,
        }

    def whole(self) -> bytes:
        """One JSON object."""
        reason, stop = self._reason()
        usage = self._usage(self._choice.produced)
        block = self._block(is_empty=False)
        return compact(
            self._message(
                content=[block], stop_reason=reason, stop_sequence=stop, usage=usage, **self.extra
            )
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        return (
            f"event: {kind}\n".encode() + b"data: " + compact({"type": kind, **content}) + b"\n\n"
        )

    def opening(self) -> bytes:
        """The message and its block begin."""
        message = self._message(
            content=[], stop_reason=None, stop_sequence=None, usage=self._usage(0)
        )
        block = self._block(is_empty=True)
        return self._event("message_start", message=message) + self._event(
            "content_block_start", index=0, content_block=block
        )

    def news(self, after: int) -> bytes:
        """One delta for each token."""
        choice, script = self._choice, self._choice.script
        end = choice.produced if after == 0 else min(choice.produced, after)
        pieces = self._service.tokenizer.pieces
        found = b""
        while choice.sent < end:
            position = choice.sent
            choice.sent += 1
            delta: dict[str, Any]
            if script is not None and script.tool is not None:
                text = script.shown[position] if position >= script.tool_head else ""
                delta = {"type": "input_json_delta", "partial_json": text}
            else:
                text = (
                    pieces[(choice.start + position) % len(pieces)]
                    if script is None
                    else script.shown[position]
                )
                delta = {"type": "text_delta", "text": text}
            found += self._event("content_block_delta", index=0, delta=delta)
        return found

    def closing(self) -> bytes:
        """Block and message end."""
        reason, stop = self._reason()
        usage = {"output_tokens": self._choice.produced}
        return (
            self._event("content_block_stop", index=0)
            + self._event(
                "message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage
            )
            + self._event("message_stop")
        )

    def broken(self, error: ApiError) -> bytes:
        """An error event, and no end."""
        body = anthropic_error(error.status, error.body)
        return b"event: error\ndata: " + compact(body) + b"\n\n"
