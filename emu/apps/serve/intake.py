"""The way in: when the bytes of a call came, and calls that never become whole.

A call is stamped when its first bytes reach the machine, not when the server gets round to them. As
long as a call that has come is still being read or parsed, the emulation is held before its
stamp, so that the request enters at the instant at which it came; a slow machine then delays the
answers, where this module sees it, and not the arrivals. A sender that pauses in the middle of its
body holds nothing.

`LiveProtocol` is uvicorn's HTTP/1.1 protocol with stamps and time-outs: a head or a body that
does not become whole in time loses its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import re
import socket
import struct
import sys
from typing import TYPE_CHECKING, Final, Protocol

from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from emu.apps.serve.lines import Outlet
from emu.documents import Document
from emu.kernel.wallclock import WallKernel

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent

GENERATING: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/embeddings",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
        "/generate",
        "/inference/v1/generate",
    }
)
"""Calls that become requests of the emulated cluster; others never hold it."""
BODY_FACTOR: Final = 6
"""A whole call may take so many times as long as its head."""
_PATIENCE_S: Final = 0.02
"""Wall time for which a call that is not whole yet may hold the emulation."""
_STOOD_S: Final = 0.5
"""A time-out that is so late says that this process stood, not that the client is slow."""
_AGE_MIN_NS: Final = 8_000_000
"""Ages below this are the grain of the system's clock (at most 4 ms), not lateness."""
_HEAD_BYTES_MAX: Final = 65_536
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
_TCP_INFO: Final = 11
_LAST_DATA_RECEIVED: Final = slice(52, 56)
"""`tcpi_last_data_recv` of Linux' `struct tcp_info`, ms since data came."""
_TOO_SLOW_BODY: Final = (
    b'{"error":{"message":"the request did not become whole in time",'
    b'"type":"timeout_error","param":null,"code":408}}'
)
_TOO_SLOW: Final = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TOO_SLOW_BODY), _TOO_SLOW_BODY)
)


class Ticket:
    """One call between its first byte and its entry into the emulation."""

    __slots__ = ("at_ns", "is_open", "is_whole")

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns
        """Emulated time at which it came."""
        self.is_open = True
        self.is_whole = False


class Intake:
    """Calls that have come and not yet entered; holds the kernel before the oldest."""

    def __init__(self, kernel: WallKernel) -> None:
        self.kernel = kernel
        self._open: list[tuple[int, int, Ticket]] = []
        self._count = 0

    @property
    def has_real_clock(self) -> bool:
        """Ages of the machine's sockets mean something here."""
        return self.kernel.has_real_clock

    def begin(self, age_ns: int) -> Ticket:
        """The first bytes of a call came so much wall time ago."""
        ticket = Ticket(self.kernel.wall_ns(age_ns))
        self._count += 1
        heapq.heappush(self._open, (ticket.at_ns, self._count, ticket))
        self._hold()
        return ticket

    def end(self, ticket: Ticket) -> None:
        """It has entered, been refused or gone away."""
        if ticket.is_open:
            ticket.is_open = False
            self._hold()

    def whole(self, ticket: Ticket, scope: Scope, body: bytes) -> None:
        """It came in one piece; the application is about to read it."""

    def give_up(self, ticket: Ticket) -> None:
        """Its sender pauses: time goes on without it."""
        if not ticket.is_whole:
            self.end(ticket)

    def _hold(self) -> None:
        calls = self._open
        while calls and not calls[0][2].is_open:
            heapq.heappop(calls)
        self.kernel.hold(calls[0][0] if calls else None)


class Arrivals(Protocol):
    """What is told of calls as they come: the emulation itself, or a front that passes it on."""

    @property
    def has_real_clock(self) -> bool:
        """Ages of the machine's sockets mean something here."""

    def begin(self, age_ns: int) -> Ticket:
        """The first bytes of a call came so much wall time ago."""

    def end(self, ticket: Ticket) -> None:
        """It has entered, been refused or gone away."""

    def whole(self, ticket: Ticket, scope: Scope, body: bytes) -> None:
        """It came in one piece, and not a large one."""

    def give_up(self, ticket: Ticket) -> None:
        """Its sender pauses."""


class _Reading(enum.Enum):
    """What a connection is in the middle of."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class LiveProtocol(HttpToolsProtocol):
    """uvicorn's protocol with stamps and time-outs.

    A connection may send calls ahead of their answers. A call is stamped when its turn has come,
    since it would otherwise hold the emulation that the answer before it waits for.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: Document,
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        intake: Arrivals,
        head_timeout_s: float,
    ) -> None:
        """Those of uvicorn's, and what calls are stamped by."""
        super().__init__(config, server_state, app_state, _loop)
        self._intake = intake
        self._head_timeout_s = head_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._ticket: Ticket | None = None
        self._reading = _Reading.NOTHING
        self._head_bytes = 0
        """Of a head that goes on, without those that came together with its beginning; -1 = no more
        than those."""
        self._is_timing_body = False
        self._is_deaf = False
        """What came last is no HTTP: the calls before it are answered, and nothing more is read."""
        self._answered: RequestResponseCycle | None = None
        """The call that is being answered, or was answered last."""
        self._is_unread = False
        """The application has not had a turn since that call began."""
        self._socket: socket.socket | None = None
        self._outlet: Outlet | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there: its first head is awaited."""
        super().connection_made(transport)
        self._outlet = Outlet(transport.write)
        if self._intake.has_real_clock and sys.platform == "linux":
            self._socket = transport.get_extra_info("socket")
        self._await(self._head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._outlet is not None:
            self._outlet.lose()
        self._await(0)
        if self._ticket is not None:
            self._intake.end(self._ticket)
        answered = self._answered
        if answered is not None and not answered.response_complete:  # others may wait behind it
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        if self._outlet is not None:
            self._outlet.is_open = False

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._outlet is not None:
            self._outlet.is_open = not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        if self._is_deaf:
            return
        if self._reading is not _Reading.BODY and _UPGRADE.search(data):
            data = _stay(data)
        super().data_received(data)
        self._is_unread = False
        if self.transport.is_closing():
            return
        if self._reading is _Reading.HEAD:
            self._head_bytes = 0 if self._head_bytes < 0 else self._head_bytes + len(data)
            if self._head_bytes > _HEAD_BYTES_MAX:
                self.send_400_response("Invalid HTTP request received.")
                return
        self._time()

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._reading, self._head_bytes = _Reading.HEAD, -1

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of a head; those behind a body in chunks say nothing."""
        if self._reading is _Reading.HEAD:
            super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """This is no HTTP. Where calls came before it, it is not the answer to one of them."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            super().send_400_response(msg)
        elif self._reading is not _Reading.BODY:
            cycle.keep_alive, self._is_deaf = False, True
        elif cycle is self._answered and not cycle.response_started:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """A body follows, be it empty."""
        self._reading = _Reading.BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The call is whole."""
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        if self.cycle is self._answered:
            self._note_whole()

    def on_response_complete(self) -> None:
        """The next call has its turn, if one has been sent ahead."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._is_unread = False
            self._time()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Note when a call begins."""
        self._answered, self._ticket, self._is_unread = cycle, None, True
        scope = cycle.scope
        if scope["path"] in GENERATING:
            self._ticket = self._intake.begin(self._age_ns())
            scope["state"] |= {"ticket": self._ticket, "reset": self._reset}
            if scope["http_version"] == "1.1":
                scope["state"]["outlet"] = self._outlet
            if not cycle.more_body:
                self._note_whole()
        if scope["http_version"] != "1.1":
            _leave_unframed(cycle)
        super()._start_asgi_task(cycle, app)

    def _note_whole(self) -> None:
        """The body of the call that is to be answered is there."""
        ticket, cycle = self._ticket, self._answered
        if ticket is None or ticket.is_whole or cycle is None:
            return
        ticket.is_whole = True
        if self._is_unread and len(cycle.body) <= HIGH_WATER_LIMIT:  # else its reader lets it come
            self._intake.whole(ticket, dict(cycle.scope), bytes(cycle.body))

    def _time(self) -> None:
        """Set a limit to what must come next, unless that is an answer."""
        answered = self._answered
        if self._reading is _Reading.NOTHING:
            if self._deadline is not None:
                self._await(0)
            self._is_timing_body = False
        elif self._reading is _Reading.HEAD:
            is_next = answered is None or answered.response_complete
            if is_next and self._deadline is None:  # after an idle connection
                self._await(self._head_timeout_s)
        elif self.cycle is answered and not self._is_timing_body:
            self._is_timing_body = True
            self._await(BODY_FACTOR * self._head_timeout_s)
            if self._ticket is not None:
                give_up = self._intake.give_up
                self._patience = self.loop.call_later(_PATIENCE_S, give_up, self._ticket)

    def _reset(self) -> None:
        """Reset the connection: a client sees no end of the answer, as when an engine dies."""
        given = self.transport.get_extra_info("socket")
        if given is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError):
                given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _age_ns(self) -> int:
        """Wall time since the data came that has just been read."""
        if self._socket is None:
            return 0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 104)
        except OSError:  # not a TCP socket, or gone already
            return 0
        age_ns = int.from_bytes(info[_LAST_DATA_RECEIVED], "little") * 1_000_000
        return age_ns if _AGE_MIN_NS < age_ns < 3_600_000_000_000 else 0

    def _await(self, limit_s: float) -> None:
        """From now on so much wall time for what must come next; 0 = no limit."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._patience is not None and limit_s == 0:
            self._patience.cancel()
            self._patience = None
        if limit_s > 0:
            self._deadline = self.loop.call_later(limit_s, self._on_deadline)

    def _on_deadline(self) -> None:
        late_s = self.loop.time() - self._deadline.when() if self._deadline else 0.0
        self._deadline = None
        if self.transport.is_closing():
            return
        if late_s > _STOOD_S:  # this process stood, and may not have read what came meanwhile
            self._deadline = self.loop.call_later(_STOOD_S, self._on_deadline)
            return
        if self._is_timing_body:  # the application waits for the rest
            self.transport.abort()
            return
        self.transport.write(_TOO_SLOW)
        self.transport.close()


def _stay(data: bytes) -> bytes:
    """The head that is in these bytes, without its wish to speak another protocol from here on.

    There is none; of a call that has the wish the parser would leave out the body.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest


def _leave_unframed(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks, which uvicorn would send: an answer ends with its connection."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
