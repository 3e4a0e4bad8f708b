"""The trace that a call belongs to: W3C's `traceparent` and `tracestate`. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

_PARENT: Final = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")


class TraceContext(Struct, frozen=True):
    """A trace, and the span in it that this call is a child of."""

    trace_id: bytes
    parent_id: bytes = b""
    """Empty = the call is the root."""
    is_sampled: bool = True
    state: str = ""


class Ids:
    """Ids of traces and spans that no other server gives."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._given = 0

    def span(self) -> bytes:
        """Eight bytes."""
        return self._next(8)

    def trace(self) -> bytes:
        """Sixteen bytes."""
        return self._next(16)

    def _next(self, size: int) -> bytes:
        self._given += 1
        text = f"{self._session} {self._given}".encode()
        return hashlib.blake2b(text, digest_size=size).digest()


def read_context(headers: Mapping[str, str], ids: Ids) -> TraceContext:
    """The context of a call; a trace of its own where the header says none, or nothing valid."""
    found = _PARENT.match(headers.get("traceparent", "").strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return TraceContext(ids.trace())
    trace_id, parent_id = bytes.fromhex(found[2]), bytes.fromhex(found[3])
    if not any(trace_id) or not any(parent_id):
        return TraceContext(ids.trace())
    is_sampled = bool(int(found[4], 16) & 1)
    return TraceContext(trace_id, parent_id, is_sampled, headers.get("tracestate", ""))
