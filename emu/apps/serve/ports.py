"""Ports of a fleet: each listens exactly while its replica is there.

A replica that is inactive or has crashed has no engine, so its port refuses connections, and idle
connections to it are closed; calls under way hear of it from their requests. A port is bound at
the start, to be sure that it can be had, and again when its replica comes back.
"""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.listening import Ports


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
    """Says which ports of a fleet are open."""

    def __init__(self, endpoints: list[Endpoint], ports: Ports) -> None:
        self._endpoints = endpoints
        self._ports = ports
        self._is_open: list[bool | None] = [None] * len(endpoints)
        """None: bound, and neither opened nor closed."""
        self._lives = [endpoint.replica.incarnation for endpoint in endpoints]
        self.closed = [0] * len(endpoints)
        """How often each port has been closed."""
        self.problems: list[str] = []
        """Ports that could not be had again."""

    async def update(self) -> None:
        """Open and close what has changed since the last time."""
        for index, endpoint in enumerate(self._endpoints):
            life = endpoint.replica.incarnation
            if life != self._lives[index]:  # it crashed, and may be back already
                self._lives[index] = life
                self._close(index)
            if endpoint.is_present and not self._is_open[index]:
                problem = await self._ports.open(endpoint.port)
                if problem:
                    self.problems.append(problem)
                else:
                    self._is_open[index] = True
            elif not endpoint.is_present and self._is_open[index] is not False:
                self._close(index)

    def _close(self, index: int) -> None:
        self._ports.close(self._endpoints[index].port)
        self._is_open[index] = False
        self.closed[index] += 1
