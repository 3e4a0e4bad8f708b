"""Bodies that clients send to OpenAI's and vLLM's endpoints, and how JSON becomes one.

Fields that have no meaning for an emulated model (temperature, top_p, penalties, seed, logit_bias,
...) are accepted and have no effect; so are fields that are not known, as in vLLM.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.logprobs import LOGPROBS_MAX
from emu.process.prepared import prepared

CHOICES_MAX: Final = 128
"""Prompts times `n` of one call."""
TOKEN_ID_MAX: Final = 2**31 - 1
NAME_MAX: Final = 256
"""Characters of a name that a client gives and the recording keeps."""
T = TypeVar("T")
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(Struct):
    """`response_format.json_schema`."""

    name: str = ""
    schema: object = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: object = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(Struct):
    """What a tool is."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Struct):
    """One of `tools`."""

    function: Function
    type: str = "function"


class KvTransfer(Struct):
    """vLLM's `kv_transfer_params`."""

    do_remote_prefill: bool | None = False
    do_remote_decode: bool | None = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[object] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None


class Body(Struct, kw_only=True):
    """What both completion endpoints share."""

    model: str | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = 0
    ignore_eos: bool | None = False
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Annotated[str, Meta(max_length=NAME_MAX)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = 0
    echo: bool | None = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: int | None = None
    """Number of answers, as `n`."""
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = False
    cache_hit_threshold: float | None = None
    """Part of the prompt found in a cache below which vLLM ends a call; it is refused here."""
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    cache_salt: str | None = None
    """Prefixes are shared between calls with the same one only."""
    kv_transfer_params: KvTransfer | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[object] | None = None
    bootstrap_room: int | list[int] | None = None


class CompletionBody(Body, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[object]
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    suffix: str | None = None


class Message(Struct):
    """One message of a chat."""

    role: str
    content: str | list[object] | None = None
    tool_calls: list[object] | None = None


class ChatBody(Body, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    audio: object = None
    modalities: list[str] | None = None


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


def decode_body(data: bytes, kind: type[T]) -> T:
    """A JSON body of a type; 3.0 is an integer, as JSON Schema has it. Raises ApiError 400."""
    try:
        try:
            return msgspec.json.decode(data, type=prepared(kind))
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_whole_numbers(msgspec.json.decode(data)), prepared(kind))
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        param = where.removesuffix("`").lstrip(".") or None
        raise ApiError(400, f"{problem}" + (f" ({param})" if param else ""), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def whole(value: object) -> object:
    """A float without a fraction as an integer, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_numbers(value: object) -> object:
    """The same everywhere inside."""
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return whole(value)
