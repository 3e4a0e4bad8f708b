"""Which callers are admitted: the API key, and the token of the control interface."""

from __future__ import annotations

import hmac

from starlette.requests import Request as HttpRequest

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.service import Service


def check_api_key(service: Service, request: HttpRequest) -> None:
    """Raises ApiError without the key, where one is set."""
    key = service.options.api_key
    if key and not hmac.compare_digest(_bearer(request).encode(), key.encode()):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


def check_control(service: Service, request: HttpRequest) -> None:
    """Raises ApiError without the token, where one is needed."""
    token = service.control_token
    if not token:
        return
    given = request.headers.get("x-emu-token") or request.query_params.get("token") or ""
    if not hmac.compare_digest((given or _bearer(request)).encode(), token.encode()):
        raise ApiError(401, "the control token is missing or wrong")


def _bearer(request: HttpRequest) -> str:
    """What follows `Bearer` in the header; empty = nothing."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given if scheme.lower() == "bearer" else ""
