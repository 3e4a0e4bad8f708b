"""What a call asks for, whatever its form was: from a body to a `Call`.

Pure: a body in, a `Call` or an `ApiError` out. What would change the answer and cannot be honored
is refused with 400. `docs/reference/live-api.md` lists what has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import (
    CHOICES_MAX,
    NAME_MAX,
    TOKEN_ID_MAX,
    Body,
    ChatBody,
    CompletionBody,
    Function,
    KvTransfer,
    Message,
    decode_body,
    whole,
)
from emu.apps.serve.pictures import MARK, TOKEN_ID, Given, read_image, tokens_of
from emu.apps.serve.prompted import prompted
from emu.apps.serve.script import FREE, Constraint
from emu.apps.serve.tokenizer import Ids, Tokenizer

STOPS_MAX: Final = 64


Places = tuple[tuple[int, int, int], ...]
"""(identity, first token in the prompt, tokens) of images."""


class Turn(Struct, frozen=True):
    """A message, as answers are found by."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of the tools that it calls."""


class Call(Struct, kw_only=True):
    """A completion request as the server sees it."""

    prompts: list[Ids]
    is_chat: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    tenant: str = ""
    priority: int = 0
    model: str = ""
    """As the client named it."""
    session_id: str = ""
    request_id: str = ""
    """The caller's own; empty = none given."""
    constraint: Constraint = FREE
    is_named_tool: bool = False
    reasoning_share: float = 0.0
    """Part of the output that is reasoning; the rest is the answer proper."""
    reasoning_tokens_max: int = 0
    """No more of it than this; 0 = no bound."""
    images: Places = ()
    turns: tuple[Turn, ...] = ()
    """The messages, where the call has any."""
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
            and not self.reasoning_share
            and not self.stops
            and not self.stop_ids
            and self.logprobs < 0
            and not self.echo
        )


def read_completion(data: bytes, tokenizer: Tokenizer) -> Call:
    """The call of a body of `/v1/completions`. Raises ApiError."""
    body = decode_body(data, CompletionBody)
    if body.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    prompts = read_prompts(body.prompt, tokenizer)
    call = _call(body, prompts, body.max_tokens, is_chat=False)
    call.logprobs = -1 if body.logprobs is None else body.logprobs
    call.echo = bool(body.echo)
    if isinstance(body.prompt, str):
        call.turns = (Turn("user", body.prompt),)
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
    images: list[Given] = []
    text = chat_text(body.messages, images)
    if body.tools:  # a chat template puts them in front
        text = f"{msgspec.json.encode(body.tools).decode()}\n{text}"
    prompt, places = _with_images(text, images, tokenizer)
    if len(prompt) == 0:  # an empty chat still has what a template adds
        prompt = np.zeros(1, dtype=np.int64)
    call = _call(body, [prompt], limit, is_chat=True)
    call.logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    call.images = places
    call.turns = tuple(read_turn(message, i) for i, message in enumerate(body.messages))
    call.reasoning_share = _reasoning(body)
    tools = _chosen_tools(body, int(prompt.sum()))
    if tools:
        if call.constraint is not FREE:
            raise ApiError(400, "tools beside a format are not supported", param="tools")
        call.constraint = Constraint(tools=tuple((t.name, _parameters(t)) for t in tools))
        call.is_named_tool = isinstance(body.tool_choice, dict)
    elif call.constraint is FREE or call.constraint.schema is True:
        call.constraint = prompted(text, call.constraint)
    return call


_EFFORTS: Final = {"none": 0.0, "minimal": 0.0, "low": 0.25, "medium": 0.5, "high": 0.75}


def _reasoning(body: ChatBody) -> float:
    """Part of the output that is reasoning: what a client's effort asks for."""
    effort = body.reasoning_effort
    if effort is not None:
        if effort not in _EFFORTS:
            known = ", ".join(_EFFORTS)
            raise ApiError(400, f"reasoning_effort is {known}", param="reasoning_effort")
        return _EFFORTS[effort]
    options = body.chat_template_kwargs or {}
    thinks = options.get("enable_thinking", options.get("thinking"))
    return _EFFORTS["medium"] if thinks is True else 0.0


def _parameters(tool: Function) -> dict[str, object]:
    """The schema of a tool's arguments. Raises ApiError."""
    schema = tool.parameters or {"type": "object", "properties": {}}
    if schema.get("type", "object") != "object":
        problem = f"the parameters of {tool.name!r} must be an object"
        raise ApiError(400, problem, param="tools")
    return {"type": "object", **schema}


def _chosen_tools(body: ChatBody, seed: int) -> list[Function]:
    """The functions that this answer calls.

    An emulated model has no judgment: with "auto" it calls a tool exactly if the last message is
    not the result of one; all of them, each once, if the client says `parallel_tool_calls`.
    """
    choice = body.tool_choice
    tools = body.tools or []
    if any(tool.type != "function" for tool in tools):
        raise ApiError(400, "tools are functions", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return []
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        for tool in tools:
            if tool.function.name == name:
                return [tool.function]
        raise ApiError(400, f"there is no tool {name!r}", param="tool_choice")
    if choice not in (None, "auto", "none", "required"):
        raise ApiError(400, "tool_choice is none, auto, required or a tool", param="tool_choice")
    if choice == "none":
        return []
    is_answered = body.messages[-1].role in ("tool", "function")
    if choice != "required" and is_answered:
        return []
    if body.parallel_tool_calls:
        return [tool.function for tool in tools]
    return [tools[seed % len(tools)].function]


def chat_text(messages: list[Message], images: list[Given] | None = None) -> str:
    """The messages as the model reads them: contents, a newline between two.

    Images are put into `images`, and stand as `MARK` in the text.
    """
    found = [] if images is None else images
    return "\n".join(_content(message, index, found) for index, message in enumerate(messages))


def _with_images(text: str, images: list[Given], tokenizer: Tokenizer) -> tuple[Ids, Places]:
    """The prompt's ids, with those of images in their places. Raises ApiError."""
    if not images:
        return tokenizer.encode(text), ()
    shown = tokenizer.shown
    if shown is None:
        problem = "this server takes text only (see scheduler.limit_mm_per_prompt)"
        raise ApiError(400, problem, param="messages")
    texts = text.split(MARK)
    if len(images) > shown.most or len(texts) != len(images) + 1:
        problem = f"a prompt has at most {shown.most} images, and no character U+FFFC"
        raise ApiError(400, problem, param="messages")
    parts, places, at = [tokenizer.encode(texts[0])], [], 0
    for given, after in zip(images, texts[1:], strict=True):
        at = sum(map(len, parts))
        tokens = tokens_of(given, shown)
        places.append((given.identity, at, tokens))
        parts += [np.full(tokens, TOKEN_ID, dtype=np.int64), tokenizer.encode(after)]
    return np.concatenate(parts), tuple(places)


def read_turn(message: Message, index: int = 0) -> Turn:
    """A message as answers are found by: ids of calls do not count. Raises ApiError."""
    calls = []
    for one in message.tool_calls or []:
        function = one.get("function") if isinstance(one, dict) else None
        if isinstance(function, dict):
            calls.append((str(function.get("name", "")), str(function.get("arguments", ""))))
    plain = msgspec.structs.replace(message, tool_calls=None)
    return Turn(message.role, _content(plain, index, []), tuple(calls))


def _content(message: Message, index: int, images: list[Given]) -> str:
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
        where = f"messages.{index}.content"
        if isinstance(part, dict) and kind in ("image_url", "input_image"):
            images.append(read_image(part.get("image_url"), where))
            texts.append(MARK)
            continue
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ApiError(400, "parts are texts and images", param=where)
        texts.append(text)
    return "".join(texts) + calls


def read_prompts(prompt: str | list[object], tokenizer: Tokenizer) -> list[Ids]:
    """A text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(prompt, str):
        items: list[object] = [prompt]
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


def _refusals(body: Body) -> Iterator[tuple[str, object, str]]:
    """(field, what it has, why it is refused if it has something)."""
    gone = "is gone from vLLM; use structured_outputs"
    yield "use_beam_search", body.use_beam_search, "beam search is not emulated"
    shown = "log-probabilities of prompts are shown with echo and logprobs only"
    yield "prompt_logprobs", body.prompt_logprobs, shown
    given = "token ids are not returned; /tokenize gives them"
    yield "return_token_ids", body.return_token_ids, given
    yield "cache_hit_threshold", body.cache_hit_threshold, "answers do not end by cache hits"
    yield "guided_json", body.guided_json, f"guided_json {gone}"
    yield "guided_regex", body.guided_regex, f"guided_regex {gone}"
    yield "guided_choice", body.guided_choice, f"guided_choice {gone}"
    yield "guided_grammar", body.guided_grammar, "grammars are not supported"


def _one(given: int | Sequence[object] | None) -> int:
    """A number that may be in a list, as for batches; -1 = none."""
    first = given[0] if isinstance(given, list) and given else given
    return first if isinstance(first, int) else -1


def _call(body: Body, prompts: list[Ids], max_tokens: int | None, *, is_chat: bool) -> Call:
    n = body.n or 1
    if len(prompts) * n > CHOICES_MAX:
        raise ApiError(400, f"prompts times n must be at most {CHOICES_MAX}", param="n")
    for name, value, problem in _refusals(body):
        if value:
            raise ApiError(400, problem, param=name)
    if body.best_of not in (None, n):
        raise ApiError(400, "best_of other than n is not supported", param="best_of")
    options = body.stream_options
    if options is not None and not body.stream:
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
    call = Call(prompts=prompts, max_tokens=max_tokens)
    call.is_chat, call.n, call.min_tokens = is_chat, n, min_tokens
    return msgspec.structs.replace(
        call,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
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


def _schema_of(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError:
        raise ApiError(400, "json is not a schema", param="structured_outputs.json") from None
