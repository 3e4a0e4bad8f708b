"""What clients send and what they get when it is wrong: bodies, checks, OpenAI's error envelope.

Pure: bytes in, a `Call` or an `ApiError` out. Fields that have no meaning for an emulated model
(temperature, top_p, penalties, seed, tools, response_format, logit_bias, ...) are accepted and
have no effect; so are fields that are not known. `docs/live.md` lists what has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from emu.serve.tokens import Ids, Tokenizer

CHOICES_MAX: Final = 128
"""Prompts times `n` of one call."""
TOKEN_ID_MAX: Final = 2**31 - 1
NAME_MAX: Final = 256
"""Characters of a name that a client gives and the recording keeps."""

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    499: "cancelled",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}

T = TypeVar("T")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param=param, code=code, type=type)
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None, type: str = ""
) -> dict[str, Any]:
    """OpenAI's envelope."""
    kind = type or _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(Struct, kw_only=True):
    """What both completion endpoints share."""

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: NonNegative | None = 0
    ignore_eos: bool | None = False
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Annotated[str, Meta(max_length=NAME_MAX)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = 0


class CompletionBody(Body, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[Any]
    echo: bool | None = False
    suffix: str | None = None


class Message(Struct):
    """One message of a chat."""

    role: str
    content: str | list[Any] | None = None


class ChatBody(Body, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None


class TokenizeBody(Struct, kw_only=True):
    """`/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """`/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]]


class Call(Struct, kw_only=True):
    """A completion request as the server sees it."""

    is_chat: bool
    prompts: list[Ids]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    tenant: str
    priority: int
    session_id: str = ""
    request_id: str = ""
    """The caller's own; empty = none given."""


def decode_body(data: bytes, kind: type[T]) -> T:
    """A JSON body of a type; 3.0 is an integer, as JSON Schema has it. Raises ApiError 400."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_whole_numbers(msgspec.json.decode(data)), kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        param = where.removesuffix("`").lstrip(".") or None
        raise ApiError(400, f"{problem}" + (f" ({param})" if param else ""), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def whole(value: Any) -> Any:
    """A float without a fraction as an integer, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_numbers(value: Any) -> Any:
    """The same everywhere inside."""
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return whole(value)


def read_completion(data: bytes, tokenizer: Tokenizer) -> tuple[str | None, Call]:
    """Model name and call of a body of `/v1/completions`. Raises ApiError."""
    body = decode_body(data, CompletionBody)
    if body.echo:
        raise ApiError(400, "echo is not supported", param="echo")
    if body.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    prompts = _prompts(body.prompt, tokenizer)
    return body.model, _call(body, prompts, body.max_tokens, is_chat=False)


def read_chat(data: bytes, tokenizer: Tokenizer) -> tuple[str | None, Call]:
    """Model name and call of a body of `/v1/chat/completions`. Raises ApiError."""
    body = decode_body(data, ChatBody)
    limit = body.max_completion_tokens or body.max_tokens
    prompt = tokenizer.encode(chat_text(body.messages))
    if len(prompt) == 0:  # an empty chat still has what a template adds
        prompt = np.zeros(1, dtype=np.int64)
    return body.model, _call(body, [prompt], limit, is_chat=True)


def chat_text(messages: list[Message]) -> str:
    """The messages as the model reads them: contents, a newline between two."""
    return "\n".join(_content(message, index) for index, message in enumerate(messages))


def _content(message: Message, index: int) -> str:
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text" or not isinstance(text, str):
            raise ApiError(400, "only text parts are supported", param=f"messages.{index}.content")
        texts.append(text)
    return "".join(texts)


def _prompts(prompt: str | list[Any], tokenizer: Tokenizer) -> list[Ids]:
    """A text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif prompt and all(type(item) in (int, float) for item in prompt):
        items = [prompt]
    else:
        items = prompt
    found = []
    for index, given in enumerate(items):
        item = [whole(i) for i in given] if isinstance(given, list) else given
        if isinstance(item, str):
            ids = tokenizer.encode(item)
        elif isinstance(item, list) and all(
            type(i) is int and 0 <= i <= TOKEN_ID_MAX for i in item
        ):
            ids = np.array(item, dtype=np.int64)
        else:
            problem = "expected a text, a list of texts, token ids, or a list of lists of them"
            raise ApiError(400, problem, param="prompt")
        if len(ids) == 0:
            raise ApiError(400, f"prompt {index} is empty", param="prompt")
        found.append(ids)
    if not found:
        raise ApiError(400, "the prompt is empty", param="prompt")
    return found


def _call(body: Body, prompts: list[Ids], max_tokens: int | None, *, is_chat: bool) -> Call:
    n = body.n or 1
    if len(prompts) * n > CHOICES_MAX:
        raise ApiError(400, f"prompts times n must be at most {CHOICES_MAX}", param="n")
    options = body.stream_options
    stream = bool(body.stream)
    if options is not None and not stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(400, "min_tokens must be at most max_tokens", param="min_tokens")
    return Call(
        is_chat=is_chat,
        prompts=prompts,
        n=n,
        stream=stream,
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        tenant=body.user or "",
        priority=body.priority or 0,
    )
