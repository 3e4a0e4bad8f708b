"""What a fault does to a transfer."""

from __future__ import annotations

from typing import Literal

import msgspec


class Fate(msgspec.Struct, frozen=True):
    """What is to befall a transfer."""

    kind: Literal["refused", "silent", "broken", "hang", "late", "twice", "stuck"]
    part: float = 0.0
    """broken: after this part of its bytes."""
    delay_ns: int = 0
    """late, twice: so much later."""
    copies: int = 1
    """twice: further notices, each so much after the one before."""
