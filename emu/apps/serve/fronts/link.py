"""The core's side of front processes: calls come whole, answers go as frames.

To the applications a call of a front is like any other: a scope, a body, and a way to send. What
differs is how tokens leave. Of a plain stream a front gets the stencil once, and then counts: the
tokens of one instant are one frame for each front, however many streams they belong to.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Scope

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
    ToCore,
    Tokens,
    Took,
    Waits,
)
from emu.apps.serve.intake import Intake, Ticket
from emu.apps.serve.lines import Batch, FrontLine
from emu.apps.serve.stencils import Stencil
from emu.apps.serve.token_pace import TokenPace
from emu.apps.serve.world import LiveCluster
from emu.errors import RunError
from emu.process.interrupts import held

_UNTAKEN_MAX: Final = 64 * 1024
"""Bytes of an answer that may be on their way to a client; what makes more of them waits."""
_END_S: Final = 10.0
"""Wall time that a front has to end."""
_DEAD: Final = "the process has ended"
WallLate = Callable[[int], int]
"""Wall time since something was due."""
_log: Final = logging.getLogger("uvicorn.error")


class FrontOutlet:
    """Writes tokens of a stream through its front."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    @property
    def is_open(self) -> bool:
        """The client reads as fast as it is written to."""
        return self._call.untaken <= _UNTAKEN_MAX

    def write(self, data: bytes) -> None:
        """A piece of the answer."""
        if data:
            self._call.piece(data, more=True)

    def line(self, stencil: Stencil, sent: int) -> FrontLine:
        """From here on the front is told the number of tokens only; `sent` have gone already."""
        call = self._call
        call.front.send(Plain(call.number, stencil, sent))
        return FrontLine(call.front.batch, call.number, sent)

    async def written(self) -> Done | None:
        """When the answer was written; None where its client did not wait for it."""
        return await self._call.done


class _Call:
    """A call of a front, for the applications."""

    def __init__(self, front: FrontLink, number: int) -> None:
        self.front = front
        self.number = number
        self.ticket: Ticket | None = None
        self.untaken = 0
        self.done: asyncio.Future[Done | None] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = None
        self._gone = asyncio.Event()
        self._taken = asyncio.Event()
        self._has_head = False
        self._is_whole = False

    async def run(self, app: ASGIApp, called: Called) -> None:
        """Answer it."""
        self._body = called.body
        try:
            await app(self._scope(called), self.receive, self.send)
        except Exception:  # as uvicorn does: a call that fails ends alone
            _log.exception("Exception in ASGI application")
        if not self._is_whole and not self._gone.is_set():
            if not self._has_head:
                self.front.send(Head(self.number, 500, ((b"content-length", b"0"),)))
                self.piece(b"", more=False)
            else:
                self.front.send(Broken(self.number))

    def _scope(self, called: Called) -> Scope:
        state: dict[str, object] = {"outlet": FrontOutlet(self), "reset": self._reset}
        if self.ticket is not None:
            self.ticket.is_whole = True
            state["ticket"] = self.ticket
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": called.version,
            "server": called.server,
            "client": called.client,
            "scheme": called.scheme,
            "method": called.method,
            "root_path": "",
            "path": called.path,
            "raw_path": called.raw_path,
            "query_string": called.query,
            "headers": list(called.headers),
            "state": state,
        }

    def _reset(self) -> None:
        self._is_whole = True
        self.front.send(Broken(self.number))

    async def receive(self) -> Message:
        """The body, and then the news that the client has left."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The head, and pieces of the body; waits while the client does not read."""
        if message["type"] == "http.response.start":
            self._has_head = True
            headers = tuple((bytes(k), bytes(v)) for k, v in message.get("headers", ()))
            self.front.send(Head(self.number, message["status"], headers))
            return
        self._is_whole = not message.get("more_body", False)
        self.piece(message.get("body", b""), more=not self._is_whole)
        while self.untaken > _UNTAKEN_MAX and not self._gone.is_set():
            self._taken.clear()
            await self._taken.wait()

    def piece(self, data: bytes, *, more: bool) -> None:
        """Part of the body."""
        self.untaken += len(data)
        self.front.send(Body(self.number, data, more))

    def took(self, size: int) -> None:
        """The front has given so much to the client's socket."""
        self.untaken -= size
        self._taken.set()

    def leave(self) -> None:
        """The client has gone."""
        self._gone.set()
        self._taken.set()

    def end(self, done: Done | None) -> None:
        """The front is through with it."""
        self.leave()
        if not self.done.done():
            self.done.set_result(done)


class FrontLink:
    """One front process."""

    def __init__(
        self, index: int, app: ASGIApp, intake: Intake, pace: TokenPace, wall_late_ns: WallLate
    ) -> None:
        self.index = index
        self._wall_late_ns = wall_late_ns
        self.link: Framed[ToCore] = Framed(ToCore, self._on_frame, self._on_end)
        self.ended = asyncio.Event()
        self._app = app
        self._intake = intake
        self._pace = pace
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: dict[int, asyncio.Future[str]] = {}
        self._due_ns = 0
        self.batch = Batch(self._begin_batch)
        """Tokens that it has not been told of."""
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, settings: Settings) -> None:
        """Start the process; it dies with this one."""
        own, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "emu.apps.serve.fronts.front", str(its.fileno())]
            self._process = _begin(command, its.fileno())
        own.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.link, sock=own)
        self.link.send(settings)

    async def open(self, port: int) -> str:
        """Listen; why that cannot be, or empty."""
        if self.ended.is_set():
            return _DEAD
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._opening[port] = opened
        self.link.send(Open(port))
        return await opened

    def stop(self) -> None:
        """Wait for the last bytes, and for the process."""
        if self._process is None:
            return
        self.link.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, frame: Head | Body | Plain | Broken) -> None:
        """A frame of an answer, behind the tokens that came before it."""
        self._send_tokens()
        self.link.send(frame)

    def _begin_batch(self, due_ns: int) -> None:
        """Tokens of one instant leave together, behind those before them."""
        self._send_tokens()
        self._due_ns = time.monotonic_ns() - self._wall_late_ns(due_ns)

    def hurry(self) -> None:
        """A step's tokens are counted: they leave now, whatever else this turn has to do."""
        self._send_tokens()
        self.link.flush()

    def _send_tokens(self) -> None:
        numbers = self.batch.take()
        if numbers:
            self.link.send(Tokens(self._due_ns, array("I", numbers).tobytes()))

    def _on_end(self) -> None:
        self.ended.set()
        for call in self._calls.values():
            call.end(None)
        for opened in self._opening.values():
            if not opened.done():
                opened.set_result(_DEAD)

    def _on_frame(self, frame: ToCore) -> None:
        if isinstance(frame, Tally):
            self._pace.add_counts(frame.counts, frame.worst_ns, asyncio.get_running_loop().time())
        elif isinstance(frame, Opened):
            self._opening.pop(frame.port).set_result(frame.problem)
        elif isinstance(frame, Begun):
            call = self._calls[frame.number] = _Call(self, frame.number)
            call.ticket = self._intake.begin(max(0, time.monotonic_ns() - frame.came_ns))
        elif isinstance(frame, Called):
            found = self._calls.get(frame.number)
            if found is None:
                found = self._calls[frame.number] = _Call(self, frame.number)
            task = asyncio.create_task(found.run(self._app, frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._on_call(frame)

    def _on_call(self, frame: Waits | Gone | Took | Done) -> None:
        call = self._calls.get(frame.number)
        if call is None:
            return
        if isinstance(frame, Took):
            call.took(frame.size)
        elif isinstance(frame, Gone):
            call.leave()
        elif isinstance(frame, Done):
            del self._calls[frame.number]
            call.end(frame)
            if call.ticket is not None:
                self._intake.end(call.ticket)
        elif call.ticket is not None:
            self._intake.give_up(call.ticket)


def _begin(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
    """A process that no signal of a terminal reaches."""
    with held():
        return subprocess.Popen(command, pass_fds=[descriptor])


class Fronts:
    """All front processes; a port of a replica is one front's, the server's own is every one's."""

    def __init__(
        self, count: int, settings: Settings, app: ASGIApp, intake: Intake, cluster: LiveCluster
    ) -> None:
        self._settings = settings
        pace, wall_late_ns = cluster.pace.of_tokens, cluster.wall_late_ns
        self._fronts = [FrontLink(i, app, intake, pace, wall_late_ns) for i in range(count)]
        cluster.on_delivered += [front.hurry for front in self._fronts]
        self._next = 0
        self._of_port: dict[int, FrontLink] = {}
        self._is_ending = asyncio.Event()
        self.started = False

    async def start(self, main: socket.socket) -> None:
        """Start the processes, and let them listen. Raises RunError."""
        port = int(main.getsockname()[1])
        for front in self._fronts:
            await front.start(self._settings)
        for front in self._fronts:
            problem = await front.open(port)
            if problem:
                raise RunError(f"front process {front.index}: {problem}")
        self.started = True

    async def serve(self) -> None:
        """Answer calls until `end`. Raises RunError if a front dies."""
        waits = [asyncio.create_task(front.ended.wait()) for front in self._fronts]
        ends = asyncio.create_task(self._is_ending.wait())
        await asyncio.wait([*waits, ends], return_when=asyncio.FIRST_COMPLETED)
        if not self._is_ending.is_set():
            ends.cancel()
            raise RunError("a front process has ended (out of memory?)")
        for front in self._fronts:
            front.link.send(Stop())
        await asyncio.wait(waits, timeout=_END_S)

    def end(self) -> None:
        """Take no more connections, and let the last bytes leave."""
        self._is_ending.set()

    def drop(self) -> None:
        """No front stays."""
        for front in self._fronts:
            front.stop()

    async def open(self, port: int) -> str:
        """Listen; why that cannot be, or empty."""
        front = self._of_port.get(port)
        if front is None:
            front = self._of_port[port] = self._fronts[self._next % len(self._fronts)]
            self._next += 1
        return await front.open(port)

    def close(self, port: int) -> None:
        """Listen no longer; idle connections go."""
        front = self._of_port.get(port)
        if front is not None:
            front.link.send(Close(port))
