"""A front process: `python -m emu.apps.serve.fronts.front DESCRIPTOR`.

It listens on its ports, reads calls whole, and writes answers as the core says. It ends when the
core tells it to, or has gone. Signals that a terminal sends to a group of processes are the core's.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import uvloop
from starlette.types import Receive, Scope, Send

from emu.apps.serve.fronts.framed import Framed
from emu.apps.serve.fronts.frames import (
    Begun,
    Body,
    Broken,
    Called,
    Close,
    Done,
    Gone,
    Head,
    Open,
    Opened,
    Plain,
    Settings,
    Stop,
    Tally,
    ToFront,
    Tokens,
    Took,
    Waits,
)
from emu.apps.serve.garbage import Garbage
from emu.apps.serve.intake import LiveProtocol, Ticket
from emu.apps.serve.lines import Counted, Outlet, SocketLine, count_up
from emu.apps.serve.listening import OwnPorts, make_web_server
from emu.apps.serve.token_pace import BUCKETS, TokenPace

_TALLY_S: Final = 0.2


class _Ticket(Ticket):
    """A call between its first byte and its end, with the number that the core knows it by."""

    __slots__ = ("is_passed_on", "number")

    def __init__(self, at_ns: int, number: int) -> None:
        super().__init__(at_ns)
        self.number = number
        self.is_passed_on = False
        """The core has the whole call."""


class _Intake:
    """Tells the core when calls come."""

    has_real_clock = True

    def __init__(
        self, link: Framed[ToFront], on_whole: Callable[[_Ticket, Scope, bytes], None]
    ) -> None:
        self._link = link
        self._on_whole = on_whole
        self._count = 0

    def next_number(self) -> int:
        """Return the number of the next call."""
        self._count += 1
        return self._count

    def begin(self, age_ns: int) -> _Ticket:
        """The first bytes of a call came so much wall time ago."""
        ticket = _Ticket(time.monotonic_ns() - age_ns, self.next_number())
        self._link.send(Begun(ticket.number, ticket.at_ns))
        return ticket

    def end(self, ticket: Ticket) -> None:
        """Its connection has ended, which the call hears itself."""

    def whole(self, ticket: Ticket, scope: Scope, body: bytes) -> None:
        """It came in one piece."""
        assert isinstance(ticket, _Ticket)
        self._on_whole(ticket, scope, body)

    def give_up(self, ticket: Ticket) -> None:
        """Its sender pauses."""
        assert isinstance(ticket, _Ticket)
        if not ticket.is_whole:
            self._link.send(Waits(ticket.number))


class _Answer:
    """What has come of one answer, and what of it has been written."""

    def __init__(self, front: Front, number: int, scope: Scope) -> None:
        self._front = front
        self.number = number
        self.outlet: Outlet | None = scope["state"].get("outlet")
        self._reset = scope["state"].get("reset")
        self._inbox: deque[Head | Body | Counted | Broken] = deque()
        self._changed = asyncio.Event()
        self._stream: Counted | None = None
        """Where tokens count."""
        self.first_ns = self.last_ns = 0
        self.is_slow = False
        self._has_left = False

    def take(self, frame: Head | Body | Plain | Broken) -> None:
        """The next frame; what was before it is complete."""
        if self._stream is not None:
            self._stream.line = None
        if isinstance(frame, Plain):
            stream = self._stream = Counted(frame.stencil, frame.sent, self._changed.set)
            self._front.counted[self.number] = stream
            self._inbox.append(stream)
        else:
            self._inbox.append(frame)
        self._changed.set()

    def leave(self) -> None:
        """The client has gone."""
        self._has_left = True
        self._changed.set()

    async def write(self, send: Send) -> None:
        """Write until the answer is whole, or its client has gone."""
        stream: Counted | None = None
        while not self._has_left:
            if not self._inbox:
                await self._catch_up(stream, send)
                if not self._inbox:
                    self._go_live(stream)
                    await self._changed.wait()
                    self._changed.clear()
                continue
            frame = self._inbox.popleft()
            if isinstance(frame, Counted):
                stream = frame
                continue
            await self._catch_up(stream, send)
            stream = None
            if isinstance(frame, Broken):
                if self._reset is not None:
                    self._reset()
                return
            if isinstance(frame, Head):
                await send(
                    {
                        "type": "http.response.start",
                        "status": frame.status,
                        "headers": list(frame.headers),
                    }
                )
                continue
            await self._piece(frame.data, send, more=frame.more)
            self._front.link.send(Took(self.number, len(frame.data)))
            if not frame.more:
                return

    def _go_live(self, stream: Counted | None) -> None:
        """Everything that has come is written: tokens need not wait for this task any more."""
        if stream is not None and self.outlet is not None:
            stream.line = SocketLine(stream.stencil, stream.sent, self.outlet, self._front.pieces)

    async def _catch_up(self, stream: Counted | None, send: Send) -> None:
        """Tokens that came while something else was written, or the client did not read."""
        while stream is not None and stream.sent < stream.produced:
            await self._piece(stream.unsent(self._front.pieces), send, more=True)

    async def _piece(self, data: bytes, send: Send, *, more: bool) -> None:
        self.is_slow |= self.outlet is not None and not self.outlet.is_open
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self.last_ns = time.monotonic_ns()
        self.first_ns = self.first_ns or self.last_ns


class Front:
    """The process."""

    def __init__(self) -> None:
        self.link: Framed[ToFront] = Framed(ToFront, self._on_frame, self._on_end)
        self.pieces: list[bytes] = []
        self._settings: asyncio.Future[Settings] = asyncio.get_running_loop().create_future()
        self._intake = _Intake(self.link, self._pass_on)
        self._answers: dict[int, _Answer] = {}
        self.counted: dict[int, Counted] = {}
        """Of these, the plain streams whose tokens count."""
        self._ports: OwnPorts | None = None
        self._pace = TokenPace()
        self._garbage = Garbage()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, descriptor: int) -> None:
        """Serve until the core ends it; `descriptor`: the socket that leads to the core."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.link, sock=socket.socket(fileno=descriptor))
        settings = await self._settings
        self.pieces = settings.pieces
        self._body_bytes_max = settings.body_bytes_max
        protocol = partial(
            LiveProtocol, intake=self._intake, head_timeout_s=settings.header_timeout_s
        )
        server = make_web_server(self, protocol, settings.tls_cert, settings.tls_key)
        self._ports = OwnPorts(server, settings.host, is_shared=True)
        self._garbage.begin()
        tally = asyncio.create_task(self._tell())
        await self._ports.serve()
        tally.cancel()
        self.link.close()

    def _on_end(self) -> None:
        """The core has gone."""
        if self._ports is None:
            sys.exit(0)
        self._ports.end()

    def _on_frame(self, frame: ToFront) -> None:
        if isinstance(frame, Tokens):
            count = count_up(frame.numbers(), self.counted, frame.due_ns)
            if count:
                self._pace.left(time.monotonic_ns() - frame.due_ns, count)
        elif isinstance(frame, Head | Body | Plain | Broken):
            answer = self._answers.get(frame.number)
            if answer is not None:
                answer.take(frame)
        elif isinstance(frame, Settings):
            self._settings.set_result(frame)
        elif isinstance(frame, Open):
            task = asyncio.create_task(self._open(frame.port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(frame, Close):
            assert self._ports is not None
            self._ports.close(frame.port)
        else:
            assert isinstance(frame, Stop)
            self._on_end()

    async def _open(self, port: int) -> None:
        while self._ports is None or not self._ports.started:  # noqa: ASYNC110 (a few turns)
            await asyncio.sleep(0.001)
        self.link.send(Opened(port, await self._ports.open(port)))

    def _pass_on(self, ticket: _Ticket, scope: Scope, body: bytes) -> None:
        """The emulation waits for this call: the core has it before its task here has begun."""
        if len(body) <= self._body_bytes_max:
            number = ticket.number
            self._answers[number] = _Answer(self, number, scope)
            ticket.is_passed_on = True
            self.link.send(_called(number, scope, body))
            self.link.flush()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call: an ASGI application."""
        ticket: _Ticket | None = scope["state"].get("ticket")
        number = ticket.number if ticket is not None else self._intake.next_number()
        is_passed_on = ticket is not None and ticket.is_passed_on
        answer = self._answers[number] if is_passed_on else _Answer(self, number, scope)
        self._answers[number] = answer
        watcher: asyncio.Task[None] | None = None
        try:
            if not is_passed_on:
                body = await self._body(scope, receive)
                if body is None:
                    return
                self.link.send(_called(number, scope, body))
            if answer.outlet is None:
                watcher = asyncio.create_task(self._watch(answer, receive))
            else:
                answer.outlet.on_lost = partial(self._lost, answer)
                if answer.outlet.is_lost:
                    self._lost(answer)
            await answer.write(send)
        finally:
            if answer.outlet is not None:
                answer.outlet.on_lost = None
            if watcher is not None:
                watcher.cancel()
            del self._answers[number]
            self.counted.pop(number, None)
            self.link.send(Done(number, answer.first_ns, answer.last_ns, answer.is_slow))

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or as much of it as shows that it is too long; None if the client left."""
        headers = dict(scope["headers"])
        given, parts, size = headers.get(b"content-length", b""), [], 0
        if given.isdigit() and int(given) > self._body_bytes_max:
            return b""
        while size <= self._body_bytes_max:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body", False):
                break
        return b"".join(parts)

    async def _watch(self, answer: _Answer, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._lost(answer)

    def _lost(self, answer: _Answer) -> None:
        self.link.send(Gone(answer.number))
        answer.leave()

    async def _tell(self) -> None:
        """How late tokens were, again and again."""
        pace = self._pace
        while True:
            await asyncio.sleep(_TALLY_S)
            self._garbage.tick(is_idle=not self._answers)
            if pace.tokens:
                self.link.send(Tally(pace.counts, pace.worst_ns))
                pace.counts = [0] * BUCKETS
                pace.worst_ns = 0


def _called(number: int, scope: Scope, whole: bytes) -> Called:
    return Called(
        number,
        method=scope["method"],
        scheme=scope["scheme"],
        version=scope["http_version"],
        path=scope["path"],
        raw_path=scope["raw_path"],
        query=scope["query_string"],
        headers=tuple(scope["headers"]),
        server=scope["server"],
        client=scope["client"],
        body=whole,
    )


async def main(descriptor: int) -> None:
    """The process; `descriptor`: the socket that leads to the core."""
    await Front().run(descriptor)


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
