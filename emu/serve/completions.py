"""The two completion endpoints: from a call to requests, and from tokens to chunks.

A call becomes one request for each prompt and choice. The head of the answer waits for the first
token (or the end), so that a refusal or a lost replica has its HTTP status; after the first token
it is an `error` event in the stream. One chunk carries one token, and the first chunk is the first
token, because clients take their times from chunks. A client that leaves cancels its requests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from starlette.types import Message, Receive, Scope, Send

from emu.request import Prefix, Request, Status
from emu.serve.failures import Failure
from emu.serve.house import House
from emu.serve.intake import Ticket
from emu.serve.pace import ALLOWED_NS
from emu.serve.protocol import ApiError, Call, error_body
from emu.serve.tokens import Ids, filler_ids, filler_start, filler_text
from emu.serve.world import Choice, Exchange

_SSE_HEADERS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"),)
_JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
_DONE: Final = b"data: [DONE]\n\n"
_LOST: Final = "the request was lost in the emulated cluster"


def make_exchange(house: House, call: Call) -> Exchange:
    """The requests of a call. Raises ApiError for what no replica could ever serve."""
    exchange = Exchange()
    for prompt_index, prompt in enumerate(call.prompts):
        prompt_tokens = len(prompt)
        room = house.max_model_tokens - prompt_tokens
        if room < 1 or (call.max_tokens is not None and call.max_tokens > room):
            asked = prompt_tokens + (call.max_tokens or 1)
            raise ApiError(
                400,
                f"this model takes at most {house.max_model_tokens} tokens; you asked for {asked} "
                f"({prompt_tokens} in the prompt)",
                code="context_length_exceeded",
                param="messages" if call.is_chat else "prompt",
            )
        for n in range(call.n):
            index = prompt_index * call.n + n
            output, limit = house.lengths.draw(call, room)
            refusal = house.holds(prompt_tokens, output)
            if refusal:
                raise ApiError(422, f"no replica could serve this: {refusal}", code="too_large")
            start = filler_start(prompt, index, len(house.tokenizer.pieces))
            request = Request(
                request_id=-1,
                arrival_ns=-1,
                prompt_tokens=prompt_tokens,
                output_tokens=output,
                max_output_tokens=limit,
                prefix=_prefix(house, prompt, start, output),
                session_id=call.session_id,
                tenant=call.tenant,
                priority=call.priority,
            )
            exchange.choices.append(Choice(exchange, index, request, start))
    return exchange


def _prefix(house: House, prompt: Ids, start: int, output: int) -> Prefix | None:
    if not house.cluster.has_prefixes:
        return None
    return Prefix(np.concatenate((prompt, filler_ids(house.tokenizer, start, output))))


class Reply:
    """The ASGI answer to a call."""

    def __init__(
        self, house: House, call: Call, exchange: Exchange, failure: Failure | None
    ) -> None:
        self.house = house
        self.call = call
        self.exchange = exchange
        self.failure = failure
        """How the answer breaks off in its middle, if a schedule says so."""
        self._created = int(time.time())
        kind = "chatcmpl" if call.is_chat else "cmpl"
        number = house.next_call()
        self._id = f"{kind}-{call.request_id or f'{house.session}-{number}'}"
        self._was_late = False
        self._is_slow_reader = False
        self._chunk_ends: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancel what is left of the requests if the client leaves."""
        exchange = self.exchange
        ticket: Ticket | None = scope.get("state", {}).get("ticket")
        self.house.cluster.submit(exchange, ticket.at_ns if ticket is not None else None)
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

    async def _watch(self, receive: Receive) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                self.house.cluster.leave(self.exchange)
                return

    async def _change(self) -> bool:
        """Wait for news. False if nobody waits for the answer any more."""
        exchange = self.exchange
        await exchange.changed.wait()
        exchange.changed.clear()
        if self.house.cluster.error is not None:
            raise ApiError(500, "the emulation has ended with an error", code="emulator_fault")
        return not exchange.has_left

    # --- whole answers ------------------------------------------------------------------------
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
            raise _ended_badly(failed)
        self._note_first(max(c.last_ns for c in exchange.choices))
        call = self.call
        body = {
            "id": self._id,
            "object": "chat.completion" if call.is_chat else "text_completion",
            "created": self._created,
            "model": self.house.model,
            "choices": [self._whole_choice(choice) for choice in exchange.choices],
            "usage": self._usage(),
            "system_fingerprint": "emu",
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        length = (b"content-length", str(len(data)).encode())
        await _start(send, 200, [*_JSON_HEADERS, length, *self._headers()])
        await send({"type": "http.response.body", "body": data})

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = filler_text(self.house.tokenizer, choice.start, choice.request.output_tokens)
        answer: dict[str, Any] = {"index": choice.index}
        if self.call.is_chat:
            answer["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            answer["text"] = text
        return {**answer, "logprobs": None, "finish_reason": choice.finish_reason}

    def _usage(self) -> dict[str, Any]:
        call = self.call
        choices = self.exchange.choices
        prompt = sum(len(p) for p in call.prompts)
        produced = sum(c.produced for c in choices)
        cached = sum(c.request.prefix_hit_tokens for c in choices[:: call.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": produced,
            "total_tokens": prompt + produced,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # --- streams ------------------------------------------------------------------------------
    async def _stream(self, send: Send) -> None:
        exchange = self.exchange
        while not any(c.produced or c.is_ended for c in exchange.choices):
            if not await self._change():
                return
        failed = exchange.failure()
        if failed is not None:
            raise _ended_badly(failed)
        self._prepare()
        self._note_first(min(c.first_ns for c in exchange.choices if c.first_ns >= 0))
        await _start(send, 200, [*_SSE_HEADERS, (b"cache-control", b"no-cache"), *self._headers()])
        kernel = self.house.cluster.kernel
        while True:
            data = b"".join(self._news())
            if data:
                before_ns = kernel.wall_ns()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if kernel.wall_ns() - before_ns > ALLOWED_NS:
                    self._is_slow_reader = True  # the socket was full: no fault of this machine
            failed = exchange.failure()
            if failed is not None or self._breaks():
                await send({"type": "http.response.body", "body": self._break_off(failed)})
                return
            if exchange.is_ended and all(c.sent >= c.produced for c in exchange.choices):
                break
            try:
                if not await self._change():
                    return
            except ApiError as error:
                await send({"type": "http.response.body", "body": _event(error.body)})
                return
        self._note_last()
        last = _DONE
        if self.call.include_usage:
            last = _event({**self._frame(), "choices": [], "usage": self._usage()}) + _DONE
        await send({"type": "http.response.body", "body": last})

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

    def _breaks(self) -> bool:
        after = self.failure.after_tokens if self.failure is not None else 0
        return after > 0 and any(c.produced >= after for c in self.exchange.choices)

    def _break_off(self, failed: Request | None) -> bytes:
        if failed is not None:
            return _event(_ended_badly(failed).body)
        assert self.failure is not None
        return _event(failure_error(self.failure).body)

    def _frame(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.call.is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.house.model,
        }

    def _prepare(self) -> None:
        """The parts of a chunk that are the same for all tokens."""
        frame = json.dumps(self._frame(), separators=(",", ":"))[:-1]
        self._chunk_start = f'data: {frame},"choices":[{{"index":'.encode()
        self._chunk_text = b',"delta":{"content":"' if self.call.is_chat else b',"text":"'
        self._chunk_first = (
            b',"delta":{"role":"assistant","content":"' if self.call.is_chat else b',"text":"'
        )
        close = '"}' if self.call.is_chat else '"'
        usage = ',"usage":null' if self.call.include_usage else ""
        for reason in ("", "length", "stop"):
            text = f'"{reason}"' if reason else "null"
            self._chunk_ends[reason] = (
                f'{close},"logprobs":null,"finish_reason":{text}}}]{usage}}}\n\n'.encode()
            )

    def _news(self) -> Iterator[bytes]:
        """One chunk for each token that has not been sent."""
        pieces = self.house.piece_bytes
        after = self.failure.after_tokens if self.failure is not None else 0
        for choice in self.exchange.choices:
            index = b"%d" % choice.index
            last = choice.request.output_tokens - 1
            end = choice.produced if after == 0 else min(choice.produced, after)
            while choice.sent < end:
                position = choice.sent
                choice.sent += 1
                yield self._chunk_start
                yield index
                yield self._chunk_text if position else self._chunk_first
                yield pieces[(choice.start + position) % len(pieces)]
                tail = self._chunk_ends[choice.finish_reason if position >= last else ""]
                if self.call.continuous_usage:
                    tail = self._with_usage(tail, choice)
                yield tail

    def _with_usage(self, end: bytes, choice: Choice) -> bytes:
        prompt = choice.request.prompt_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": choice.sent,
            "total_tokens": prompt + choice.sent,
        }
        head = end.rpartition(b"]")[0]
        return head + b'],"usage":' + json.dumps(usage).encode() + b"}\n\n"


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def failure_error(failure: Failure) -> ApiError:
    """The answer that a failure schedule or a header asks for."""
    retry = failure.retry_after_s if failure.status in (429, 503) else None
    return ApiError(
        failure.status,
        f"injected failure ({failure.code})",
        code=failure.code,
        retry_after_s=retry,
    )


def _ended_badly(request: Request) -> ApiError:
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


__all__ = ["Reply", "error_body", "failure_error", "make_exchange"]
