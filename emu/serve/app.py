"""The web application: routes, keys, limits, error envelopes. No sockets and no signals.

`make_app(house)` gives an ASGI application, which tests call without a server.
"""

from __future__ import annotations

import hmac
import time
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

import emu
from emu.serve.completions import Reply, failure_error, make_exchange
from emu.serve.control import Control
from emu.serve.failures import Failure, failure_from_header
from emu.serve.house import House
from emu.serve.metrics import make_registry
from emu.serve.openapi import openapi
from emu.serve.protocol import (
    ApiError,
    Call,
    DetokenizeBody,
    TokenizeBody,
    chat_text,
    decode_body,
    error_body,
    read_chat,
    read_completion,
)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Api:
    """OpenAI's and vLLM's endpoints over one house."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._registry = make_registry(house)
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """All but the control interface."""
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/health/ready", self.health),
            Route("/health/live", self.alive),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.document),
        ]

    # --- completions --------------------------------------------------------------------------
    async def completions(self, request: HttpRequest) -> Any:
        """`/v1/completions`."""
        failure = self._admit(request)
        model, call = read_completion(await self._body(request), self._house.tokenizer)
        return self._reply(request, model, call, failure)

    async def chat(self, request: HttpRequest) -> Any:
        """`/v1/chat/completions`."""
        failure = self._admit(request)
        model, call = read_chat(await self._body(request), self._house.tokenizer)
        return self._reply(request, model, call, failure)

    def _admit(self, request: HttpRequest) -> Failure | None:
        """Key, readiness, failures on purpose. Raises ApiError."""
        house = self._house
        self._check_key(request)
        if house.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=5)
        if not house.is_ready:
            left_s = max(1, round(house.startup_left_s + 0.5))
            raise ApiError(
                503, "the model is still loading", code="not_ready", retry_after_s=left_s
            )
        wanted = request.headers.get("x-return-error")
        if wanted is not None:
            failure = failure_from_header(wanted)
            if failure is None:
                raise ApiError(400, f"X-Return-Error does not know {wanted!r}")
        else:
            failure = house.failures.judge(request.url.path)
        if failure is not None:
            house.failures_returned += 1
            if not failure.after_tokens:
                raise failure_error(failure)
        return failure

    def _reply(
        self, request: HttpRequest, model: str | None, call: Call, failure: Failure | None
    ) -> Reply:
        house = self._house
        self._check_model(model)
        wanted = len(call.prompts) * call.n
        if house.cluster.open_choices + wanted > house.options.max_outstanding:
            raise ApiError(
                429,
                f"more than {house.options.max_outstanding} answers are under way",
                code="server_full",
                retry_after_s=1,
            )
        call.session_id = request.headers.get("x-session-affinity", "")[:256]
        call.request_id = request.headers.get("x-request-id", "")[:256]
        return Reply(house, call, make_exchange(house, call), failure)

    def _check_key(self, request: HttpRequest) -> None:
        key = self._house.options.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if key and not (
            scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
        ):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_model(self, name: str | None) -> None:
        if name and name != self._house.model:
            raise ApiError(
                404,
                f"the model `{name}` does not exist; this server has `{self._house.model}`",
                param="model",
                code="model_not_found",
            )

    async def _body(self, request: HttpRequest) -> bytes:
        """The body, or ApiError 413 as soon as it is too long."""
        limit = int(self._house.options.max_body_mib * 2**20)
        parts = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    # --- models and tokens --------------------------------------------------------------------
    async def models(self, request: HttpRequest) -> Response:
        """`/v1/models`."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        """`/v1/models/NAME`."""
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        house = self._house
        return {
            "id": house.model,
            "object": "model",
            "created": self._created,
            "owned_by": "emu",
            "root": house.model,
            "parent": None,
            "max_model_len": house.max_model_tokens,
            "permission": [],
        }

    async def tokenize(self, request: HttpRequest) -> Response:
        """Token ids of a prompt or of messages."""
        self._check_key(request)
        body = decode_body(await self._body(request), TokenizeBody)
        self._check_model(body.model)
        if body.prompt is None and body.messages is None:
            raise ApiError(400, "give prompt or messages", param="prompt")
        text = body.prompt if body.prompt is not None else chat_text(body.messages or [])
        tokenizer = self._house.tokenizer
        ids = tokenizer.encode(text).tolist()
        content = {
            "count": len(ids),
            "max_model_len": self._house.max_model_tokens,
            "tokens": ids,
            "token_strs": [tokenizer.decode([i]) for i in ids] if body.return_token_strs else None,
        }
        return JSONResponse(content)

    async def detokenize(self, request: HttpRequest) -> Response:
        """Text of token ids."""
        self._check_key(request)
        body = decode_body(await self._body(request), DetokenizeBody)
        self._check_model(body.model)
        try:
            return JSONResponse({"prompt": self._house.tokenizer.decode(body.tokens)})
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from None

    # --- health and figures -------------------------------------------------------------------
    async def health(self, request: HttpRequest) -> Response:
        """200 once the emulated start-up is over, 503 before and while draining."""
        house = self._house
        if house.is_ready:
            return JSONResponse({"status": "ready"})
        status = "draining" if house.is_draining else "starting"
        return JSONResponse({"status": status}, status_code=503, headers={"retry-after": "1"})

    async def alive(self, request: HttpRequest) -> Response:
        """200 as long as the process answers."""
        return JSONResponse({"status": "alive"})

    async def version(self, request: HttpRequest) -> Response:
        """The emulator's version, under the key that vLLM uses."""
        return JSONResponse({"version": f"emu-{emu.__version__}"})

    async def load(self, request: HttpRequest) -> Response:
        """Answers under way, under the key that vLLM uses."""
        return JSONResponse({"server_load": self._house.cluster.open_choices})

    async def metrics(self, request: HttpRequest) -> Response:
        """Prometheus text."""
        return Response(generate_latest(self._registry), media_type=METRICS_TYPE)

    async def document(self, request: HttpRequest) -> Response:
        """The OpenAPI document."""
        return JSONResponse(openapi(self._house))


class _Headers:
    """Adds the speed and the caller's request id to every answer; counts errors."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self._app = app
        self._house = house
        self._speed = (b"x-emu-speed", f"{house.speed:g}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id")

        async def sending(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], self._speed]
                if request_id is not None:
                    headers.append((b"x-request-id", request_id))
                message["headers"] = headers
                status = message["status"]
                if status >= 400:
                    refused = self._house.http_refused
                    refused[status] = refused.get(status, 0) + 1
            await send(message)

        await self._app(scope, receive, sending)


async def _on_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, error.detail)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_disconnect(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(error_body(499, "the client has left"), status_code=499)


def make_app(house: House) -> Starlette:
    """The application over a house."""
    return Starlette(
        routes=[*Api(house).routes(), *Control(house).routes()],
        middleware=[Middleware(_Headers, house=house)],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )
