"""The OpenAPI document, made from the structs that check the bodies.

What a struct's types cannot say (a prompt is not empty, a part of a message is text) is added
here. Rules between two fields (`min_tokens` and `max_tokens`, prompt and context length) are not
in the document: a body that breaks one is answered with 400 or 422.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from emu.apps.serve.adapters import AdapterBody
from emu.apps.serve.anthropic_messages import (
    CountBody,
    MessagesBody,
)
from emu.apps.serve.bodies import (
    CHOICES_MAX,
    TOKEN_ID_MAX,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from emu.apps.serve.control import CommandBody, FailuresBody, KnobsBody, ScaleBody
from emu.apps.serve.kubernetes_scale import SCALE_PATH
from emu.apps.serve.openai_responses import ResponsesBody
from emu.apps.serve.pooling import (
    RERANK_PATHS,
    SCORE_PATHS,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
)
from emu.apps.serve.service import Service
from emu.cluster.commands import RESET, TARGETS
from emu.config.faultkinds import FAULT_KINDS
from emu.process.version import __version__

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


def openapi(service: Service) -> dict[str, Any]:
    """The document as plain values."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"emu, serving {service.model}", "version": __version__},
        "paths": _paths(service.model),
        "components": {"schemas": {**_bodies(), **_answers()}},
    }
    if service.options.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            if path.startswith("/v1/") or path in ("/tokenize", "/detokenize"):
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    return document
