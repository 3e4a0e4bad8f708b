"""OpenAI's `/v1/responses`: the body as a chat.

Nothing is stored: `previous_response_id`, `conversation` and `background` are refused.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import (
    NAME_MAX,
    ChatBody,
    Function,
    JsonSchema,
    Message,
    NonNegative,
    ResponseFormat,
    Tool,
    decode_body,
)
from emu.apps.serve.calls import Call, chat_call
from emu.apps.serve.tokenizer import Tokenizer


class TextFormat(Struct):
    """`text.format`."""

    type: str
    name: str = ""
    schema: object = None
    strict: bool | None = None


class TextOptions(Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FlatTool(Struct):
    """One of `tools`: a function, flat."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Reasoning(Struct):
    """`reasoning`."""

    effort: str | None = None


class ResponsesBody(Struct, kw_only=True):
    """`/v1/responses`."""

    input: str | list[object]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = False
    text: TextOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | dict[str, object] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Annotated[str, Meta(max_length=NAME_MAX)] | None = None
    priority: int | None = 0
    cache_salt: str | None = None
    reasoning: Reasoning | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: object = None
    background: bool | None = False
    top_logprobs: NonNegative | None = None
    include: list[str] | None = None
    metadata: dict[str, object] | None = None


def read_responses(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body. Raises ApiError."""
    body = decode_body(data, ResponsesBody)
    for name, value in (
        ("previous_response_id", body.previous_response_id),
        ("conversation", body.conversation),
        ("background", body.background),
    ):
        if value:
            raise ApiError(400, f"{name}: responses are not stored here", param=name)
    if body.top_logprobs or any("logprobs" in item for item in body.include or []):
        raise ApiError(400, "log-probabilities are not supported here", param="top_logprobs")
    chat = ChatBody(
        messages=_messages(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        user=body.user,
        priority=body.priority,
        cache_salt=body.cache_salt,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body),
        tools=_tools(body),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    return chat_call(chat, tokenizer)


def _messages(body: ResponsesBody) -> list[Message]:
    found = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        found.append(Message("user", body.input))
    else:
        for index, item in enumerate(body.input):
            found.append(_response_message(item, index))
    if not found:
        raise ApiError(400, "the input is empty", param="input")
    return found


def _response_message(item: object, index: int) -> Message:
    where = f"input.{index}"
    if isinstance(item, str):
        return Message("user", item)
    if not isinstance(item, dict):
        raise ApiError(400, "an item is an object", param=where)
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return Message("tool", str(item.get("output", "")))
    if kind == "function_call":
        called = f"{item.get('name', '')} {item.get('arguments', '')}"
        return Message("assistant", called)
    if kind == "reasoning":
        return Message("assistant", None)
    content = item.get("content")
    if kind != "message" or not isinstance(content, (str, list)):
        raise ApiError(400, f"items of type {kind!r} are not supported", param=where)
    return Message(str(item.get("role", "user")), content)


def _format(body: ResponsesBody) -> ResponseFormat | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    schema = JsonSchema(form.name, form.schema, form.strict)
    return ResponseFormat(form.type, schema)


def _tools(body: ResponsesBody) -> list[Tool] | None:
    found = []
    for index, tool in enumerate(body.tools or []):
        if tool.type != "function" or not tool.name:
            raise ApiError(400, "only tools of type function", param=f"tools.{index}")
        found.append(Tool(Function(tool.name, tool.description, tool.parameters, tool.strict)))
    return found or None


def _choice(given: str | dict[str, object] | None) -> str | dict[str, object] | None:
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given
