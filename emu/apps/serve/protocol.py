"""What clients send and what they get when it is wrong: bodies, checks, OpenAI's error envelope.

Pure: bytes in, a `Call` or an `ApiError` out. Fields that have no meaning for an emulated model
(temperature, top_p, penalties, seed, logit_bias, ...) are accepted and have no effect; so are
fields that are not known, as in vLLM. What would change the answer and cannot be honored is
refused with 400. `docs/reference/live-api.md` lists what has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from emu.apps.serve.script import FREE, LOGPROBS_MAX, Constraint, Ids, Tokenizer
from emu.process.prepared import prepared
from emu.rng import rng_stream

CHOICES_MAX: Final = 128
"""Prompts times `n` of one call."""
TOKEN_ID_MAX: Final = 2**31 - 1
NAME_MAX: Final = 256
"""Characters of a name that a client gives and the recording keeps."""
STOPS_MAX: Final = 64

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


class JsonSchema(Struct):
    """`response_format.json_schema`."""

    name: str = ""
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(Struct):
    """What a tool is."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
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
    remote_block_ids: list[Any] | None = None
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
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    cache_salt: str | None = None
    """Prefixes are shared between calls with the same one only."""
    kv_transfer_params: KvTransfer | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[Any] | None = None
    bootstrap_room: int | list[int] | None = None


class CompletionBody(Body, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    suffix: str | None = None


class Message(Struct):
    """One message of a chat."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None


class ChatBody(Body, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    audio: Any = None
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
    model: str = ""
    """As the client named it."""
    session_id: str = ""
    request_id: str = ""
    """The caller's own; empty = none given."""
    constraint: Constraint = FREE
    is_named_tool: bool = False
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    logprobs: int = -1
    """Alternatives shown for each token; -1 = no log-probabilities."""
    echo: bool = False
    cache_salt: str = ""
    kv: KvTransfer | None = None
    room: int = -1
    """SGLang's `bootstrap_room`; -1 = none."""
    room_port: int = -1
    """Its `bootstrap_port`: of the prefill side."""

    @property
    def is_plain(self) -> bool:
        """Filler of a given length, nothing to obey and nothing to show beside it."""
        return (
            self.constraint is FREE
            and not self.stops
            and not self.stop_ids
            and self.logprobs < 0
            and not self.echo
        )


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


def read_completion(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body of `/v1/completions`. Raises ApiError."""
    body = decode_body(data, CompletionBody)
    if body.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    prompts = read_prompts(body.prompt, tokenizer)
    call = _call(body, prompts, body.max_tokens, is_chat=False)
    call.logprobs = -1 if body.logprobs is None else body.logprobs
    call.echo = bool(body.echo)
    if body.max_tokens == 0 and not call.echo:
        raise ApiError(400, "max_tokens must be at least 1 without echo", param="max_tokens")
    return call


def generate_call(body: Body, prompts: list[Ids]) -> Call:
    """The call of a body whose prompts have been read. Raises ApiError."""
    return _call(body, prompts, body.max_tokens, is_chat=False)


def read_chat(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body of `/v1/chat/completions`. Raises ApiError."""
    return chat_call(decode_body(data, ChatBody), tokenizer)


def chat_call(body: ChatBody, tokenizer: Tokenizer) -> Call:
    """The call of a chat, whatever its form was. Raises ApiError."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit == 0:
        raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")
    if body.echo:
        raise ApiError(400, "echo is for completions", param="echo")
    if body.audio is not None or "audio" in (body.modalities or []):
        raise ApiError(400, "audio is not supported", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    text = chat_text(body.messages)
    if body.tools:  # a chat template puts them in front
        text = f"{msgspec.json.encode(body.tools).decode()}\n{text}"
    prompt = tokenizer.encode(text)
    if len(prompt) == 0:  # an empty chat still has what a template adds
        prompt = np.zeros(1, dtype=np.int64)
    call = _call(body, [prompt], limit, is_chat=True)
    call.logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    tool = _chosen_tool(body, int(prompt.sum()))
    if tool is not None:
        if call.constraint is not FREE:
            raise ApiError(400, "tools beside a format are not supported", param="tools")
        schema = tool.parameters or {"type": "object", "properties": {}}
        if schema.get("type", "object") != "object":
            problem = f"the parameters of {tool.name!r} must be an object"
            raise ApiError(400, problem, param="tools")
        call.constraint = Constraint(schema={"type": "object", **schema}, tool=tool.name)
        call.is_named_tool = isinstance(body.tool_choice, dict)
    return call


def _chosen_tool(body: ChatBody, seed: int) -> Function | None:
    """The function that this answer calls, if it calls one.

    An emulated model has no judgment: with "auto" it calls a tool exactly if the last message is
    not the result of one.
    """
    choice = body.tool_choice
    tools = body.tools or []
    if any(tool.type != "function" for tool in tools):
        raise ApiError(400, "tools are functions", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        for tool in tools:
            if tool.function.name == name:
                return tool.function
        raise ApiError(400, f"there is no tool {name!r}", param="tool_choice")
    if choice not in (None, "auto", "none", "required"):
        raise ApiError(400, "tool_choice is none, auto, required or a tool", param="tool_choice")
    if choice == "none":
        return None
    is_answered = body.messages[-1].role in ("tool", "function")
    if choice != "required" and is_answered:
        return None
    return tools[seed % len(tools)].function


def chat_text(messages: list[Message]) -> str:
    """The messages as the model reads them: contents, a newline between two."""
    return "\n".join(_content(message, index) for index, message in enumerate(messages))


def _content(message: Message, index: int) -> str:
    calls = msgspec.json.encode(message.tool_calls).decode() if message.tool_calls else ""
    content = message.content
    if content is None:
        return calls
    if isinstance(content, str):
        return content + calls
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ApiError(400, "only text parts are supported", param=f"messages.{index}.content")
        texts.append(text)
    return "".join(texts) + calls


def read_prompts(prompt: str | list[Any], tokenizer: Tokenizer) -> list[Ids]:
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


_REFUSED: Final = (
    ("use_beam_search", "beam search is not emulated"),
    ("prompt_logprobs", "log-probabilities of prompts are shown with echo and logprobs only"),
    ("return_token_ids", "token ids are not returned; /tokenize gives them"),
    ("cache_hit_threshold", "answers do not end by cache hits"),
    ("guided_json", "guided_json is gone from vLLM; use structured_outputs"),
    ("guided_regex", "guided_regex is gone from vLLM; use structured_outputs"),
    ("guided_choice", "guided_choice is gone from vLLM; use structured_outputs"),
    ("guided_grammar", "grammars are not supported"),
)


def _one(given: int | list[Any] | None) -> int:
    """A number that may be in a list, as for batches; -1 = none."""
    first = given[0] if isinstance(given, list) and given else given
    return first if isinstance(first, int) else -1


def _call(body: Body, prompts: list[Ids], max_tokens: int | None, *, is_chat: bool) -> Call:
    n = body.n or 1
    if len(prompts) * n > CHOICES_MAX:
        raise ApiError(400, f"prompts times n must be at most {CHOICES_MAX}", param="n")
    for name, problem in _REFUSED:
        if getattr(body, name):
            raise ApiError(400, problem, param=name)
    if body.best_of not in (None, n):
        raise ApiError(400, "best_of other than n is not supported", param="best_of")
    options = body.stream_options
    stream = bool(body.stream)
    if options is not None and not stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    if body.cache_salt == "":
        raise ApiError(400, "cache_salt is a text that is not empty", param="cache_salt")
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(400, "min_tokens must be at most max_tokens", param="min_tokens")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > STOPS_MAX or any(not 0 < len(stop) <= NAME_MAX for stop in stops):
        problem = f"stop has at most {STOPS_MAX} texts of 1 to {NAME_MAX} characters"
        raise ApiError(400, problem, param="stop")
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
        model=body.model or "",
        constraint=_constraint(body),
        stops=tuple(stops),
        stop_ids=tuple(body.stop_token_ids or ()),
        keeps_stop=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        kv=body.kv_transfer_params,
        room=_one(body.bootstrap_room),
        room_port=_one(body.bootstrap_port),
    )


def _constraint(body: Body) -> Constraint:
    form, outputs = body.response_format, body.structured_outputs
    found: list[Constraint] = []
    if form is not None and form.type != "text":
        if form.type == "json_object":
            found.append(Constraint(schema=True))
        elif form.type != "json_schema":
            problem = "response_format is text, json_object or json_schema"
            raise ApiError(400, problem, param="response_format.type")
        elif form.json_schema is None or form.json_schema.schema is None:
            problem = "json_schema needs a schema"
            raise ApiError(400, problem, param="response_format.json_schema")
        else:
            found.append(Constraint(schema=form.json_schema.schema))
    if outputs is not None:
        if outputs.grammar:
            problem = "grammars are not supported"
            raise ApiError(400, problem, param="structured_outputs.grammar")
        given = []
        if outputs.json is not None:
            given.append(Constraint(schema=_schema_of(outputs.json)))
        if outputs.json_object:
            given.append(Constraint(schema=True))
        if outputs.regex is not None:
            given.append(Constraint(regex=outputs.regex))
        if outputs.choice is not None:
            if not outputs.choice:
                raise ApiError(400, "choice is empty", param="structured_outputs.choice")
            given.append(Constraint(options=tuple(outputs.choice)))
        if len(given) != 1:
            raise ApiError(400, "give exactly one kind of output", param="structured_outputs")
        found += given
    if len(found) > 1:
        raise ApiError(400, "give response_format or structured_outputs", param="response_format")
    return found[0] if found else FREE


def _schema_of(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError:
        raise ApiError(400, "json is not a schema", param="structured_outputs.json") from None


# --- failure schedules: errors that the server returns on purpose, and always the same ones -------
# A rule says which calls fail and how. Rules are asked in order, the first that fails a call wins.
# Calls are counted per rule, from 0; `skip` calls pass first, then
#
# * `first = N`: the next N fail, and no more;
# * `every = K`: each K-th fails;
# * `rate = p`: a call fails with probability p, drawn from the rule's own stream (same seed, same
#   calls);
# * none of these: every call fails.
#
# `after_tokens = k` lets the answer begin and breaks it off after k tokens (an `error` event in the
# stream). A client may also ask for an error itself with the header `X-Return-Error`.

_NAMES: Final[Mapping[str, int]] = {
    "invalid_request": 400,
    "context_length": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "timeout": 408,
    "rate_limit": 429,
    "server_error": 500,
    "overloaded": 503,
}
_CODES: Final[Mapping[int, str]] = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "model_not_found",
    408: "timeout",
    429: "rate_limit",
    500: "server_error",
    503: "overloaded",
}

Count0 = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class FailureRule(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which calls fail, and how."""

    status: Annotated[int, Meta(ge=400, le=599)] | None = None
    """Of the answers; None = 503."""
    first: Count0 = 0
    every: Count0 = 0
    rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    skip: Count0 = 0
    times: Count0 = 0
    """No more than so many failures; 0 = no limit."""
    after_tokens: Count0 = 0
    retry_after_s: Count0 = 1
    path: str = ""
    """Only calls whose path ends with this; empty = all."""


class Failure(Struct, frozen=True):
    """How one call fails."""

    status: int
    code: str
    after_tokens: int = 0
    retry_after_s: int = 1


class FailureSchedule:
    """The rules in force and their counters."""

    def __init__(self, rules: list[FailureRule], *, seed: int) -> None:
        self.rules = rules
        self._seen = [0] * len(rules)
        self._failed = [0] * len(rules)
        self._rngs = [rng_stream(seed, f"serve.failures.{i}") for i in range(len(rules))]

    def judge(self, path: str) -> Failure | None:
        """Whether the call that comes now fails."""
        for index, rule in enumerate(self.rules):
            if rule.path and not path.endswith(rule.path):
                continue
            position = self._seen[index] - rule.skip
            self._seen[index] += 1
            if position < 0 or (rule.times and self._failed[index] >= rule.times):
                continue
            if self._fails(rule, index, position):
                self._failed[index] += 1
                status = 503 if rule.status is None else rule.status
                code = _CODES.get(status, "injected")
                return Failure(status, code, rule.after_tokens, rule.retry_after_s)
        return None

    def _fails(self, rule: FailureRule, index: int, position: int) -> bool:
        if rule.first:
            return position < rule.first
        if rule.every:
            return position % rule.every == rule.every - 1
        if rule.rate:
            return bool(self._rngs[index].random() < rule.rate)
        return True


def failure_from_header(value: str) -> Failure | None:
    """`X-Return-Error: 429` or `X-Return-Error: rate_limit`; None if it says neither."""
    text = value.strip().lower()
    status = _NAMES.get(text, 0)
    if text.isascii() and text.isdigit() and len(text) == 3:
        status = int(text)
    if not 400 <= status <= 599:
        return None
    code = text if text in _NAMES else _CODES.get(status, "injected")
    return Failure(status, code)
