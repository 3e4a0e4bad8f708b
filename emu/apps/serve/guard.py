"""What a call must be before anything reads it: its host, its origin, its type, its length.

A server on a loopback address has no token, so a page of another site in a browser on the same
machine must not reach it. Such a page can name the server by a host name of its own (DNS
rebinding), or send a form across sites. So `Host` must be a name of this machine, `Origin`, which
browsers add to every call across sites, must be the server's own or one that is allowed, and a
body must be JSON by its content type. All this holds for every path.

A body that is longer than the limit is refused by its `content-length`, and otherwise as soon as
it has become too long; no more than the limit is ever held.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emu.apps.serve.api_errors import ApiError, error_body

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_READ: Final = frozenset(
    {b"host", b"origin", b"content-length", b"content-type", b"transfer-encoding"}
)
"""Headers that are looked at."""
_JSON_TYPES: Final = frozenset(
    {
        "application/json",
        "application/json-patch+json",
        "application/merge-patch+json",
        "application/strategic-merge-patch+json",
        "application/vnd.kubernetes.protobuf",  # refused where it is read, in Kubernetes' words
    }
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() in ("localhost", "") or host.lower().endswith(".localhost"):
        return host != ""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """Name or address of a `Host` header, without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.rpartition(":")[0] if ":" in value else value


class Guard:
    """Middleware in front of everything."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        allowed_hosts: Sequence[str],
        allowed_origins: Sequence[str],
        body_bytes_max: int,
    ) -> None:
        self._app = app
        self._is_local = is_loopback(host)
        self._hosts = frozenset({host.lower(), *(name.lower() for name in allowed_hosts)})
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the call, or pass it on with its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name: value.decode("latin-1") for name, value in scope["headers"] if name in _READ
        }
        refusal = self._refusal(scope["method"], headers)
        if refusal is not None:
            status, message = refusal
            await JSONResponse(error_body(status, message), status_code=status)(
                scope, receive, send
            )
            return
        size, limit = 0, self._body_bytes_max

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes")
            return message

        await self._app(scope, counted, send)

    def _refusal(self, method: str, headers: dict[bytes, str]) -> tuple[int, str] | None:
        """(status, why), or None."""
        host = headers.get(b"host", "")
        name = host_name(host)
        if self._is_local and not self._is_ours(name):
            return 403, "Host does not name this machine (see --allowed-host)"
        origin = headers.get(b"origin", "").rstrip("/").lower()
        if origin and origin not in self._origins and "*" not in self._origins:
            scheme, _, place = origin.partition("://")
            if scheme not in ("http", "https") or place != host.strip().lower():
                return 403, "calls of other sites' pages are refused (see --cors-origin)"
        if method not in _WITH_BODY:
            return None
        given = headers.get(b"content-length", "")
        if given.isdigit() and int(given) > self._body_bytes_max:
            return 413, f"the body is longer than {self._body_bytes_max} bytes"
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        has_body = b"transfer-encoding" in headers or given not in ("", "0")
        if has_body and kind and kind not in _JSON_TYPES:
            return 400, f"Unsupported Media Type: {kind[:80]}, only application/json is read"
        return None

    def _is_ours(self, name: str) -> bool:
        return name == "" or name in self._hosts or is_loopback(name)  # HTTP/1.0 may name none
