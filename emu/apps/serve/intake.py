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
import heapq
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, Final

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from emu.apps.serve.protocol import ApiError, error_body
from emu.kernel.wallclock import WallKernel
from emu.units import NS_PER_S

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
_AGE_MIN_NS: Final = 8_000_000
"""Ages below this are the grain of the system's clock (at most 4 ms), not lateness."""
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

    def give_up(self, ticket: Ticket) -> None:
        """Its sender pauses: time goes on without it."""
        if not ticket.is_whole:
            self.end(ticket)

    def _hold(self) -> None:
        calls = self._open
        while calls and not calls[0][2].is_open:
            heapq.heappop(calls)
        self.kernel.hold(calls[0][0] if calls else None)


class LiveProtocol(H11Protocol):
    """uvicorn's protocol with stamps and time-outs."""

    def __init__(self, *args: Any, intake: Intake, head_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._intake = intake
        self._head_timeout_s = head_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._ticket: Ticket | None = None
        self._is_timing_body = False
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there: its first head is awaited."""
        super().connection_made(transport)
        if self._intake.kernel.has_real_clock and hasattr(socket, "TCP_INFO"):
            self._socket = transport.get_extra_info("socket")
        self._await(self._head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._await(0)
        if self._ticket is not None:
            self._intake.end(self._ticket)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        super().data_received(data)
        has_begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if has_begun and self._deadline is None:  # after an idle connection
            self._await(self._head_timeout_s)

    def handle_events(self) -> None:
        """Note when a call begins and when it is whole."""
        before = self.scope
        super().handle_events()
        is_reading = self.conn.their_state is h11.SEND_BODY
        if self.scope is not before and self.scope["path"] in GENERATING:
            ticket = self._ticket = self._intake.begin(self._age_ns())
            self.scope["state"]["ticket"] = ticket
            if is_reading:
                self._patience = self.loop.call_later(_PATIENCE_S, self._intake.give_up, ticket)
        if is_reading:
            if not self._is_timing_body:
                self._is_timing_body = True
                self._await(BODY_FACTOR * self._head_timeout_s)
            return
        if self.scope is not before or self._is_timing_body:
            self._await(0)
            self._is_timing_body = False
        if self._ticket is not None:
            self._ticket.is_whole = True

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
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._is_timing_body:  # the application waits for the rest
            self.transport.abort()
            return
        self.transport.write(_TOO_SLOW)
        self.transport.close()


# --------------------------------------------------------------------------------------------------
# What a call must be before anything reads it: its host, its origin, its type, its length.
#
# A server on a loopback address has no token, so a page of another site in a browser on the same
# machine must not reach it. Such a page can name the server by a host name of its own (DNS
# rebinding), or send a form across sites. So `Host` must be a name of this machine, `Origin`, which
# browsers add to every call across sites, must be the server's own or one that is allowed, and a
# body must be JSON by its content type. All this holds for every path.
#
# A body that is longer than the limit is refused by its `content-length`, and otherwise as soon as
# it has become too long; no more than the limit is ever held.

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_JSON_TYPES: Final = frozenset(
    {"application/json", "application/merge-patch+json", "application/strategic-merge-patch+json"}
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() in ("localhost", "") or host.lower().endswith(".localhost"):
        return host != ""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """Name or address of a `Host` header, without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.rpartition(":")[0] if ":" in value else value


class Guard:
    """Middleware in front of everything."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        allowed_hosts: Sequence[str],
        allowed_origins: Sequence[str],
        body_bytes_max: int,
    ) -> None:
        self._app = app
        self._is_local = is_loopback(host)
        self._hosts = frozenset({host.lower(), *(name.lower() for name in allowed_hosts)})
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the call, or pass it on with its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["method"], headers)
        if refusal is not None:
            status, message = refusal
            await JSONResponse(error_body(status, message), status_code=status)(
                scope, receive, send
            )
            return
        size, limit = 0, self._body_bytes_max

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes")
            return message

        await self._app(scope, counted, send)

    def _refusal(self, method: str, headers: dict[bytes, str]) -> tuple[int, str] | None:
        """(status, why), or None."""
        host = headers.get(b"host", "")
        name = host_name(host)
        if self._is_local and not self._is_ours(name):
            return 403, "Host does not name this machine (see --allowed-host)"
        origin = headers.get(b"origin", "").rstrip("/").lower()
        if origin and origin not in self._origins and "*" not in self._origins:
            scheme, _, place = origin.partition("://")
            if scheme not in ("http", "https") or place != host.strip().lower():
                return 403, "calls of other sites' pages are refused (see --cors-origin)"
        if method not in _WITH_BODY:
            return None
        given = headers.get(b"content-length", "")
        if given.isdigit() and int(given) > self._body_bytes_max:
            return 413, f"the body is longer than {self._body_bytes_max} bytes"
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        has_body = b"transfer-encoding" in headers or given not in ("", "0")
        if has_body and kind and kind not in _JSON_TYPES:
            return 400, f"Unsupported Media Type: {kind[:80]}, only application/json is read"
        return None

    def _is_ours(self, name: str) -> bool:
        return name == "" or name in self._hosts or is_loopback(name)  # HTTP/1.0 may name none


# --------------------------------------------------------------------------------------------------
# Whether the machine keeps up with the emulation, and what to do when it does not.
#
# A token that is due at an emulated instant should leave the server at that instant on the wall
# clock. `Pace` compares the two where a token is handed to the socket: at the first of an answer
# and at its last. The lateness of a request is the larger of the two, in emulated seconds, and
# counts the time that the call waited before the server read it. A request is late if its lateness
# is above 5 ms + 2 % of its emulated latency, which is what the documentation promises for a server
# that keeps up. The verdict is "late" as soon as more than 1 % of the requests are.
#
# `Adapter` lowers the speed while requests are late (`--slow-down auto`), and raises it again, up
# to what was asked for, when a while has gone well.

ALLOWED_NS: Final = 5_000_000
ALLOWED_SHARE: Final = 0.02
LATE_SHARE_MAX: Final = 0.01
STRICT_REQUESTS_MIN: Final = 20
"""A strict server judges from so many requests on, and at its end."""
_SPEED_DOWN: Final = 0.7
_SPEED_UP: Final = 1.1
_SPEED_MIN: Final = 0.01
_GOOD_S: Final = 10
"""Wall seconds without a late request before the speed is raised again."""
_CHANGES_KEPT: Final = 1000


class Pace:
    """Lateness of the answers so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.late = 0
        self.worst_s = 0.0
        """Largest lateness of a request, emulated seconds."""
        self.last_s = 0.0
        """Lateness of the request that ended last."""
        self.sum_s = 0.0
        self.first_late_s = -1.0
        """Emulated time at which a late request ended first; -1 = none."""
        self.late_since_s = -1.0
        """Begin of the present spell of lateness; -1 = the last request was in time."""
        self.late_from_s: list[tuple[float, float]] = []
        """Spells of lateness: (emulated begin, end), the last may go on."""
        self.window_late = 0
        self.window_requests = 0
        self.intake_worst_s = 0.0
        """Longest wait of a call before the server read it, emulated seconds."""

    def first(self, came_ns: int, due_ns: int, left_ns: int) -> bool:
        """The first token of an answer left now; True if it is late.

        The call came at `came_ns`, the token was due at `due_ns` and left at `left_ns`, all in
        emulated nanoseconds.
        """
        late_ns = max(0, left_ns - due_ns)
        self.requests += 1
        self.window_requests += 1
        self.sum_s += late_ns / NS_PER_S
        is_late = _is_late(late_ns, due_ns - came_ns)
        self._note(late_ns, left_ns, is_late=is_late)
        if not is_late:
            self.late_since_s = -1.0
        return is_late

    def last(self, came_ns: int, due_ns: int, left_ns: int, *, was_late: bool) -> None:
        """The last token of the same answer left now."""
        late_ns = max(0, left_ns - due_ns)
        self._note(late_ns, left_ns, is_late=not was_late and _is_late(late_ns, due_ns - came_ns))

    def _note(self, late_ns: int, at_ns: int, *, is_late: bool) -> None:
        self.last_s = late_ns / NS_PER_S
        self.worst_s = max(self.worst_s, self.last_s)
        if not is_late:
            return
        at_s = at_ns / NS_PER_S
        self.late += 1
        self.window_late += 1
        if self.first_late_s < 0:
            self.first_late_s = at_s
        if self.late_since_s < 0:
            self.late_since_s = at_s
            if len(self.late_from_s) < _CHANGES_KEPT:
                self.late_from_s.append((at_s, at_s))
        if self.late_from_s:
            self.late_from_s[-1] = (self.late_from_s[-1][0], at_s)

    @property
    def late_share(self) -> float:
        """Part of the requests that were late."""
        return self.late / self.requests if self.requests else 0.0

    @property
    def is_late(self) -> bool:
        """The machine does not keep up."""
        return self.late_share > LATE_SHARE_MAX

    @property
    def verdict(self) -> str:
        """ "kept", "late", or "unknown" before the first answer."""
        if self.requests == 0:
            return "unknown"
        return "late" if self.is_late else "kept"

    @property
    def header(self) -> bytes:
        """Text for the head of every answer."""
        if not self.is_late:
            return self.verdict.encode()
        text = f"late; requests={100 * self.late_share:.1f}%; worst={1e3 * self.worst_s:.0f}ms"
        return f"{text}; since={self.first_late_s:.1f}s".encode()

    def sentence(self) -> str:
        """The verdict in words."""
        if self.requests == 0:
            return "pace unknown: nothing was answered"
        mean_ms = 1e3 * self.sum_s / self.requests
        figures = f"mean lateness {mean_ms:.1f} ms, worst {1e3 * self.worst_s:.1f} ms (emulated)"
        if not self.is_late:
            return f"pace kept: {self.late} of {self.requests} requests late, {figures}"
        return (
            f"PACE LOST: {100 * self.late_share:.1f} % of {self.requests} requests were late by "
            f"more than 5 ms + 2 %, first at {self.first_late_s:.1f} s; {figures}. What clients "
            "measured of these is not what the cluster would do: use a lower --speed, fewer "
            "streams, or --slow-down auto"
        )

    def summary(self, speed_asked: float, speeds: list[tuple[float, float]]) -> dict[str, Any]:
        """The part of summary.json; seconds are emulated."""
        return {
            "verdict": self.verdict,
            "requests": self.requests,
            "late_requests": self.late,
            "late_share": round(self.late_share, 6),
            "mean_lateness_s": round(self.sum_s / self.requests, 6) if self.requests else 0.0,
            "worst_lateness_s": round(self.worst_s, 6),
            "worst_intake_s": round(self.intake_worst_s, 6),
            "first_late_s": round(self.first_late_s, 6) if self.first_late_s >= 0 else None,
            "late_spells_s": [[round(a, 3), round(b, 3)] for a, b in self.late_from_s[:100]],
            "speed": speed_asked,
            "speed_changes": [[round(at_s, 3), round(speed, 6)] for at_s, speed in speeds],
        }


def _is_late(late_ns: int, latency_ns: int) -> bool:
    return late_ns > ALLOWED_NS + ALLOWED_SHARE * latency_ns


class Adapter:
    """The speed that the machine can keep; asked once a second of wall time."""

    def __init__(self, pace: Pace, speed: float) -> None:
        self._pace = pace
        self._asked = speed
        self._good_s = 0

    def next_speed(self, speed: float, behind_s: float) -> float:
        """The speed from now on. `behind_s`: how late the oldest timer is, emulated seconds."""
        pace = self._pace
        late, requests = pace.window_late, pace.window_requests
        pace.window_late = pace.window_requests = 0
        is_behind = behind_s > 2 * ALLOWED_NS / NS_PER_S
        if late > LATE_SHARE_MAX * requests or is_behind:
            self._good_s = 0
            return max(_SPEED_MIN, speed * _SPEED_DOWN)
        self._good_s += 1
        if self._good_s >= _GOOD_S and speed < self._asked:
            self._good_s = 0
            return min(self._asked, speed * _SPEED_UP)
        return speed
