"""From tokens to an answer: `Reply` waits and sends; what is sent is the business of its face.

The head of the answer waits for the first token (or the end), so that a refusal or a lost replica
has its HTTP status; after the first token it is an `error` event in the stream. One chunk carries
one token, and the first chunk is the first token, because clients take their times from chunks. A
client that leaves cancels its requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.faces import Face
from emu.apps.serve.failures import Failure, failure_error
from emu.apps.serve.fronts.link import FrontOutlet
from emu.apps.serve.intake import Ticket
from emu.apps.serve.lines import Outlet, SocketLine
from emu.apps.serve.pace import ALLOWED_NS, AnswerPace
from emu.request import Request, Status

_SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)
_JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
_LOST: Final = "the request was lost in the emulated cluster"


def reset(scope: Scope) -> bool:
    """Reset the connection of a call; False where nothing lower down can."""
    call = scope.get("state", {}).get("reset")
    if call is not None:
        call()
    return call is not None


async def until_gone(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Broken:
    """A call that a network fails before anything is answered."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reset the connection, or say nothing for as long as the client waits."""
        if self._failure.mode == "reset" and reset(scope):
            return
        await until_gone(receive)


class Reply:
    """The ASGI answer to a call."""

    def __init__(self, face: Face, failure: Failure | None) -> None:
        self.face = face
        self.service = face.service
        self.call = face.call
        self.exchange = face.exchange
        self.failure = failure
        """How the answer breaks off in its middle, if a schedule says so."""
        self.enter: Callable[[int | None], None] | None = None
        """Brings the requests into the emulation in its own way, at the instant at which the call
        came."""
        self._pace: AnswerPace | None = None
        self._is_slow_reader = False
        self._scope: Scope = {}
        self._outlet: Outlet | FrontOutlet | None = None
        """The short way to the client, where there is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancel what is left of the requests if the client leaves."""
        exchange = self.exchange
        ticket: Ticket | None = scope.get("state", {}).get("ticket")
        came_ns = ticket.at_ns if ticket is not None else None
        if self.enter is not None:
            self.enter(came_ns)
        else:
            self.service.cluster.submit(exchange, came_ns)
        if ticket is not None:
            self.service.intake.end(ticket)
        self._scope = scope
        self._outlet = scope.get("state", {}).get("outlet")
        watcher: asyncio.Task[None] | None = None
        outlet = self._outlet
        if isinstance(outlet, Outlet):
            outlet.on_lost = self._left
            if outlet.is_lost:
                self._left()
        else:
            watcher = asyncio.create_task(self._watch(receive))
        try:
            if self.call.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        finally:
            if watcher is not None:
                watcher.cancel()
            if isinstance(outlet, Outlet):
                outlet.on_lost = None
            if not exchange.is_ended:
                self.service.cluster.leave(exchange)
            else:
                exchange.choices.clear()  # a cycle, which would wait for Python's collector

    def _left(self) -> None:
        self.service.cluster.leave(self.exchange)

    async def _watch(self, receive: Receive) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                self._left()
                return

    async def _change(self) -> bool:
        """Wait for news. False if the client has left."""
        exchange = self.exchange
        await exchange.changed.wait()
        exchange.changed.clear()
        if self.service.cluster.error is not None:
            raise ApiError(500, "the emulation has ended with an error", code="emulator_fault")
        return not exchange.has_left

    async def _whole(self, send: Send) -> None:
        exchange = self.exchange
        while not exchange.is_ended and exchange.failure() is None and not self._breaks():
            if not await self._change():
                return
        if self._breaks():
            assert self.failure is not None
            if await self._fall_silent(None):
                return
            raise failure_error(self.failure)
        failed = exchange.failure()
        if failed is not None:
            raise ended_badly(failed)
        due_ns = max(c.last_ns for c in exchange.choices)
        begun = [c.first_ns for c in exchange.choices if c.first_ns >= 0]
        self._note_first(due_ns, min(begun, default=due_ns))
        data = self.face.whole()
        await self._dawdle()
        await send_json(send, data, self._headers())
        await self._note_end(max(c.last_ns for c in exchange.choices))

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
        is_slow = self.failure is not None and self.failure.mode == "slow"
        after = self.failure.after_tokens if self.failure is not None and not is_slow else 0
        opening = face.opening()
        while True:
            data = opening + face.news(after)
            opening = b""
            if data:
                await self._send_piece(send, data)
            await self._dawdle()
            failed = exchange.failure()
            if failed is not None or self._breaks():
                if await self._fall_silent(failed):
                    return
                body = face.broken(self._break_off(failed))
                await send({"type": "http.response.body", "body": body})
                return
            if exchange.is_ended and all(c.sent >= c.produced for c in exchange.choices):
                break
            if any(c.sent < c.produced for c in exchange.choices) and not after:
                continue  # tokens that came while these were written
            try:
                self._shorten()
                if not await self._change():
                    return
            except ApiError as error:
                await send({"type": "http.response.body", "body": face.broken(error)})
                return
            finally:
                exchange.line = exchange.on_token = None
        self._note_last()
        assert self._pace is not None
        await send({"type": "http.response.body", "body": face.closing(self._pace)})
        await self._note_end(min(c.first_ns for c in exchange.choices if c.first_ns >= 0))

    async def _send_piece(self, send: Send, data: bytes) -> None:
        """Part of the stream, by the short way if it is free."""
        if isinstance(self._outlet, Outlet) and self._outlet.is_open:
            self._outlet.write(data)
            return
        kernel = self.service.cluster.kernel
        before_ns = kernel.wall_ns()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        if kernel.wall_ns() - before_ns > ALLOWED_NS:
            self._is_slow_reader = True  # the socket was full: no fault of this machine

    def _shorten(self) -> None:
        """From here on tokens go past all layers as they come, where the answer allows it."""
        outlet, face, exchange = self._outlet, self.face, self.exchange
        if outlet is None or self.failure is not None:
            return
        stencil = face.stencil
        if stencil is None:
            exchange.on_token = partial(self._write_news, outlet)
            return
        (choice,) = exchange.choices
        if isinstance(outlet, FrontOutlet):
            exchange.line = outlet.line(stencil, choice.sent)
        else:
            exchange.line = SocketLine(stencil, choice.sent, outlet, self.service.piece_bytes)

    def _write_news(self, outlet: Outlet | FrontOutlet, due_ns: int) -> int:
        """What is new of an answer that has no stencil."""
        if not outlet.is_open:
            self.exchange.changed.set()
            return 0
        outlet.write(self.face.news(0))
        return 1

    async def _dawdle(self) -> None:
        """A slow answer takes its time with each piece, which is no lateness of this machine."""
        if self.failure is not None and self.failure.delay_s and self.failure.mode == "slow":
            self._is_slow_reader = True
            await asyncio.sleep(self.failure.delay_s)

    async def _fall_silent(self, failed: Request | None) -> bool:
        """Break off as a network does; False where the client is to be told why."""
        is_lost = failed is not None and failed.status is Status.FAILED
        if is_lost and self.service.options.lost == "reset":
            return reset(self._scope)
        if failed is not None or self.failure is None or self.failure.mode == "status":
            return False
        if self.failure.mode == "reset":
            return reset(self._scope)
        while not self.exchange.has_left:
            await self.exchange.changed.wait()
            self.exchange.changed.clear()
        return True

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Once the first token is there."""
        first = self.exchange.choices[0].request.request_id
        return [
            (b"x-emu-request-id", str(first).encode()),
            (b"x-emu-pace", self.service.cluster.pace.header),
            (b"x-emu-answer-pace", self._answer_pace()),
        ]

    def _answer_pace(self) -> bytes:
        """The verdict on this answer, up to its first token, or whole if it is not streamed."""
        pace = self._pace
        assert pace is not None
        return f"{pace.verdict}; late={pace.late_ns / 1e6:.1f}ms".encode()

    def _note_first(self, due_ns: int, token_ns: int | None = None) -> None:
        cluster, exchange = self.service.cluster, self.exchange
        now_ns = cluster.kernel.wall_ns()
        self._pace = cluster.pace.first(exchange.came_ns, due_ns, now_ns, token_ns)

    def _note_last(self) -> None:
        cluster, exchange = self.service.cluster, self.exchange
        assert self._pace is not None
        if not self._is_slow_reader:
            due_ns = max(choice.last_ns for choice in exchange.choices)
            now_ns = cluster.kernel.wall_ns()
            cluster.pace.last(self._pace, exchange.came_ns, due_ns, now_ns)

    async def _note_end(self, first_due_ns: int) -> None:
        """The answer is whole: what a front has written later than it was given counts as well."""
        cluster, exchange, pace = self.service.cluster, self.exchange, self._pace
        assert pace is not None
        done = await self._outlet.written() if isinstance(self._outlet, FrontOutlet) else None
        if done is not None and not done.is_slow and not self._is_slow_reader:
            now_ns, wall_ns = time.monotonic_ns(), cluster.kernel.wall_ns
            written = [(first_due_ns, wall_ns(now_ns - done.first_ns))]
            if self.call.stream:
                due_ns = max(choice.last_ns for choice in exchange.choices)
                written.append((due_ns, wall_ns(now_ns - done.last_ns)))
            cluster.pace.correct(pace, exchange.came_ns, written)
        cluster.note_pace(exchange, pace)

    def _breaks(self) -> bool:
        is_slow = self.failure is not None and self.failure.mode == "slow"
        after = self.failure.after_tokens if self.failure is not None and not is_slow else 0
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
