"""Images in prompts: how large one is, and how many tokens it takes.

An image is a `data:` URL, as nothing is fetched. Its size is read from its own head (PNG, JPEG,
GIF, WebP), and it takes a token for each square of the model's: patches, merged as the model does.
Equal bytes are equal images, for the encoder's cache and the prefix cache.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from emu.apps.serve.api_errors import ApiError
from emu.cluster.plan import ReplicaPlan
from emu.units import ceil_div

if TYPE_CHECKING:
    from emu.features.base import Shown

TOKEN_ID: Final = 0
"""Of the tokens that stand for an image."""
MARK: Final = "\ufffc"
"""Stands for an image in a text."""


class Given(Struct, frozen=True):
    """An image of a call."""

    identity: int
    """A number of its bytes."""
    width: int
    height: int


def tokens_of(given: Given, shown: Shown) -> int:
    """Tokens of an image. Raises ApiError for one that no step could encode."""
    tokens, pixels = shown.fixed_tokens, shown.square_pixels
    if pixels:
        tokens = ceil_div(given.width, pixels) * ceil_div(given.height, pixels)
    if tokens > shown.tokens_max:
        problem = f"an image of {tokens} tokens is more than {shown.tokens_max}"
        raise ApiError(400, problem, param="messages")
    return tokens


def shown_to(plan: ReplicaPlan) -> Shown | None:
    """What a replica's model takes; None = text only, or how large a token is is not known."""
    for feature in plan.features:
        shown = feature.shown(plan)
        if shown is not None:
            return shown
    return None


def read_image(url: object, where: str) -> Given:
    """The image of a URL, or of an object with one. Raises ApiError."""
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ApiError(400, "images are given as data: URLs; nothing is fetched", param=where)
    head, _, text = url.partition(",")
    try:
        data = base64.b64decode(text, validate=True) if head.endswith(";base64") else b""
    except binascii.Error:
        data = b""
    size = size_of(data)
    if size is None:
        raise ApiError(400, "an image is PNG, JPEG, GIF or WebP in base64", param=where)
    identity = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 1
    return Given(identity, *size)


def size_of(data: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels from the head of a file; None where it is no image."""
    size: tuple[int, int] | None = None
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        size = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    elif data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        size = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _webp(data)
    elif data[:2] == b"\xff\xd8":
        size = _jpeg(data)
    return size if size is not None and min(size) > 0 else None


def _webp(data: bytes) -> tuple[int, int] | None:
    kind, body = data[12:16], data[20:]
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(body) >= 10:
        width, height = (int.from_bytes(body[i : i + 2], "little") & 0x3FFF for i in (6, 8))
        return width, height
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """From the frame's segment."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None
