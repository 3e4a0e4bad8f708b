"""Clients of the simulated server: they finish, vanish, stall, send half, or look after its health.

What they saw is the history that a seed is judged by: nothing here asks the server.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, Final

import h11

from tests.chaos.simulated.loop import SimLoop, Wire

KINDS: Final = ("whole", "whole", "vanishes", "vanishes", "stalls", "half", "slow", "leaves_early")


class Caller(asyncio.Protocol):
    """One call, and what became of it."""

    def __init__(self, loop: SimLoop, kind: str, method: str, path: str, body: Any = None) -> None:
        self.kind = kind
        self.body = body
        self.status = 0
        self.data = b""
        self.is_whole = False
        """The answer ended as HTTP says."""
        self.began_s = loop.time()
        self.ended_s = -1.0
        self.left_s = -1.0
        """When the client itself went away."""
        self.over: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._wire: Wire | None = None
        self._http = h11.Connection(h11.CLIENT)
        data = b"" if body is None else json.dumps(body).encode()
        head = [("host", "127.0.0.1"), ("content-type", "application/json")]
        head.append(("content-length", str(len(data))))
        call = h11.Request(method=method, target=path, headers=head)
        self._out = self._http.send(call) or b""
        self._out += self._http.send(h11.Data(data=data)) or b""
        self._http.send(h11.EndOfMessage())

    @property
    def tokens(self) -> int:
        """Pieces of a stream that came."""
        return self.data.count(b"data: {")

    @property
    def completion_tokens(self) -> int:
        """What the end of a stream says."""
        said = [line for line in self.data.split(b"\n") if b'"completion_tokens"' in line]
        return int(json.loads(said[-1][6:])["usage"]["completion_tokens"]) if said else -1

    @property
    def prompt_tokens(self) -> int:
        """One for each byte: no two calls have the same."""
        return len(self.body["prompt"])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Wire)
        self._wire = transport
        rng = self._loop.rng
        if self.kind in ("stalls", "half"):
            cut = rng.randrange(1, len(self._out))
            transport.write(self._out[:cut])
            rest = self._out[cut:]
            after_s = rng.choice((0.005, 0.5, 3.0))
            if self.kind == "half":
                self._loop.call_later(after_s, transport.write, rest)
            else:
                self._loop.call_later(after_s, self.leave)
            return
        transport.write(self._out)
        if self.kind == "slow":
            transport.pause_reading()
            self._loop.call_later(rng.choice((0.1, 2.0)), transport.resume_reading)
        elif self.kind == "leaves_early":
            self._loop.call_later(rng.choice((0.0, 1e-4, 2e-3)), self.leave)

    def leave(self) -> None:
        """Vanish: the connection is reset."""
        if self._wire is not None and self.left_s < 0 and not self.over.done():
            self.left_s = self._loop.time()
            self._wire.abort()

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        while True:
            event = self._http.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED):
                break
            if isinstance(event, h11.Response):
                self.status = event.status_code
            elif isinstance(event, h11.Data):
                self.data += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self.is_whole = True
                self._end()
                if self._wire is not None:
                    self._wire.close()
                break
            elif isinstance(event, h11.ConnectionClosed):
                break
        if self.kind == "vanishes" and self.tokens >= self.body["max_tokens"] // 3:
            self.leave()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.ended_s = self._loop.time()
            self.over.set_result(None)


def generating(loop: SimLoop, rng: random.Random, index: int, lengths: Sequence[int]) -> Caller:
    """A streamed call of some kind; its prompt tells it from all others."""
    length = rng.choice((1, 100, 400)) + index
    body = {"prompt": "x" * length, "stream": True, "stream_options": {"include_usage": True}}
    return Caller(
        loop,
        rng.choice(KINDS),
        "POST",
        "/v1/completions",
        body | {"max_tokens": rng.choice(lengths)},
    )
