"""Who may call: the API key, and the token of the control interface."""

from __future__ import annotations

import hmac

from starlette.requests import Request as HttpRequest

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.service import Service


def check_control(service: Service, request: HttpRequest) -> None:
    """Raises ApiError without the token, where one is needed."""
    token = service.control_token
    if not token:
        return
    given = request.headers.get("x-emu-token") or request.query_params.get("token") or ""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if not given and scheme.lower() == "bearer":
        given = value
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise ApiError(401, "the control token is missing or wrong")
