"""Answers that are errors, in OpenAI's envelope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    499: "cancelled",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code or status
        self.body = error_body(status, message, param=param, code=code, type=type)
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None, type: str = ""
) -> dict[str, dict[str, object]]:
    """OpenAI's envelope."""
    kind = type or _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
