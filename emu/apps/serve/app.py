"""The web application: routes, keys, limits, error envelopes. No sockets and no signals.

`make_app(house)` gives an ASGI application, which tests call without a server.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec
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

from emu.apps.serve.chats import (
    CountBody,
    MessagesBody,
    MessagesFace,
    ResponsesBody,
    ResponsesFace,
    anthropic_error,
    count_tokens,
    read_messages,
    read_responses,
)
from emu.apps.serve.completions import (
    RERANK_PATHS,
    SCORE_PATHS,
    EmbeddingBody,
    EmbeddingFace,
    Face,
    OpenAiFace,
    Reply,
    RerankBody,
    RerankFace,
    ScoreBody,
    ScoreFace,
    failure_error,
    make_exchange,
    read_embedding,
    read_rerank,
    read_score,
)
from emu.apps.serve.control import (
    SCALE_PATH,
    AdapterBody,
    CommandBody,
    Control,
    EngineControl,
    FailuresBody,
    KnobsBody,
    Scale,
    ScaleBody,
)
from emu.apps.serve.house import House
from emu.apps.serve.intake import Guard
from emu.apps.serve.metrics import METRICS_TYPE, MetricsPage
from emu.apps.serve.protocol import (
    CHOICES_MAX,
    NAME_MAX,
    TOKEN_ID_MAX,
    ApiError,
    Call,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Failure,
    TokenizeBody,
    chat_text,
    decode_body,
    error_body,
    failure_from_header,
    read_chat,
    read_completion,
)
from emu.apps.serve.script import Tokenizer
from emu.apps.serve.world import Exchange
from emu.cluster.commands import RESET, TARGETS
from emu.config.faultkinds import FAULT_KINDS
from emu.process.version import __version__

# --- the OpenAPI document, made from the structs that check the bodies ----------------------------
# What a struct's types cannot say (a prompt is not empty, a part of a message is text) is added
# here. Rules between two fields (`min_tokens` and `max_tokens`, prompt and context length) are not
# in the document: a body that breaks one is answered with 400 or 422.

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_STRING: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_FLAG: Final = {"type": "boolean"}

_DESCRIPTIONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        400: "The body is wrong.",
        401: "The key or token is missing or wrong.",
        404: "No such model, replica or path.",
        408: "The emulated cluster cancelled the request.",
        409: "Does not apply in the replica's state.",
        413: "The body is too long.",
        422: "Longer than what is admitted, or than any replica holds.",
        429: "Too many answers under way, or refused by the emulated cluster.",
        500: "On purpose only: a failure schedule, or X-Return-Error.",
        503: "Starting, draining, or lost in the emulated cluster.",
    }
)


def _object(**properties: Any) -> dict[str, Any]:
    """All of these, and perhaps more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _bodies() -> dict[str, dict[str, Any]]:
    """Schemas of what is sent, by name; sharper than the structs where types cannot say it."""
    kinds: tuple[type, ...]
    kinds = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, CommandBody, ScaleBody)
    kinds = (*kinds, ResponsesBody, MessagesBody, CountBody, EmbeddingBody, RerankBody, ScoreBody)
    kinds = (*kinds, AdapterBody)
    _, schemas = msgspec.json.schema_components(
        [*kinds, FailuresBody, KnobsBody], ref_template="#/components/schemas/{name}"
    )
    text = {"type": "string", "minLength": 1}
    ids = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_ID_MAX},
    }
    several = {"type": "array", "minItems": 1, "maxItems": CHOICES_MAX}
    choices = [text, ids, {**several, "items": text}, {**several, "items": ids}]
    completion = schemas["CompletionBody"]["properties"]
    completion["prompt"] = {"anyOf": choices}
    completion["suffix"] = {"enum": ["", None], "default": None}
    part = {
        "type": "object",
        "required": ["text"],
        "properties": {"type": {"const": "text", "default": "text"}, "text": _STRING},
    }
    schemas["Message"]["properties"]["content"] = {
        "anyOf": [_STRING, {"type": "null"}, _list({"anyOf": [_STRING, part]})],
        "default": None,
    }
    commands = sorted({RESET, *(name for name, _ in TARGETS)})
    schemas["CommandBody"]["properties"]["command"] = {"enum": commands}
    schemas["FaultBody"] = _object(kind={"enum": list(FAULT_KINDS)})
    return schemas


def _answers() -> dict[str, dict[str, Any]]:
    """Schemas of what comes back, by name."""
    usage = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
    reason = {"enum": ["length", "stop", "tool_calls"]}
    message = _object(role={"const": "assistant"}, content={"type": ["string", "null"]})
    frame = {"id": _STRING, "created": _COUNT, "model": _STRING, "usage": usage}
    card = _object(id=_STRING, object={"const": "model"}, root=_STRING, max_model_len=_COUNT)
    request = _object(id=_COUNT, status=_STRING, prompt_tokens=_COUNT, generated_tokens=_COUNT)
    error = _object(
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code={"type": ["string", "integer", "null"]},
    )
    return {
        "Error": _object(error=error),
        "Completion": _object(
            object={"const": "text_completion"},
            choices=_list(_object(index=_COUNT, text=_STRING, finish_reason=reason)),
            **frame,
        ),
        "ChatCompletion": _object(
            object={"const": "chat.completion"},
            choices=_list(_object(index=_COUNT, message=message, finish_reason=reason)),
            **frame,
        ),
        "Answer": {"type": "object"},
        "Scale": _object(spec=_object(replicas={"type": "integer"})),
        "Rendered": _list({"type": "object"}),
        "Model": card,
        "Models": _object(object={"const": "list"}, data=_list(card)),
        "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
        "Prompt": _object(prompt=_STRING),
        "Status": _object(
            status={"enum": ["ready", "starting", "draining", "no_replica", "alive"]}
        ),
        "Version": _object(version=_STRING),
        "Load": _object(server_load=_COUNT),
        "State": _object(
            at_s=_NUMBER,
            speed=_NUMBER,
            is_ready=_FLAG,
            outstanding=_COUNT,
            replicas=_list(_object(id=_COUNT, state=_STRING, running=_COUNT, waiting=_COUNT)),
        ),
        "Points": _object(points=_list(_object(at_s=_NUMBER, running=_COUNT, waiting=_COUNT))),
        "Request": request,
        "Requests": _object(slowest=_list(request), under_way=_list(request)),
        "Outcome": _object(outcome=_STRING),
        "Scaled": _object(role=_STRING, replicas=_COUNT, commands=_list({"type": "object"})),
        "Failures": _object(rules=_list({"type": "object"}), returned=_COUNT),
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(
    summary: str, content: dict[str, Any], statuses: tuple[int, ...], body: str = ""
) -> dict[str, Any]:
    """One method of one path. `content` is that of the answer 200: type -> schema's name or {}."""
    shown = {kind: {"schema": _ref(name) if name else {}} for kind, name in content.items()}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": shown}}
    for status in statuses:
        # Health says why it is not ready in its own form.
        name = "Status" if content.get(_JSON) == "Status" else "Error"
        responses[str(status)] = {
            "description": _DESCRIPTIONS[status],
            "content": {_JSON: {"schema": _ref(name)}},
        }
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(body)}}}
    return operation


def _scale_operation(summary: str, body: str) -> dict[str, Any]:
    """Kubernetes' own forms: a Scale, or a Status."""
    statuses = (400, 403, 404, 409, 422) if body else (404,)
    operation = _operation(summary, {_JSON: "Scale"}, (401,), body)
    for status in statuses:
        operation["responses"][str(status)] = {
            "description": "A Status that says why.",
            "content": {_JSON: {"schema": _ref("Answer")}},
        }
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": _STRING, "example": example}
        for name, example in (("namespace", "default"), ("name", "decode"))
    ]
    return operation


def _numbered(summary: str, content: str, statuses: tuple[int, ...]) -> dict[str, Any]:
    """One method of a path that ends in a number."""
    operation = _operation(summary, {_JSON: content}, statuses)
    operation["parameters"] = [
        {"name": "number", "in": "path", "required": True, "schema": _COUNT, "example": 0}
    ]
    return operation


def _paths(served: str) -> dict[str, dict[str, Any]]:
    tokens = (400, 401, 404, 413)
    refusals = (400, 401, 404, 408, 413, 422, 429, 500, 503)
    writes = (400, 401, 404, 409)

    def answer(name: str) -> dict[str, Any]:
        return {_JSON: name}

    def generating(summary: str, body: str, *, streams: bool = False) -> dict[str, Any]:
        content = {_JSON: "Answer", _EVENTS: ""} if streams else answer("Answer")
        return {"post": _operation(summary, content, refusals, body)}

    def plain(summary: str, *statuses: int, body: str = "") -> dict[str, Any]:
        return {"post": _operation(summary, {"text/plain": ""}, (400, 401, *statuses), body)}

    completion = _operation("Text", {_JSON: "Completion", _EVENTS: ""}, refusals, "CompletionBody")
    chat = _operation("Chat", {_JSON: "ChatCompletion", _EVENTS: ""}, refusals, "ChatBody")
    model = _operation("One model", answer("Model"), (401, 404))
    model["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": _STRING, "example": served}
    ]
    ready = _operation("Whether completions are answered", answer("Status"), (503,))
    page = _operation("The live page", {"text/html": ""}, (401,))
    failures = _operation("Failure schedule in force", answer("Failures"), (401,))
    replace = _operation("Replace it", answer("Failures"), (400, 401), "FailuresBody")
    return {
        "/v1/completions": {"post": completion},
        "/v1/chat/completions": {"post": chat},
        "/v1/responses": generating("A response", "ResponsesBody", streams=True),
        "/v1/messages": generating("A message", "MessagesBody", streams=True),
        "/v1/messages/count_tokens": {
            "post": _operation("Length of a prompt", answer("Answer"), tokens, "CountBody")
        },
        "/v1/embeddings": generating("Vectors", "EmbeddingBody"),
        **{path: generating("Documents by likeness", "RerankBody") for path in RERANK_PATHS},
        **{path: generating("Likeness of pairs", "ScoreBody") for path in SCORE_PATHS},
        "/v1/completions/render": {
            "post": _operation("Ids of prompts", answer("Rendered"), tokens, "CompletionBody")
        },
        "/v1/chat/completions/render": {
            "post": _operation("Ids of a prompt", answer("Answer"), tokens, "ChatBody")
        },
        "/sleep": plain("Go to sleep"),
        "/wake_up": plain("Wake up"),
        "/is_sleeping": {"get": _operation("Whether it sleeps", answer("Answer"), ())},
        "/reset_prefix_cache": {
            "post": _operation("Forget cached prefixes", answer("Answer"), (400, 401))
        },
        "/v1/load_lora_adapter": plain("Add an adapter", body="AdapterBody"),
        "/v1/unload_lora_adapter": plain("Remove an adapter", 404, body="AdapterBody"),
        SCALE_PATH: {
            method: _scale_operation(summary, body)
            for method, summary, body in (
                ("get", "Replicas of a role", ""),
                ("put", "Scale a role", "Scale"),
                ("patch", "Scale a role", "Scale"),
            )
        },
        "/v1/models": {"get": _operation("All models", answer("Models"), (401,))},
        "/v1/models/{name}": {"get": model},
        "/tokenize": {"post": _operation("Ids", answer("Tokens"), tokens, "TokenizeBody")},
        "/detokenize": {"post": _operation("Text", answer("Prompt"), tokens, "DetokenizeBody")},
        "/health": {"get": ready},
        "/health/ready": {"get": ready},
        "/health/live": {"get": _operation("The process answers", answer("Status"), ())},
        "/ping": {"get": ready, "post": ready},
        "/version": {"get": _operation("Version", answer("Version"), ())},
        "/load": {"get": _operation("Answers under way", answer("Load"), ())},
        "/metrics": {"get": _operation("Prometheus text", {"text/plain": ""}, ())},
        "/": {"get": page},
        "/emu": {"get": page},
        "/emu/state": {"get": _operation("A snapshot", answer("State"), (401,))},
        "/emu/events": {"get": _operation("Snapshots and events", {_EVENTS: ""}, (401,))},
        "/emu/history": {"get": _operation("Points over time", answer("Points"), (401,))},
        "/emu/requests": {"get": _operation("Slowest requests", answer("Requests"), (400, 401))},
        "/emu/requests/{number}": {"get": _numbered("One request", "Request", (401, 404))},
        "/emu/scenario": {
            "get": _operation("The session as a cluster file", {"application/toml": ""}, (401,))
        },
        "/emu/faults": {"post": _operation("Inject", answer("Outcome"), writes, "FaultBody")},
        "/emu/faults/{number}": {"delete": _numbered("End a fault", "Outcome", (401, 404))},
        "/emu/commands": {"post": _operation("Command", answer("Outcome"), writes, "CommandBody")},
        "/emu/scale": {"post": _operation("Scale a role", answer("Scaled"), writes, "ScaleBody")},
        "/emu/knobs": {
            "get": _operation("Knobs", answer("Answer"), (401,)),
            "post": _operation("Turn them", answer("Answer"), (400, 401), "KnobsBody"),
        },
        "/emu/failures": {"get": failures, "post": replace},
    }


def openapi(house: House) -> dict[str, Any]:
    """The document as plain values."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"emu, serving {house.model}", "version": __version__},
        "paths": _paths(house.model),
        "components": {"schemas": {**_bodies(), **_answers()}},
    }
    if house.options.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            if path.startswith("/v1/") or path in ("/tokenize", "/detokenize"):
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    return document


# --- the application ------------------------------------------------------------------------------
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
            Route("/v1/completions/render", self.render_completion, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render_chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.rerank, methods=["POST"]) for path in RERANK_PATHS),
            *(Route(path, self.score, methods=["POST"]) for path in SCORE_PATHS),
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

    # --- generation ---------------------------------------------------------------------------
    async def completions(self, request: HttpRequest) -> Any:
        """`/v1/completions`."""
        return await self._generate(request, read_completion, OpenAiFace)

    async def chat(self, request: HttpRequest) -> Any:
        """`/v1/chat/completions`."""
        return await self._generate(request, read_chat, OpenAiFace)

    async def responses(self, request: HttpRequest) -> Any:
        """`/v1/responses`."""
        return await self._generate(request, read_responses, ResponsesFace)

    async def messages(self, request: HttpRequest) -> Any:
        """`/v1/messages`."""
        return await self._generate(request, read_messages, MessagesFace)

    async def _generate(
        self,
        request: HttpRequest,
        read: Callable[[bytes, Tokenizer], Call],
        face: Callable[[House, Call, Exchange], Face],
    ) -> Any:
        failure = self._admit(request)
        call = read(await self._body(request), self._house.tokenizer)
        return await self._reply(request, call, failure, face)

    async def embeddings(self, request: HttpRequest) -> Any:
        """`/v1/embeddings`."""
        failure = self._admit(request)
        call, body = read_embedding(await self._body(request), self._house)
        return await self._reply(request, call, failure, partial(EmbeddingFace, body=body))

    async def rerank(self, request: HttpRequest) -> Any:
        """`/rerank`."""
        failure = self._admit(request)
        call, body, query = read_rerank(await self._body(request), self._house)
        return await self._reply(
            request, call, failure, partial(RerankFace, body=body, query=query)
        )

    async def score(self, request: HttpRequest) -> Any:
        """`/score`."""
        failure = self._admit(request)
        call, pairs = read_score(await self._body(request), self._house)
        return await self._reply(request, call, failure, partial(ScoreFace, pairs=pairs))

    async def count_tokens(self, request: HttpRequest) -> Response:
        """`/v1/messages/count_tokens`."""
        self._check_key(request)
        model, tokens = count_tokens(await self._body(request), self._house.tokenizer)
        self._check_model(model)
        return JSONResponse({"input_tokens": tokens})

    async def render_completion(self, request: HttpRequest) -> Response:
        """`/v1/completions/render`: token ids of the prompts."""
        self._check_key(request)
        call = read_completion(await self._body(request), self._house.tokenizer)
        return JSONResponse([{"token_ids": ids.tolist()} for ids in call.prompts])

    async def render_chat(self, request: HttpRequest) -> Response:
        """`/v1/chat/completions/render`: token ids of the prompt."""
        self._check_key(request)
        call = read_chat(await self._body(request), self._house.tokenizer)
        return JSONResponse({"token_ids": call.prompts[0].tolist()})

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
        if house.sleep_level:
            raise ApiError(503, "the engine sleeps", code="sleeping", retry_after_s=1)
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

    async def _reply(
        self,
        request: HttpRequest,
        call: Call,
        failure: Failure | None,
        face: Callable[[House, Call, Exchange], Face],
    ) -> Any:
        """An answer that serves itself. Raises ApiError."""
        house = self._house
        if call.kv is not None or call.room >= 0:
            problem = "this server chooses replicas itself; see --fleet for endpoints of replicas"
            raise ApiError(400, problem, param="kv_transfer_params")
        self._check_room(request, call)
        self._check_serving(house.index_of(call.model))
        exchange = make_exchange(house, call, self._adapters)
        rank = request.headers.get("x-data-parallel-rank")
        if rank is not None:
            self._pin(exchange, rank)
        return Reply(house, call, exchange, face(house, call, exchange), failure)

    def _check_serving(self, model: int = -1) -> None:
        """Raises ApiError where no replica could take a prompt."""
        if not self._house.serves(model):
            problem = "no replica serves prompts, and none is on its way"
            raise ApiError(503, problem, code="no_replica", retry_after_s=5)

    def _check_room(self, request: HttpRequest, call: Call) -> None:
        """Model, number of answers, recording, names that are kept. Raises ApiError."""
        house = self._house
        self._check_model(call.model)
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

    def _pin(self, exchange: Exchange, rank: str) -> None:
        """The caller says which replica serves it."""
        count = len(self._house.cluster.replicas)
        if not (rank.isascii() and rank.isdigit() and int(rank) < count):
            raise ApiError(400, f"X-data-parallel-rank is 0 to {count - 1}")
        for choice in exchange.choices:
            choice.request.pin = int(rank)

    def _check_key(self, request: HttpRequest) -> None:
        key = self._house.options.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if key and not (
            scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
        ):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    @property
    def _adapters(self) -> Mapping[str, str]:
        """Adapters that calls may name here, and where they came from."""
        return self._house.adapters

    def _check_model(self, name: str | None) -> None:
        if name and name not in self._house.model_names and name not in self._adapters:
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
        names = [*self._house.model_names, *self._adapters]
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: HttpRequest) -> Response:
        """`/v1/models/NAME`."""
        self._check_key(request)
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        house = self._house
        adapter = self._adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "emu",
            "root": self._root(name) if adapter is None else adapter,
            "parent": None if adapter is None else house.model,
            "max_model_len": house.longest[house.index_of(name)],
            "permission": [],
        }

    def _root(self, name: str) -> str:
        house = self._house
        return name if name in house.models else house.model

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
        if house.is_ready and house.serves():
            return JSONResponse({"status": "ready"})
        status = "draining" if house.is_draining else "starting"
        if house.is_ready:
            status = "no_replica"
        return JSONResponse({"status": status}, status_code=503, headers={"retry-after": "1"})

    async def alive(self, request: HttpRequest) -> Response:
        """200 as long as the process answers."""
        return JSONResponse({"status": "alive"})

    async def version(self, request: HttpRequest) -> Response:
        """The emulator's version, under the key that vLLM uses."""
        return JSONResponse({"version": f"emu-{__version__}"})

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
    body = error.body
    if request.url.path.startswith("/v1/messages"):
        body = anthropic_error(error.status, body)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


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
    return assemble(
        house,
        [
            *Api(house).routes(),
            *EngineControl(house).routes(),
            *Control(house).routes(),
            *Scale(house).routes(),
        ],
    )


def assemble(house: House, routes: list[Route]) -> Starlette:
    """An application of these routes, with guard, headers and envelopes of errors."""
    return Starlette(
        routes=routes,
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
