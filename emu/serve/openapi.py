"""The OpenAPI document, made from the structs that check the bodies."""

from __future__ import annotations

from typing import Any, Final

import msgspec

import emu
from emu.serve.control import CommandBody, FailuresBody, ScaleBody
from emu.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: Final[dict[str, Any]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/emu/commands": CommandBody,
    "/emu/scale": ScaleBody,
    "/emu/failures": FailuresBody,
}
_READS: Final = (
    "/v1/models",
    "/health",
    "/health/ready",
    "/health/live",
    "/ping",
    "/version",
    "/metrics",
    "/emu/state",
    "/emu/failures",
)
_ERRORS: Final = ("400", "401", "404", "409", "413", "422", "429", "501", "503")


def openapi(model: str) -> dict[str, Any]:
    """The document as plain values."""
    kinds = list(_BODIES.values())
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
            }
        },
    }
    paths: dict[str, dict[str, Any]] = {path: {"get": _operation(None)} for path in _READS}
    for path, schema in zip(_BODIES, schemas, strict=True):
        paths.setdefault(path, {})["post"] = _operation(schema)
    fault = {"type": "object", "required": ["kind"], "properties": {"kind": {"type": "string"}}}
    paths["/emu/faults"] = {"post": _operation(fault)}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"emu, serving {model}", "version": emu.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(body: dict[str, Any] | None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "done"}}
    if body is not None:
        responses.update({s: {"description": "error", "content": error} for s in _ERRORS})
    else:
        responses["503"] = {"description": "not ready"}
    operation: dict[str, Any] = {"responses": responses}
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation
