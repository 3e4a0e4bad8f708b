"""Ports of a fleet: each listens exactly while its replica is there.

A replica that is inactive or has crashed has no engine, so its port refuses connections, and idle
connections to it are closed; calls under way hear of it from their requests. A port is bound at
the start, to be sure that it can be had, and again when its replica comes back.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.intake import LiveProtocol
from emu.errors import InputError

BACKLOG = 4096


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket. Raises InputError if the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # a reader of the announcement may connect at once
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise InputError(f"{host}:{port}", None, option, reason) from None
    listening.setblocking(False)
    return listening


def port_of(listening: socket.socket) -> int:
    """The port that a socket has."""
    return int(listening.getsockname()[1])


class Dispatch:
    """One application for each port, and one for all others."""

    def __init__(self) -> None:
        self.main: ASGIApp = PlainTextResponse("starting", 503)
        self.by_port: dict[int, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        port = (scope.get("server") or ("", 0))[1]
        await self.by_port.get(port, self.main)(scope, receive, send)


class ReplicaPorts:
    """Opens and closes the ports of a fleet."""

    def __init__(self, host: str, endpoints: list[Endpoint], sockets: list[socket.socket]) -> None:
        self._host = host
        self._endpoints = endpoints
        self._bound: dict[int, socket.socket] = {port_of(s): s for s in sockets}
        self._open: dict[int, asyncio.Server] = {}
        self._lives = [endpoint.replica.incarnation for endpoint in endpoints]
        self.closed = [0] * len(endpoints)
        """How often each port has been closed."""
        self.problems: list[str] = []
        """Ports that could not be had again."""

    async def update(self, server: uvicorn.Server) -> None:
        """Open and close what has changed since the last time."""
        for index, endpoint in enumerate(self._endpoints):
            port = endpoint.port
            life = endpoint.replica.incarnation
            if life != self._lives[index]:  # it crashed, and may be back already
                self._lives[index] = life
                self._close_port(server, port)
                self.closed[index] += 1
            if endpoint.is_present and port not in self._open:
                await self._open_port(server, port)
            elif not endpoint.is_present and (port in self._open or port in self._bound):
                self._close_port(server, port)
                self.closed[index] += 1

    async def _open_port(self, server: uvicorn.Server, port: int) -> None:
        listening = self._bound.pop(port, None)
        if listening is None:
            try:
                listening = bind(self._host, port, "--ports")
            except InputError as error:
                self.problems.append(str(error))
                return
        config = server.config
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return make(config, server.server_state, {}, loop)

        self._open[port] = await loop.create_server(
            protocol, sock=listening, ssl=config.ssl, backlog=BACKLOG
        )

    def _close_port(self, server: uvicorn.Server, port: int) -> None:
        bound = self._bound.pop(port, None)
        if bound is not None:
            bound.close()
        acceptor = self._open.pop(port, None)
        if acceptor is not None:
            acceptor.close()
        for connection in list(server.server_state.connections):
            if not isinstance(connection, LiveProtocol) or connection.server is None:
                continue
            is_idle = connection.cycle is None or connection.cycle.response_complete
            if connection.server[1] == port and is_idle:
                connection.transport.close()

    def close(self) -> None:
        """All of them."""
        for bound in self._bound.values():
            bound.close()
        for acceptor in self._open.values():
            acceptor.close()
