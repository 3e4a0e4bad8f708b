"""The web application: routes, keys, limits, error envelopes. No sockets and no signals.

`make_app(house)` gives an ASGI application, which tests call without a server.
"""

from __future__ import annotations

import hmac
import time
from typing import Any

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

import emu
from emu.serve.completions import Reply, failure_error, make_exchange
from emu.serve.control import Control
from emu.serve.exposition import METRICS_TYPE
from emu.serve.failures import Failure, failure_from_header
from emu.serve.guard import Guard
from emu.serve.house import House
from emu.serve.metrics import MetricsPage
from emu.serve.openapi import openapi
from emu.serve.protocol import (
    NAME_MAX,
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


class Api:
    """OpenAI's and vLLM's endpoints over one house."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._metrics = MetricsPage(house)
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
        if house.cluster.tape.traffic.is_full:
            problem = "the recording has reached --max-recording-mib, no more calls are taken"
            raise ApiError(503, problem, code="recording_full")
        call.session_id = _header(request, "x-session-affinity")
        call.request_id = _header(request, "x-request-id")
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
        """The body. Raises ApiError 413 as soon as it is too long."""
        return await request.body()  # the guard counts it

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
        return Response(self._metrics.render(), media_type=METRICS_TYPE)

    async def document(self, request: HttpRequest) -> Response:
        """The OpenAPI document."""
        return JSONResponse(openapi(self._house))


def _header(request: HttpRequest, name: str) -> str:
    """A header that is kept. Raises ApiError if it is too long for that."""
    value = request.headers.get(name, "")
    if len(value) > NAME_MAX:
        raise ApiError(400, f"{name} is longer than {NAME_MAX} characters")
    return value


class _Headers:
    """Adds the speed and the caller's request id to every answer; counts errors."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self._app = app
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id")

        async def sending(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                speed = f"{self._house.speed:g}".encode()
                headers = [*message["headers"], (b"x-emu-speed", speed)]
                if request_id is not None:
                    headers.append((b"x-request-id", request_id))
                message["headers"] = headers
                status = message["status"]
                if status >= 400:
                    refused = self._house.http_refused
                    refused[status] = refused.get(status, 0) + 1
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            ticket = scope.get("state", {}).get("ticket")
            if ticket is not None:
                self._house.intake.end(ticket)


async def _on_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, error.detail)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_disconnect(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(error_body(499, "the client has left"), status_code=499)


def _cors(house: House) -> list[Middleware]:
    """Answers for pages of the sites that are allowed."""
    origins = house.options.cors_origins
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


def make_app(house: House) -> Starlette:
    """The application over a house."""
    return Starlette(
        routes=[*Api(house).routes(), *Control(house).routes()],
        middleware=[
            Middleware(_Headers, house=house),
            *_cors(house),
            Middleware(
                Guard,
                host=house.options.host,
                allowed_hosts=house.options.allowed_hosts,
                allowed_origins=house.options.cors_origins,
                body_bytes_max=int(house.options.max_body_mib * 2**20),
            ),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )
