"""From a call to requests, and from tokens to an answer: completions, chats, embeddings, scores.

A call becomes one request for each prompt and choice. The head of the answer waits for the first
token (or the end), so that a refusal or a lost replica has its HTTP status; after the first token
it is an `error` event in the stream. One chunk carries one token, and the first chunk is the first
token, because clients take their times from chunks. A client that leaves cancels its requests.

`Reply` waits and sends; what is sent is the business of a `Face` (emu/apps/serve/completions.py).
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from starlette.types import Message, Receive, Scope, Send

from emu.apps.serve.house import House
from emu.apps.serve.intake import ALLOWED_NS, Ticket
from emu.apps.serve.protocol import NAME_MAX, ApiError, Call, Failure, decode_body, read_prompts
from emu.apps.serve.schema_filler import CannotFill
from emu.apps.serve.script import (
    Ids,
    Script,
    apply_stops,
    chat_logprobs,
    completion_logprobs,
    filler_ids,
    filler_start,
    filler_text,
    make_script,
    prompt_pieces,
    salted_prefix,
)
from emu.apps.serve.world import Choice, Exchange
from emu.request import Prefix, Request, Status

# --- forms of an answer: OpenAI's completions and chats -------------------------------------------
# A `Face` turns the tokens that an exchange has so far into bytes. It keeps what has been sent in
# `Choice.sent` and decides nothing else. Plain filler has a short way: the parts of a chunk that
# are the same for all tokens are made once.

DONE = b"data: [DONE]\n\n"


class Face(Protocol):
    """What `Reply` asks for."""

    def whole(self) -> bytes:
        """The answer that is not streamed; everything has ended."""
        ...

    def opening(self) -> bytes:
        """Events before the first token's."""
        ...

    def news(self, after: int) -> bytes:
        """Events of tokens that have not been sent; `after` > 0: no more tokens than that."""
        ...

    def closing(self) -> bytes:
        """Events after the last token's."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """The answer ends in its middle."""
        ...


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(content) + b"\n\n"


def compact(content: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(content, separators=(",", ":")).encode()


def answer_text(house: House, choice: Choice) -> str:
    """The whole text of an answer."""
    if choice.script is not None:
        return choice.script.text
    return filler_text(house.tokenizer, choice.start, choice.tokens)


def usage_of(call: Call, exchange: Exchange) -> dict[str, Any]:
    """OpenAI's `usage`."""
    choices = exchange.choices
    prompt = sum(len(p) for p in call.prompts)
    produced = 0 if call.max_tokens == 0 else sum(c.produced for c in choices)
    cached = sum(c.request.prefix_hit_tokens for c in choices[:: call.n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": produced,
        "total_tokens": prompt + produced,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class OpenAiFace:
    """Completions and chats."""

    def __init__(self, house: House, call: Call, exchange: Exchange) -> None:
        self._house = house
        self._call = call
        self._exchange = exchange
        self._created = int(time.time())
        kind = "chatcmpl" if call.is_chat else "cmpl"
        self.answer_id = f"{kind}-{call.request_id or f'{house.session}-{house.next_call()}'}"
        self.extra: dict[str, Any] = {}
        """Further keys of a whole answer."""
        self._ends: dict[str, bytes] = {}

    # --- whole answers ------------------------------------------------------------------------
    def whole(self) -> bytes:
        """One JSON object."""
        call = self._call
        return compact(
            {
                "id": self.answer_id,
                "object": "chat.completion" if call.is_chat else "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._whole_choice(choice) for choice in self._exchange.choices],
                "usage": usage_of(call, self._exchange),
                "system_fingerprint": "emu",
                **self.extra,
            }
        )

    @property
    def _model(self) -> str:
        return self._call.model or self._house.model

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        call, script = self._call, choice.script
        text = "" if call.max_tokens == 0 else answer_text(self._house, choice)
        answer: dict[str, Any] = {"index": choice.index}
        if call.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if script is not None and script.tool is not None:
                tool = script.tool
                function = {"name": tool.name, "arguments": tool.arguments}
                one = {"id": tool.call_id, "type": "function", "function": function}
                message = {**message, "content": None, "tool_calls": [one]}
            answer["message"] = message
        else:
            answer["text"] = self._echoed(choice) + text if call.echo else text
        answer["logprobs"] = self._logprobs(choice)
        answer["finish_reason"] = self._finish(choice)
        answer["stop_reason"] = script.stop_reason if script is not None else None
        return answer

    def _finish(self, choice: Choice) -> str:
        reason = choice.finish_reason
        if reason == "tool_calls" and self._call.is_named_tool:
            return "stop"
        return reason

    def _prompt_pieces(self, choice: Choice) -> list[str]:
        prompt = self._call.prompts[choice.index // self._call.n]
        return prompt_pieces(self._house.tokenizer, prompt)

    def _echoed(self, choice: Choice) -> str:
        return "".join(self._prompt_pieces(choice))

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Log-probabilities of a whole answer."""
        call, script, tokenizer = self._call, choice.script, self._house.tokenizer
        if call.logprobs < 0:
            return None
        pieces = script.pieces if script is not None and call.max_tokens != 0 else []
        if call.is_chat:
            return chat_logprobs(tokenizer, pieces, 0, call.logprobs)
        if not call.echo:
            return completion_logprobs(tokenizer, pieces, 0, call.logprobs, offset=0)
        prompt = self._prompt_pieces(choice)
        found = completion_logprobs(tokenizer, prompt, 0, call.logprobs, offset=0, is_prompt=True)
        offset = sum(map(len, prompt))
        more = completion_logprobs(tokenizer, pieces, len(prompt), call.logprobs, offset=offset)
        return {key: found[key] + more[key] for key in found}

    # --- streams ------------------------------------------------------------------------------
    def opening(self) -> bytes:
        """Nothing comes before the first token; the parts of its chunk are made."""
        call = self._call
        frame = json.dumps(self._frame(), separators=(",", ":"))[:-1]
        self._start = f'data: {frame},"choices":[{{"index":'.encode()
        self._text = b',"delta":{"content":"' if call.is_chat else b',"text":"'
        self._first = b',"delta":{"role":"assistant","content":"' if call.is_chat else b',"text":"'
        close = '"}' if call.is_chat else '"'
        usage = ',"usage":null' if call.include_usage else ""
        for reason in ("", "length", "stop"):
            text = f'"{reason}"' if reason else "null"
            self._ends[reason] = (
                f'{close},"logprobs":null,"finish_reason":{text}}}]{usage}}}\n\n'.encode()
            )
        return b""

    def _frame(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def news(self, after: int) -> bytes:
        """One chunk for each token that has not been sent."""
        return b"".join(self._news(after))

    def _news(self, after: int) -> Iterator[bytes]:
        pieces = self._house.piece_bytes
        for choice in self._exchange.choices:
            end = choice.produced if after == 0 else min(choice.produced, after)
            if choice.script is not None or self._call.max_tokens == 0:
                yield from self._scripted(choice, end)
                continue
            index = b"%d" % choice.index
            last = choice.tokens - 1
            while choice.sent < end:
                position = choice.sent
                choice.sent += 1
                yield self._start
                yield index
                yield self._text if position else self._first
                yield pieces[(choice.start + position) % len(pieces)]
                tail = self._ends[choice.finish_reason if position >= last else ""]
                if self._call.continuous_usage:
                    tail = self._with_usage(tail, choice)
                yield tail

    def _with_usage(self, end: bytes, choice: Choice) -> bytes:
        usage = self._usage_so_far(choice)
        head = end.rpartition(b"]")[0]
        return head + b'],"usage":' + json.dumps(usage).encode() + b"}\n\n"

    def _usage_so_far(self, choice: Choice) -> dict[str, int]:
        prompt = choice.request.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": choice.sent,
            "total_tokens": prompt + choice.sent,
        }

    def _scripted(self, choice: Choice, end: int) -> Iterator[bytes]:
        """Chunks of an answer that is not plain filler."""
        call, script = self._call, choice.script
        while choice.sent < end:
            position = choice.sent
            choice.sent += 1
            is_last = position >= choice.tokens - 1
            one: dict[str, Any] = {"index": choice.index}
            text = script.shown[position] if script is not None and call.max_tokens != 0 else ""
            if call.is_chat:
                one["delta"] = _chat_delta(script, position, text)
            else:
                one["text"] = self._echoed(choice) + text if call.echo and not position else text
            one["logprobs"] = self._chunk_logprobs(choice, position)
            one["finish_reason"] = self._finish(choice) if is_last else None
            one["stop_reason"] = script.stop_reason if script is not None and is_last else None
            chunk = {**self._frame(), "choices": [one]}
            if call.continuous_usage:
                chunk["usage"] = self._usage_so_far(choice)
            elif call.include_usage:
                chunk["usage"] = None
            yield event(chunk)

    def _chunk_logprobs(self, choice: Choice, position: int) -> dict[str, Any] | None:
        call, script, tokenizer = self._call, choice.script, self._house.tokenizer
        if call.logprobs < 0:
            return None
        pieces = script.pieces[position : position + 1] if script is not None else []
        if call.max_tokens == 0:
            pieces = []
        if call.is_chat:
            return chat_logprobs(tokenizer, pieces, position, call.logprobs)
        before = sum(map(len, script.pieces[:position])) if script is not None else 0
        if not call.echo:
            return completion_logprobs(tokenizer, pieces, position, call.logprobs, offset=before)
        prompt = self._prompt_pieces(choice)
        offset = sum(map(len, prompt)) + before
        found = completion_logprobs(
            tokenizer, pieces, len(prompt) + position, call.logprobs, offset=offset
        )
        if position:
            return found
        first = completion_logprobs(tokenizer, prompt, 0, call.logprobs, offset=0, is_prompt=True)
        return {key: first[key] + found[key] for key in first}

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self._call.include_usage:
            return DONE
        usage = usage_of(self._call, self._exchange)
        return event({**self._frame(), "choices": [], "usage": usage}) + DONE

    def broken(self, error: ApiError) -> bytes:
        """An error event, and no end."""
        return event(error.body)


def _chat_delta(script: Script | None, position: int, text: str) -> dict[str, Any]:
    first = {"role": "assistant"} if position == 0 else {}
    if script is None or script.tool is None:
        return {**first, "content": text}
    tool = script.tool
    if position == 0:
        function = {"name": tool.name, "arguments": ""}
        head = {"index": 0, "id": tool.call_id, "type": "function", "function": function}
        return {**first, "content": None, "tool_calls": [head]}
    piece = text if position >= script.tool_head else ""
    return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}


# --- from a call to requests, and from tokens to an answer ----------------------------------------
_SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)
_JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
_LOST: Final = "the request was lost in the emulated cluster"


def make_exchange(house: House, call: Call, adapters: Collection[str]) -> Exchange:
    """The requests of a call. Raises ApiError for what no replica could ever serve.

    `adapters`: names of those that are loaded where the call came.
    """
    exchange = Exchange()
    if call.model in adapters:
        exchange.adapter = call.model
    exchange.cache_salt = call.cache_salt
    model = house.index_of(call.model)
    longest = house.longest[model]
    for prompt_index, prompt in enumerate(call.prompts):
        prompt_tokens = len(prompt)
        room = longest - prompt_tokens
        if room < 1 or (call.max_tokens is not None and call.max_tokens > room):
            asked = prompt_tokens + (call.max_tokens or 1)
            raise ApiError(
                400,
                f"this model takes at most {longest} tokens; you asked for {asked} "
                f"({prompt_tokens} in the prompt)",
                code="context_length_exceeded",
                param="messages" if call.is_chat else "prompt",
            )
        for n in range(call.n):
            index = prompt_index * call.n + n
            start = filler_start(prompt, index, len(house.tokenizer.pieces))
            script, output, limit = _script(house, call, start, index, room)
            refusal = house.holds[model](prompt_tokens, output)
            if refusal:
                raise ApiError(422, f"no replica could serve this: {refusal}", code="too_large")
            request = Request(
                request_id=-1,
                arrival_ns=-1,
                prompt_tokens=prompt_tokens,
                output_tokens=output,
                max_output_tokens=limit,
                prefix=_prefix(house, prompt, start, output, script, call.cache_salt),
                session_id=call.session_id,
                tenant=call.tenant,
                priority=call.priority,
            )
            request.model = model
            if exchange.adapter and house.has_adapters(model):
                request.adapter = exchange.adapter
            exchange.choices.append(Choice(exchange, index, request, start, script))
    return exchange


def _script(
    house: House, call: Call, start: int, index: int, room: int
) -> tuple[Script | None, int, int]:
    """(script if the answer is not plain filler, output tokens, limit)."""
    if call.max_tokens == 0:  # the prompt is scored: one token is sampled and thrown away
        return None, 1, 1
    output, limit = house.lengths.draw(call, room)
    if call.is_plain:
        return None, output, limit
    budget = room if call.max_tokens is None else call.max_tokens
    seed = start + 31 * index
    try:
        script = make_script(
            house.tokenizer,
            call.constraint,
            start=start,
            seed=seed,
            length=output,
            budget=budget,
            call_id=f"chatcmpl-tool-{house.session}{house.next_call():08x}",
        )
    except CannotFill as error:
        raise ApiError(400, f"no answer can be written: {error}", param="response_format") from None
    if call.stops or call.stop_ids:
        apply_stops(
            script,
            call.stops,
            keeps_stop=call.keeps_stop,
            stop_ids=call.stop_ids,
            least=call.min_tokens,
        )
    return script, len(script.pieces), max(limit, len(script.pieces))


def _prefix(
    house: House, prompt: Ids, start: int, output: int, script: Script | None, cache_salt: str
) -> Prefix | None:
    if not house.cluster.has_prefixes:
        return None
    ids = filler_ids(house.tokenizer, start, output)
    if script is not None:
        ids = np.array(script.ids, dtype=np.int64)
    return salted_prefix(prompt, ids, cache_salt)


class Reply:
    """The ASGI answer to a call."""

    def __init__(
        self, house: House, call: Call, exchange: Exchange, face: Face, failure: Failure | None
    ) -> None:
        self.house = house
        self.call = call
        self.exchange = exchange
        self.face = face
        self.failure = failure
        """How the answer breaks off in its middle, if a schedule says so."""
        self.enter: Callable[[int | None], None] = self._submit
        """Brings the requests into the emulation, at the instant at which the call came."""
        self._was_late = False
        self._is_slow_reader = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancel what is left of the requests if the client leaves."""
        exchange = self.exchange
        ticket: Ticket | None = scope.get("state", {}).get("ticket")
        self.enter(ticket.at_ns if ticket is not None else None)
        if ticket is not None:
            self.house.intake.end(ticket)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self.call.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        finally:
            watcher.cancel()
            if not exchange.is_ended:
                self.house.cluster.leave(exchange)

    def _submit(self, came_ns: int | None) -> None:
        self.house.cluster.submit(self.exchange, came_ns)

    async def _watch(self, receive: Receive) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                self.house.cluster.leave(self.exchange)
                return

    async def _change(self) -> bool:
        """Wait for news. False if the client has left."""
        exchange = self.exchange
        await exchange.changed.wait()
        exchange.changed.clear()
        if self.house.cluster.error is not None:
            raise ApiError(500, "the emulation has ended with an error", code="emulator_fault")
        return not exchange.has_left

    async def _whole(self, send: Send) -> None:
        exchange = self.exchange
        while not exchange.is_ended and exchange.failure() is None and not self._breaks():
            if not await self._change():
                return
        if self._breaks():
            assert self.failure is not None
            raise failure_error(self.failure)
        failed = exchange.failure()
        if failed is not None:
            raise ended_badly(failed)
        self._note_first(max(c.last_ns for c in exchange.choices))
        data = self.face.whole()
        await send_json(send, data, self._headers())

    async def _stream(self, send: Send) -> None:
        exchange, face = self.exchange, self.face
        while not any(c.produced or c.is_ended for c in exchange.choices):
            if not await self._change():
                return
        failed = exchange.failure()
        if failed is not None:
            raise ended_badly(failed)
        self._note_first(min(c.first_ns for c in exchange.choices if c.first_ns >= 0))
        await _start(send, 200, [*_SSE_HEADERS, *self._headers()])
        kernel = self.house.cluster.kernel
        after = self.failure.after_tokens if self.failure is not None else 0
        opening = face.opening()
        while True:
            data = opening + face.news(after)
            opening = b""
            if data:
                before_ns = kernel.wall_ns()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if kernel.wall_ns() - before_ns > ALLOWED_NS:
                    self._is_slow_reader = True  # the socket was full: no fault of this machine
            failed = exchange.failure()
            if failed is not None or self._breaks():
                body = face.broken(self._break_off(failed))
                await send({"type": "http.response.body", "body": body})
                return
            if exchange.is_ended and all(c.sent >= c.produced for c in exchange.choices):
                break
            try:
                if not await self._change():
                    return
            except ApiError as error:
                await send({"type": "http.response.body", "body": face.broken(error)})
                return
        self._note_last()
        await send({"type": "http.response.body", "body": face.closing()})

    # --- pace ---------------------------------------------------------------------------------
    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Once the first token is there."""
        first = self.exchange.choices[0].request.request_id
        return [
            (b"x-emu-request-id", str(first).encode()),
            (b"x-emu-pace", self.house.cluster.pace.header),
        ]

    def _note_first(self, due_ns: int) -> None:
        cluster, exchange = self.house.cluster, self.exchange
        now_ns = cluster.kernel.wall_ns()
        self._was_late = cluster.pace.first(exchange.came_ns, due_ns, now_ns)

    def _note_last(self) -> None:
        cluster, exchange = self.house.cluster, self.exchange
        if not self._is_slow_reader:
            due_ns = max(choice.last_ns for choice in exchange.choices)
            now_ns, was_late = cluster.kernel.wall_ns(), self._was_late
            cluster.pace.last(exchange.came_ns, due_ns, now_ns, was_late=was_late)

    # --- breaking off -------------------------------------------------------------------------
    def _breaks(self) -> bool:
        after = self.failure.after_tokens if self.failure is not None else 0
        return after > 0 and any(c.produced >= after for c in self.exchange.choices)

    def _break_off(self, failed: Request | None) -> ApiError:
        if failed is not None:
            return ended_badly(failed)
        assert self.failure is not None
        return failure_error(self.failure)


async def send_json(send: Send, data: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole answer."""
    length = (b"content-length", str(len(data)).encode())
    await _start(send, 200, [*_JSON_HEADERS, length, *headers])
    await send({"type": "http.response.body", "body": data})


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


def failure_error(failure: Failure) -> ApiError:
    """The answer that a failure schedule or a header asks for."""
    retry = failure.retry_after_s if failure.status in (429, 503) else None
    return ApiError(
        failure.status,
        f"injected failure ({failure.code})",
        code=failure.code,
        retry_after_s=retry,
    )


def ended_badly(request: Request) -> ApiError:
    """The HTTP answer to a request that the emulated cluster did not complete."""
    reason = request.reason
    if request.status is Status.REJECTED:
        if reason in ("prompt_too_long", "total_too_long"):
            message = "the request is longer than what is admitted here"
            return ApiError(422, message, code=reason)
        return ApiError(
            429, f"the cluster refuses the request ({reason})", type=reason, retry_after_s=1
        )
    if request.status is Status.CANCELLED:
        return ApiError(408, f"the request was cancelled ({reason})", code=reason or None)
    return ApiError(503, f"{_LOST} ({reason})", code=reason or None, retry_after_s=1)


# --- embeddings, rerank and scores: prompts that are answered with numbers ------------------------
# The emulated cost is that of the prompt: each text becomes a request with one output token, which
# is sampled and thrown away. The numbers are no model's: a vector counts pairs of neighboring
# tokens, hashed to its places, so that equal texts have equal vectors and similar texts similar
# ones.

RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS: Final = ("/score", "/v1/score")
Vector = NDArray[np.float32]
_DIMENSIONS_MAX = 65_536


class EmbeddingBody(Struct, kw_only=True):
    """`/v1/embeddings`."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1, le=_DIMENSIONS_MAX)] | None = None
    user: Annotated[str, Meta(max_length=NAME_MAX)] | None = None


class RerankBody(Struct, kw_only=True):
    """`/rerank`."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = 0
    return_documents: bool | None = True


class ScoreBody(Struct, kw_only=True):
    """`/score`: pairs, one with many, or many with many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


def vector_of(ids: Ids, dimensions: int) -> Vector:
    """A unit vector of a text."""
    pairs = ids if len(ids) < 2 else ids[:-1] * np.int64(1_000_003) + ids[1:]
    places = (pairs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    counts = np.bincount((places % np.uint64(dimensions)).astype(np.int64), minlength=dimensions)
    vector = counts.astype(np.float32)
    return vector / np.float32(np.linalg.norm(vector) or 1.0)


class PoolingFace:
    """What the three have in common: nothing streams."""

    def __init__(self, house: House, call: Call, exchange: Exchange) -> None:
        self._house = house
        self._call = call
        self._exchange = exchange

    def whole(self) -> bytes:
        """One JSON object."""
        prompt = sum(len(p) for p in self._call.prompts)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
        number = self._call.request_id or f"{self._house.session}-{self._house.next_call()}"
        model = self._call.model or self._house.model
        return compact({**self.content(number), "model": model, "usage": usage})

    def content(self, number: str) -> dict[str, Any]:
        """Everything but model and usage."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Never asked."""
        return b""

    def news(self, after: int) -> bytes:
        """Never asked."""
        return b""

    def closing(self) -> bytes:
        """Never asked."""
        return b""

    def broken(self, error: ApiError) -> bytes:
        """Never asked."""
        return compact(error.body)


class EmbeddingFace(PoolingFace):
    """`/v1/embeddings`."""

    def __init__(self, house: House, call: Call, exchange: Exchange, body: EmbeddingBody) -> None:
        super().__init__(house, call, exchange)
        self._body = body

    def content(self, number: str) -> dict[str, Any]:
        """One vector for each input."""
        size = (
            self._body.dimensions
            or self._house.plans[self._house.index_of(self._call.model)].model.hidden
        )
        data = []
        for index, prompt in enumerate(self._call.prompts):
            vector = vector_of(prompt, size)
            shown: Any = vector.tolist()
            if self._body.encoding_format == "base64":
                shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"index": index, "object": "embedding", "embedding": shown})
        return {
            "id": f"embd-{number}",
            "object": "list",
            "created": int(time.time()),
            "data": data,
        }


class RerankFace(PoolingFace):
    """`/rerank`: documents by likeness to the query."""

    def __init__(
        self, house: House, call: Call, exchange: Exchange, body: RerankBody, query: Ids
    ) -> None:
        super().__init__(house, call, exchange)
        self._body = body
        self._query = query

    def content(self, number: str) -> dict[str, Any]:
        """The best first."""
        body, encode = self._body, self._house.tokenizer.encode
        scores = _scores([self._query] * len(body.documents), [encode(d) for d in body.documents])
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        results = []
        for index in order[: body.top_n or len(order)]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        return {"id": f"rerank-{number}", "results": results}


class ScoreFace(PoolingFace):
    """`/score`."""

    def __init__(
        self, house: House, call: Call, exchange: Exchange, pairs: Sequence[tuple[Ids, Ids]]
    ) -> None:
        super().__init__(house, call, exchange)
        self._pairs = pairs

    def content(self, number: str) -> dict[str, Any]:
        """One score for each pair."""
        scores = _scores([a for a, _ in self._pairs], [b for _, b in self._pairs])
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {
            "id": f"score-{number}",
            "object": "list",
            "created": int(time.time()),
            "data": data,
        }


def _scores(left: Sequence[Ids], right: Sequence[Ids]) -> list[float]:
    pairs = zip(left, right, strict=True)
    return [round(float(np.dot(vector_of(a, 4096), vector_of(b, 4096))), 6) for a, b in pairs]


def _pooling_call(prompts: list[Ids], model: str | None, tenant: str = "") -> Call:
    return Call(
        is_chat=False,
        prompts=prompts,
        n=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        max_tokens=0,
        min_tokens=0,
        ignore_eos=False,
        tenant=tenant,
        priority=0,
        model=model or "",
    )


def read_embedding(data: bytes, house: House) -> tuple[Call, EmbeddingBody]:
    """Raises ApiError."""
    body = decode_body(data, EmbeddingBody)
    prompts = read_prompts(body.input, house.tokenizer)
    return _pooling_call(prompts, body.model, body.user or ""), body


def read_rerank(data: bytes, house: House) -> tuple[Call, RerankBody, Ids]:
    """Each document is read with the query before it. Raises ApiError."""
    body = decode_body(data, RerankBody)
    query = house.tokenizer.encode(body.query)
    if len(query) == 0:
        raise ApiError(400, "the query is empty", param="query")
    prompts = [np.concatenate((query, house.tokenizer.encode(d))) for d in body.documents]
    return _pooling_call(prompts, body.model), body, query


def read_score(data: bytes, house: House) -> tuple[Call, list[tuple[Ids, Ids]]]:
    """Raises ApiError."""
    body = decode_body(data, ScoreBody)
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right) or not right:
        raise ApiError(400, "text_1 and text_2 are as many, or text_1 is one", param="text_2")
    encode = house.tokenizer.encode
    pairs = [(encode(a), encode(b)) for a, b in zip(left, right, strict=True)]
    prompts = [np.concatenate(pair) for pair in pairs]
    if any(len(prompt) == 0 for prompt in prompts):
        raise ApiError(400, "a pair is empty", param="text_2")
    return _pooling_call(prompts, body.model), pairs
