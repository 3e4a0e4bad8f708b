"""Operations of the web application: the one table that routes and the OpenAPI document read.

An `Operation` says what a method of a path takes, which callers are admitted, how it answers, and
what does it. Operations of one path share a route.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.keys import check_api_key, check_control
from emu.apps.serve.service import Service

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]


class Access(enum.Enum):
    """Which callers are admitted."""

    OPEN = "any caller"
    KEY = "holders of the API key"
    CONTROL = "holders of the control token"
    CONTROL_JSON = "holders of the control token, by a body that no form of a page can send"


class Operation(Struct, frozen=True):
    """One method of one path."""

    call: str
    """Method and path, as Starlette writes it: `GET /emu/requests/{number:int}`."""
    handler: Handler
    summary: str
    body: type | str | None = None
    """The struct that checks the body, or the name of its schema."""
    answer: str = ""
    """Name of the schema of the answer 200; empty = none."""
    kind: str = JSON
    """Content type of that answer."""
    streams: bool = False
    """The answer may also be a stream of events."""
    statuses: tuple[int, ...] = ()
    """Of errors, besides 401."""
    kubernetes_statuses: tuple[int, ...] = ()
    """Of errors in Kubernetes' form."""
    access: Access = Access.OPEN
    examples: Mapping[str, str] = {}
    """Of the texts in the path."""

    @property
    def method(self) -> str:
        """GET, POST, ..."""
        return self.call.partition(" ")[0]

    @property
    def path(self) -> str:
        """Where it is."""
        return self.call.partition(" ")[2]


def routes_of(service: Service, operations: Iterable[Operation]) -> list[Route]:
    """A route for each path, in the order of the table; GET answers HEAD too."""
    paths: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation
    return [
        Route(path, _dispatch(service, methods), methods=list(methods))
        for path, methods in paths.items()
    ]


def short_ways(service: Service, operations: Iterable[Operation]) -> dict[str, Handler]:
    """What answers the calls that become requests of the cluster (all are POST), by path."""
    return {
        operation.path: _dispatch(service, {"POST": operation})
        for operation in operations
        if operation.streams and operation.method == "POST" and "{" not in operation.path
    }


def _dispatch(service: Service, methods: Mapping[str, Operation]) -> Handler:
    async def handle(request: HttpRequest) -> ASGIApp:
        method = "GET" if request.method == "HEAD" else request.method
        operation = methods[method]
        _check_access(service, operation.access, request)
        return await operation.handler(request)

    return handle


def _check_access(service: Service, access: Access, request: HttpRequest) -> None:
    if access is Access.KEY:
        check_api_key(service, request)
    elif access is not Access.OPEN:
        if access is Access.CONTROL_JSON:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != JSON:
                raise ApiError(400, "control calls need content-type: application/json")
        check_control(service, request)
