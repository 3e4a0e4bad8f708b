"""An application from its operations: guard, headers, envelopes of errors, sites that may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from emu.apps.serve.anthropic_messages import (
    anthropic_error,
)
from emu.apps.serve.api_errors import ApiError, error_body
from emu.apps.serve.guard import Guard
from emu.apps.serve.openapi import openapi
from emu.apps.serve.operations import Handler, Operation, routes_of, short_ways
from emu.apps.serve.service import Service


class _Headers:
    """Adds the speed and the caller's request id to every answer; counts errors."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]

        async def sending(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                speed = f"{self._service.speed:g}".encode()
                headers = [*message["headers"], (b"x-emu-speed", speed)]
                if given:
                    headers.append((b"x-request-id", given[-1]))
                message["headers"] = headers
                status = message["status"]
                if status >= 400:
                    refused = self._service.counts.http_refused
                    refused[status] = refused.get(status, 0) + 1
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            ticket = scope.get("state", {}).get("ticket")
            if ticket is not None:
                self._service.intake.end(ticket)


async def _on_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    body: Mapping[str, object] = error.body
    if request.scope["path"].startswith("/v1/messages"):
        body = anthropic_error(error.status, str(error))
    return JSONResponse(body, status_code=error.status, headers=error.headers)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, error.detail)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_disconnect(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(error_body(499, "the client has left"), status_code=499)


class _ShortWay:
    """Answers calls of some paths by itself: the framework's router, and its two layers that answer
    exceptions, take as long as all that is done for the answer."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if is_post else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = HttpRequest(scope, receive, send)
        try:
            answer = await handler(request)
            await answer(scope, receive, send)
        except (ApiError, HTTPException, ClientDisconnect) as error:
            response = await _HANDLERS[type(error)](request, error)
            await response(scope, receive, send)


_HANDLERS: Final = {
    ApiError: _on_api_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
}


def _cors(service: Service) -> list[Middleware]:
    """Answers for pages of the sites that are allowed."""
    origins = service.options.cors_origins
    if not origins:
        return []
    shown = ["x-emu-request-id", "x-emu-speed", "x-emu-pace", "x-request-id", "retry-after"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=shown,
        )
    ]


def assemble(
    service: Service, operations: Sequence[Operation], more: Sequence[Route] = ()
) -> Starlette:
    """An application of these operations and a document of them, with guard and headers.

    `more`: routes with documents of their own.
    """

    async def document(request: HttpRequest) -> Response:
        return JSONResponse(openapi(service, operations))

    return Starlette(
        routes=[*routes_of(service, operations), Route("/openapi.json", document), *more],
        middleware=[
            Middleware(_Headers, service=service),
            *_cors(service),
            Middleware(
                Guard,
                host=service.options.host,
                allowed_hosts=service.options.allowed_hosts,
                allowed_origins=service.options.cors_origins,
                body_bytes_max=int(service.options.max_body_mib * 2**20),
            ),
            Middleware(_ShortWay, handlers=short_ways(service, operations)),
        ],
        exception_handlers=dict(_HANDLERS),
    )
