"""A small HTTP client for streams: many at once, with the time at which each token came.

HTTP/1.1 over asyncio, one connection per call, no more than what completions need. Bytes are
stamped when they are read from the socket, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from emu.documents import Document
from emu.errors import InputError, RunError
from emu.process.prepared import prepared

_MAX_HEAD: Final = 64 * 1024
_MAX_BODY: Final = 64 * 2**20


class Target(msgspec.Struct, frozen=True):
    """Where a server is."""

    host: str
    port: int
    is_tls: bool
    path: str
    """What stands before `/v1`, without a slash at the end."""

    @property
    def authority(self) -> str:
        """The Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Target:
    """Raises InputError for what is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(url, None, "URL", str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(url, None, "URL", "expected http://HOST:PORT")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, port or (443 if is_tls else 80), is_tls, path)


class _Chunk(msgspec.Struct):
    choices: list[Any] = []
    usage: Document | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(prepared(_Chunk))


class StreamCall(asyncio.Protocol):
    """One POST whose answer is a stream of events (or an error)."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self.sent_s = 0.0
        self.token_s: list[float] = []
        """When each chunk with a token came (monotonic seconds)."""
        self.usage: Document | None = None
        self.is_done = False
        """`[DONE]` was seen."""
        self.error = ""
        self.body = b""
        """The body of an answer that is no stream of events."""
        self.headers: dict[str, str] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._raw = bytearray()
        self._events = bytearray()
        self._is_chunked = False
        self._is_stream = False
        self._has_head = False
        self._left = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        self.sent_s = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        now_s = time.monotonic()
        self._raw += data
        try:
            if not self._has_head and not self._read_head():
                return
            self._read_body(now_s)
        except (ValueError, msgspec.DecodeError) as error:
            self.error = f"malformed answer: {error}"
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The call is over."""
        if exc is not None and not self.error:
            self.error = str(exc) or type(exc).__name__
        if not self.ended.done():
            self.ended.set_result(None)

    def abort(self) -> None:
        """Drop the connection (the client leaves)."""
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > _MAX_HEAD:
                raise ValueError("the header does not end")
            return False
        lines = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        self.status = int(lines[0].split(" ", 2)[1])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._is_stream = "text/event-stream" in self.headers.get("content-type", "")
        if not self._is_chunked and "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
        self._has_head = True
        return True

    def _read_body(self, now_s: float) -> None:
        if not self._is_chunked:
            self._take(bytes(self._raw), now_s)
            self._left -= len(self._raw) if self._left >= 0 else 0
            self._raw.clear()
            if self._left == 0:
                self._finish()
            return
        raw = self._raw
        while True:
            end = raw.find(b"\r\n")
            if end < 0:
                return
            size = int(bytes(raw[:end]).split(b";")[0], 16)
            if size == 0:
                self._finish()
                return
            if len(raw) < end + 2 + size + 2:
                return
            piece = bytes(raw[end + 2 : end + 2 + size])
            del raw[: end + 4 + size]
            self._take(piece, now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        if not self._is_stream or self.status != 200:
            if len(self.body) < _MAX_BODY:
                self.body += data
            return
        self._events += data
        while True:
            end = self._events.find(b"\n\n")
            if end < 0:
                return
            event = bytes(self._events[:end])
            del self._events[: end + 2]
            self._event(event, now_s)

    def _event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(b"data:"):
            return  # a comment
        content = event[5:].strip()
        if content == b"[DONE]":
            self.is_done = True
            return
        chunk = _DECODER.decode(content)
        if chunk.error is not None:
            self.error = str(chunk.error)[:500]
        elif chunk.choices:
            self.token_s.append(now_s)
        if chunk.usage is not None:
            self.usage = chunk.usage

    def _finish(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if not self.ended.done():
            self.ended.set_result(None)


class Client:
    """Calls to one server."""

    def __init__(self, target: Target, api_key: str = "") -> None:
        self._target = target
        self._key = api_key
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def post(self, path: str, body: Document) -> StreamCall:
        """Start a call; its `ended` says when it is over. Raises OSError."""
        return await self._call("POST", path, msgspec.json.encode(body))

    async def get(self, path: str) -> StreamCall:
        """Read something small. Raises OSError."""
        call = await self._call("GET", path, b"")
        await call.ended
        return call

    async def model(self) -> str:
        """The first model of the server. Raises RunError."""
        try:
            call = await asyncio.wait_for(self.get("/v1/models"), 30)
            if call.status == 200:
                return str(msgspec.json.decode(call.body)["data"][0]["id"])
        except (OSError, TimeoutError) as error:
            raise RunError(f"{self._target.authority}: {str(error) or 'no answer'}") from None
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise RunError(f"{self._target.authority}: /v1/models is not a list") from None
        raise RunError(f"{self._target.authority}: /v1/models answers {call.status}")

    async def _call(self, method: str, path: str, body: bytes) -> StreamCall:
        target = self._target
        head = [
            f"{method} {target.path}{path} HTTP/1.1",
            f"host: {target.authority}",
            "connection: close",
            "accept: text/event-stream, application/json",
            "user-agent: emu",
        ]
        if self._key:
            head.append(f"authorization: Bearer {self._key}")
        if body:
            head += ["content-type: application/json", f"content-length: {len(body)}"]
        request = "\r\n".join(head).encode() + b"\r\n\r\n" + body
        loop = asyncio.get_running_loop()
        _, call = await loop.create_connection(
            lambda: StreamCall(request), target.host, target.port, ssl=self._tls
        )
        return call
