"""Anthropic's `/v1/messages`: the body as a chat, its errors."""

from __future__ import annotations

from typing import Annotated

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
    whole,
)
from emu.apps.serve.calls import Call, chat_call
from emu.apps.serve.tokenizer import Tokenizer

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
    input_schema: dict[str, object] | None = None
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
    content: str | list[object]


class CountBody(Struct, kw_only=True):
    """`/v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[object] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: dict[str, object] | None = None


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    metadata: dict[str, object] | None = None
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
    thinking = body.thinking or {}
    budget = whole(thinking.get("budget_tokens"))
    if thinking.get("type") in ("enabled", "adaptive"):
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            problem = "thinking.budget_tokens is a whole number above 0"
            raise ApiError(400, problem, param="thinking.budget_tokens")
        chat.reasoning_effort = "medium"
    call = chat_call(chat, tokenizer)
    call.reasoning_tokens_max = budget if isinstance(budget, int) else 0
    return call


def count_tokens(data: bytes, tokenizer: Tokenizer) -> tuple[str, int]:
    """(model, tokens of the prompt) of a body. Raises ApiError."""
    call = chat_call(_chat(decode_body(data, CountBody)), tokenizer)
    return call.model, len(call.prompts[0])


def _chat(body: CountBody) -> ChatBody:
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
    choice: str | dict[str, object] | None = None
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
    parts: list[object] = []
    role = message.role
    for given in message.content:
        part: dict[str, object] = given if isinstance(given, dict) else {}
        kind = part.get("type")
        if kind == "text":
            texts.append(str(part.get("text", "")))
        elif kind == "tool_use":
            texts.append(msgspec.json.encode([part.get("name"), part.get("input")]).decode())
        elif kind == "tool_result":
            role = "tool"
            content = part.get("content", "")
            texts.append(content if isinstance(content, str) else _texts(content, index))
        elif kind == "image":
            parts += [{"type": "text", "text": "".join(texts)}, _image(part.get("source"), index)]
            texts = []
        elif kind != "thinking":
            problem = f"parts of type {kind!r} are not supported"
            raise ApiError(400, problem, param=f"messages.{index}.content")
    if parts:
        return Message(role, [*parts, {"type": "text", "text": "".join(texts)}])
    return Message(role, "".join(texts))


def _image(source: object, index: int) -> object:
    """An image in OpenAI's form. Raises ApiError."""
    given = source if isinstance(source, dict) else {}
    if given.get("type") != "base64":
        problem = "images are given in base64; nothing is fetched"
        raise ApiError(400, problem, param=f"messages.{index}.content")
    url = f"data:{given.get('media_type', 'image/png')};base64,{given.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(content: object, index: int) -> str:
    parts = [p for p in content if isinstance(p, dict)] if isinstance(content, list) else []
    if not parts or not all(part.get("type") == "text" for part in parts):
        raise ApiError(400, "only text parts are supported", param=f"messages.{index}.content")
    return "".join(str(part.get("text", "")) for part in parts)


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """Anthropic's envelope of an error."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
