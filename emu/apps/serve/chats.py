"""Chats in other forms: Anthropic's `/v1/messages`, OpenAI's `/v1/responses`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from emu.apps.serve.completions import answer_text, compact
from emu.apps.serve.house import House
from emu.apps.serve.protocol import (
    NAME_MAX,
    ApiError,
    Call,
    ChatBody,
    Function,
    JsonSchema,
    KvTransfer,
    Message,
    NonNegative,
    ResponseFormat,
    Tool,
    chat_call,
    decode_body,
)
from emu.apps.serve.script import Tokenizer
from emu.apps.serve.world import Choice, Exchange

# --- Messages: the body as a chat, events, errors -------------------------------------------------
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

    def __init__(self, house: House, call: Call, exchange: Exchange) -> None:
        self._house = house
        self._call = call
        self._choice: Choice = exchange.choices[0]
        number = f"{house.session}{house.next_call():08x}"
        self.answer_id = f"msg_{call.request_id or number}"
        self.extra: dict[str, Any] = {}

    def _block(self, *, is_empty: bool) -> dict[str, Any]:
        script = self._choice.script
        if script is None or script.tool is None:
            text = "" if is_empty else answer_text(self._house, self._choice)
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
            "model": self._call.model or self._house.model,
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

    # --- stream -------------------------------------------------------------------------------
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
        pieces = self._house.tokenizer.pieces
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


# --- Responses: the body as a chat, events --------------------------------------------------------
# Nothing is stored: `previous_response_id`, `conversation` and `background` are refused.


class TextFormat(Struct):
    """`text.format`."""

    type: str
    name: str = ""
    schema: Any = None
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
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesBody(Struct, kw_only=True):
    """`/v1/responses`."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = False
    text: TextOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Annotated[str, Meta(max_length=NAME_MAX)] | None = None
    priority: int | None = 0
    cache_salt: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = False
    top_logprobs: NonNegative | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None


def read_responses(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body. Raises ApiError."""
    body = decode_body(data, ResponsesBody)
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
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


def _response_message(item: Any, index: int) -> Message:
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


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


class ResponsesFace:
    """The form of the answer."""

    def __init__(self, house: House, call: Call, exchange: Exchange) -> None:
        self._house = house
        self._call = call
        self._choice: Choice = exchange.choices[0]
        self._created = int(time.time())
        number = f"{house.session}{house.next_call():08x}"
        self.answer_id = f"resp_{call.request_id or number}"
        self._item_id = f"{'fc' if self._has_tool else 'msg'}_{number}"
        self._sequence = 0

    @property
    def _has_tool(self) -> bool:
        return self._choice.script is not None and self._choice.script.tool is not None

    def whole(self) -> bytes:
        """One JSON object."""
        return compact(self._response("completed"))

    def _response(self, status: str) -> dict[str, Any]:
        choice, is_done = self._choice, status == "completed"
        is_cut = is_done and choice.finish_reason == "length" and self._call.max_tokens is not None
        details = {"reason": "max_output_tokens"} if is_cut else None
        response: dict[str, Any] = {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._created,
            "model": self._call.model or self._house.model,
            "status": "incomplete" if is_cut else status,
            "incomplete_details": details,
            "error": None,
            "output": [self._item("incomplete" if is_cut else "completed")] if is_done else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": 1.0,
            "top_p": 1.0,
            "usage": None,
        }
        if is_done:
            request = choice.request
            response["usage"] = {
                "input_tokens": request.prompt_tokens,
                "input_tokens_details": {"cached_tokens": request.prefix_hit_tokens},
                "output_tokens": choice.produced,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": request.prompt_tokens + choice.produced,
            }
        return response

    def _item(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        script = self._choice.script
        if script is not None and script.tool is not None:
            return {
                "type": "function_call",
                "id": self._item_id,
                "call_id": script.tool.call_id,
                "name": script.tool.name,
                "arguments": "" if is_empty else script.tool.arguments,
                "status": status,
            }
        content = [] if is_empty else [self._part(answer_text(self._house, self._choice))]
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    # --- stream -------------------------------------------------------------------------------
    def _event(self, kind: str, **content: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **content}
        self._sequence += 1
        return f"event: {kind}\n".encode() + b"data: " + compact(data) + b"\n\n"

    def opening(self) -> bytes:
        """The response, the item and its part begin."""
        response = self._response("in_progress")
        item = self._item("in_progress", is_empty=True)
        begun = self._event("response.created", response=response)
        begun += self._event("response.in_progress", response=response)
        begun += self._event("response.output_item.added", output_index=0, item=item)
        if not self._has_tool:
            place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
            begun += self._event("response.content_part.added", **place, part=self._part(""))
        return begun

    def news(self, after: int) -> bytes:
        """One delta for each token."""
        choice, script = self._choice, self._choice.script
        end = choice.produced if after == 0 else min(choice.produced, after)
        pieces = self._house.tokenizer.pieces
        found = b""
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": 0}
        while choice.sent < end:
            position = choice.sent
            choice.sent += 1
            if script is None:
                text = pieces[(choice.start + position) % len(pieces)]
            else:
                text = script.shown[position]
            if script is not None and script.tool is not None:
                text = text if position >= script.tool_head else ""
                found += self._event("response.function_call_arguments.delta", **place, delta=text)
            else:
                found += self._event(
                    "response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]
                )
        return found

    def closing(self) -> bytes:
        """Part, item and response end."""
        script = self._choice.script
        response = self._response("completed")
        item = response["output"][0]
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": 0}
        if script is not None and script.tool is not None:
            name, arguments = script.tool.name, script.tool.arguments
            ended = self._event(
                "response.function_call_arguments.done", **place, name=name, arguments=arguments
            )
        else:
            text = answer_text(self._house, self._choice)
            ended = self._event(
                "response.output_text.done", **place, content_index=0, text=text, logprobs=[]
            )
            part = self._part(text)
            ended += self._event("response.content_part.done", **place, content_index=0, part=part)
        ended += self._event("response.output_item.done", output_index=0, item=item)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        return ended + self._event(f"response.{kind}", response=response)

    def broken(self, error: ApiError) -> bytes:
        """The response has failed."""
        problem = error.body["error"]
        response = self._response("failed")
        response["error"] = {"code": str(problem["code"]), "message": problem["message"]}
        return self._event("response.failed", response=response)
