"""Ports that a process listens on, and the web server behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import uvicorn
from starlette.types import ASGIApp

from emu.apps.serve.intake import LiveProtocol
from emu.errors import InputError

BACKLOG: Final = 4096
_CLOSE_S: Final = 5.0
"""Wall time that clients have to take the last bytes."""


class WebServer(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def make_web_server(
    app: ASGIApp, protocol: Callable[..., asyncio.Protocol], tls_cert: str, tls_key: str
) -> WebServer:
    """A server with this protocol under it; it speaks https where it has a certificate."""
    return WebServer(
        uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            ssl_certfile=tls_cert or None,
            ssl_keyfile=tls_key or None,
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # nothing here asks where a call came from
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(_CLOSE_S),
        )
    )


def bind(host: str, port: int, option: str, *, is_shared: bool = False) -> socket.socket:
    """A socket that listens; `is_shared`: beside those of other processes of this server.

    Raises InputError if the address cannot be had.
    """
    bound: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.listen(BACKLOG)  # a reader of the announcement may connect at once
    except (OSError, UnicodeError) as error:
        if bound is not None:
            bound.close()
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise InputError(f"{host}:{port}", None, option, reason) from None
    bound.setblocking(False)
    return bound


def reserve(host: str, port: int, option: str) -> socket.socket:
    """A socket that does not listen: it keeps a port that is free for processes that share it.

    Raises InputError if the address cannot be had.
    """
    free = bind(host, port, option)  # alone: two servers never share a port by accident
    kept = socket.socket(free.family, free.type, free.proto)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    address = free.getsockname()
    free.close()
    try:
        kept.bind(address)
    except OSError as error:
        kept.close()
        raise InputError(f"{host}:{port}", None, option, str(error.strerror)) from None
    return kept


def port_of(bound: socket.socket) -> int:
    """The port that a socket has."""
    return int(bound.getsockname()[1])


class Ports(Protocol):
    """What opens and closes ports: this process, or its fronts."""

    @property
    def started(self) -> bool:
        """Ports can be opened."""

    async def start(self, main: socket.socket) -> None:
        """Get ready to answer calls on this port; clients that come from now on are not refused."""

    async def serve(self) -> None:
        """Answer calls until `end`, on that port and those that are opened."""

    def end(self) -> None:
        """Take no more connections, and let the last bytes leave."""

    def drop(self) -> None:
        """Nothing stays open, whatever has ended the server."""

    async def open(self, port: int) -> str:
        """Listen; why that cannot be, or empty."""

    def close(self, port: int) -> None:
        """Listen no longer; idle connections go."""


class OwnPorts:
    """Ports of this process."""

    def __init__(
        self,
        server: WebServer,
        host: str,
        *,
        bound: Sequence[socket.socket] = (),
        is_shared: bool = False,
    ) -> None:
        """`bound`: sockets that listen. `is_shared`: other processes have the same ports."""
        self._server = server
        self._host = host
        self._bound = {port_of(one): one for one in bound}
        self._open: dict[int, asyncio.Server] = {}
        self._main: list[socket.socket] = []
        self._is_shared = is_shared

    @property
    def started(self) -> bool:
        """Ports can be opened."""
        return self._server.started

    async def start(self, main: socket.socket) -> None:
        """It listens already."""
        self._main.append(main)

    async def serve(self) -> None:
        """Answer calls until `end`."""
        await self._server.serve(sockets=self._main)

    def end(self) -> None:
        """Take no more connections, and let the last bytes leave."""
        self._close_all()
        self._server.should_exit = True

    def _close_all(self) -> None:
        for bound in self._bound.values():
            bound.close()
        for acceptor in self._open.values():
            acceptor.close()

    def drop(self) -> None:
        """Nothing stays open, whatever has ended the server (after a drain nothing is)."""
        self._close_all()
        server = self._server
        for acceptor in server.servers if server.started else ():
            acceptor.close()
        for connection in list(server.server_state.connections):
            if isinstance(connection, LiveProtocol):
                connection.transport.abort()

    async def open(self, port: int) -> str:
        """Listen; why that cannot be, or empty."""
        listening = self._bound.pop(port, None)
        if listening is None:
            try:
                listening = bind(self._host, port, "--ports", is_shared=self._is_shared)
            except InputError as error:
                return str(error)
        server = self._server
        config = server.config
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return make(config, server.server_state, {}, loop)

        self._open[port] = await loop.create_server(
            protocol, sock=listening, ssl=config.ssl, backlog=BACKLOG
        )
        return ""

    def close(self, port: int) -> None:
        """Listen no longer; idle connections go."""
        bound = self._bound.pop(port, None)
        if bound is not None:
            bound.close()
        acceptor = self._open.pop(port, None)
        if acceptor is not None:
            acceptor.close()
        for connection in list(self._server.server_state.connections):
            if not isinstance(connection, LiveProtocol) or connection.server is None:
                continue
            is_idle = connection.cycle is None or connection.cycle.response_complete
            if connection.server[1] == port and is_idle:
                connection.transport.close()
