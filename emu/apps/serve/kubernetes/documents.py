"""JSON documents of the API, and the ways into them.

A document is what a client sent or the store holds: plain values, since a client may keep fields
in it that emu does not know. Structs (`objects.py`) are typed views of those that emu reads.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from emu.process.prepared import prepared

Document = dict[str, object]
T = TypeVar("T", bound=msgspec.Struct)


class Refused(Exception):
    """A call that is answered with a `Status`."""

    def __init__(self, code: int, message: str, reason: str = "", cause: str = "") -> None:
        """`reason`: Kubernetes' word for it, where the code does not say it; `cause`: a detail."""
        super().__init__(message)
        self.code = code
        self.reason = reason or REASONS.get(code, "Unknown")
        self.cause = cause


REASONS = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    504: "Timeout",
}


def table(document: Document, key: str) -> Document:
    """The object under a key; empty where there is none."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def text(document: Document, *path: str) -> str:
    """The text at the end of a path; empty where there is none."""
    for key in path[:-1]:
        document = table(document, key)
    found = document.get(path[-1])
    return found if isinstance(found, str) else ""


def labels_of(document: Document) -> dict[str, str]:
    """Labels of an object."""
    labels = table(table(document, "metadata"), "labels")
    return {key: value for key, value in labels.items() if isinstance(value, str)}


def plain(struct: msgspec.Struct) -> Document:
    """A struct as a document."""
    document: Document = msgspec.to_builtins(struct)
    return document


def read(document: object, kind: type[T]) -> T:
    """A document as a struct. Raises Refused where it is none."""
    try:
        return msgspec.convert(document, prepared(kind))
    except msgspec.ValidationError as error:
        raise Refused(400, str(error)) from None


def decode(data: bytes) -> Document:
    """The document of a body. Raises Refused."""
    if data.startswith(b"k8s\0"):
        raise Refused(415, "protobuf bodies are not read, only JSON")
    try:
        return msgspec.json.decode(data, type=prepared(Document))
    except msgspec.DecodeError as error:
        raise Refused(400, f"the body is not a JSON object: {error}") from None
