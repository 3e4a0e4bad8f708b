"""The OpenAPI document: operations from their table, bodies from the structs that check them.

What a struct's types cannot say (a prompt is not empty, a part of a message is text) is added
here. Rules between two fields (`min_tokens` and `max_tokens`, prompt and context length) are not
in the document: a body that breaks one is answered with 400 or 422.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from emu.apps.serve.bodies import CHOICES_MAX, TOKEN_ID_MAX
from emu.apps.serve.operations import EVENTS, JSON, Access, Operation
from emu.apps.serve.service import Service
from emu.cluster.commands import RESET, TARGETS
from emu.config.faultkinds import FAULT_KINDS
from emu.process.version import __version__

Schema = dict[str, object]

_STRING: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_MEAN: Final = {"type": "number", "minimum": 0}
"""Of counts: points of a long session are thinned."""
_FLAG: Final = {"type": "boolean"}
_ANYTHING: Final = {"type": "object"}
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


def _object(properties: Mapping[str, object]) -> Schema:
    """All of these, and perhaps more."""
    return {"type": "object", "required": list(properties), "properties": dict(properties)}


def _list(items: object) -> Schema:
    return {"type": "array", "items": items}


def _bodies(operations: Iterable[Operation]) -> Schema:
    """Schemas of what is sent, by name; sharper than the structs where types cannot say it."""
    kinds = {o.body.__name__: o.body for o in operations if isinstance(o.body, type)}
    _, schemas = msgspec.json.schema_components(
        list(kinds.values()), schema_hook=_any_value, ref_template="#/components/schemas/{name}"
    )
    text = {"type": "string", "minLength": 1}
    ids = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_ID_MAX},
    }
    several = {"type": "array", "minItems": 1, "maxItems": CHOICES_MAX}
    completion = schemas["CompletionBody"]["properties"]
    completion["prompt"] = {
        "anyOf": [text, ids, {**several, "items": text}, {**several, "items": ids}]
    }
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
    if "CommandBody" in schemas:
        commands = sorted({RESET, *(name for name, _ in TARGETS)})
        schemas["CommandBody"]["properties"]["command"] = {"enum": commands}
        schemas["FaultBody"] = _object({"kind": {"enum": list(FAULT_KINDS)}})
    return schemas


def _any_value(kind: type) -> Schema:
    """The schema of a field that takes anything."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any JSON value."}


def _answers() -> Schema:
    """Schemas of what comes back, by name."""
    usage = _object({f"{name}_tokens": _COUNT for name in ("prompt", "completion", "total")})
    reason = {"enum": ["length", "stop", "tool_calls"]}
    message = _object({"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}})
    frame = {"id": _STRING, "created": _COUNT, "model": _STRING, "usage": usage}
    chosen = {"index": _COUNT, "finish_reason": reason}
    card = {"id": _STRING, "object": {"const": "model"}, "root": _STRING, "max_model_len": _COUNT}
    request = {"id": _COUNT, "status": _STRING}
    request |= {"prompt_tokens": _COUNT, "generated_tokens": _COUNT}
    error = {
        "message": _STRING,
        "type": _STRING,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer", "null"]},
    }
    health = ["ready", "starting", "draining", "no_replica", "alive"]
    load = {"running": _COUNT, "waiting": _COUNT}
    point = {"at_s": _NUMBER, **dict.fromkeys(load, _MEAN)}
    state = {"at_s": _NUMBER, "speed": _NUMBER, "is_ready": _FLAG, "outstanding": _COUNT}
    replica = _object({"id": _COUNT, "state": _STRING, **load})
    return {
        "Error": _object({"error": _object(error)}),
        "MessagesError": _object(
            {"type": {"const": "error"}, "error": _object({"type": _STRING, "message": _STRING})}
        ),
        "Completion": _answer_of("text_completion", {**chosen, "text": _STRING}, frame),
        "ChatCompletion": _answer_of("chat.completion", {**chosen, "message": message}, frame),
        "Answer": _ANYTHING,
        "Rendered": _list(_ANYTHING),
        "Model": _object(card),
        "Models": _object({"object": {"const": "list"}, "data": _list(_object(card))}),
        "Tokens": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}),
        "Prompt": _object({"prompt": _STRING}),
        "Status": _object({"status": {"enum": health}}),
        "Version": _object({"version": _STRING}),
        "Load": _object({"server_load": _COUNT}),
        "State": _object({**state, "replicas": _list(replica)}),
        "Points": _object({"points": _list(_object(point))}),
        "Request": _object(request),
        "Requests": _object(
            {"slowest": _list(_object(request)), "under_way": _list(_object(request))}
        ),
        "Outcome": _object({"outcome": _STRING}),
        "Scaled": _object({"role": _STRING, "replicas": _COUNT, "commands": _list(_ANYTHING)}),
        "Failures": _object({"rules": _list(_ANYTHING), "returned": _COUNT}),
    }


def _answer_of(kind: str, choice: Mapping[str, object], frame: Mapping[str, object]) -> Schema:
    """OpenAI's answer of a kind."""
    return _object({"object": {"const": kind}, "choices": _list(_object(choice)), **frame})


def _ref(name: str) -> Schema:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _described(operation: Operation) -> Schema:
    """One operation of the document."""
    content = {operation.kind: _ref(operation.answer) if operation.answer else {"schema": {}}}
    if operation.streams:
        content[EVENTS] = {"schema": {}}
    responses: Schema = {"200": {"description": "Done.", "content": content}}
    # Health says why it is not ready in its own form, as does Anthropic's face.
    form = "Status" if operation.answer == "Status" else "Error"
    if operation.path.startswith("/v1/messages"):
        form = "MessagesError"
    needs_key = operation.access is not Access.OPEN
    for status in (*operation.statuses, *((401,) if needs_key else ())):
        content = {JSON: _ref(form)}
        responses[str(status)] = {"description": _DESCRIPTIONS[status], "content": content}
    for status in operation.kubernetes_statuses:
        text = "A Status that says why."
        responses[str(status)] = {"description": text, "content": {JSON: _ref("Answer")}}
    found: Schema = {"summary": operation.summary, "responses": responses}
    body = operation.body
    if body is not None:
        name = body if isinstance(body, str) else body.__name__
        found["requestBody"] = {"required": True, "content": {JSON: _ref(name)}}
    parameters = [
        {"name": name, "in": "path", "required": True}
        | (
            {"schema": _COUNT, "example": 0}
            if kind == "int"
            else {"schema": _STRING, "example": operation.examples[name]}
        )
        for name, kind in re.findall(r"\{(\w+):?(\w*)\}", operation.path)
    ]
    return found | ({"parameters": parameters} if parameters else {})


def openapi(service: Service, operations: Iterable[Operation]) -> Schema:
    """The document as plain values."""
    paths: dict[str, dict[str, Schema]] = {}
    has_key = bool(service.options.api_key)
    for operation in operations:
        found = _described(operation)
        if has_key and operation.access is Access.KEY:
            found["security"] = [{"key": []}]
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = found
    components: Schema = {"schemas": {**_bodies(operations), **_answers()}}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"emu, serving {service.model}", "version": __version__},
        "paths": paths,
        "components": components,
    }
