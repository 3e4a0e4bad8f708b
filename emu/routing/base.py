"""What a router sees, and what it answers.

A router is pure: it takes signals and a request and returns the index of the chosen signal. It
sees what a real gateway sees: counts, never a request's true output length. Signals may be
stale (`router.signal_delay_ms`); who keeps the history is the gateway, not the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from emu.request import Request


class Signal(msgspec.Struct, gc=False):
    """What a replica reports about itself."""

    replica_id: int
    waiting: int
    running: int
    waiting_tokens: int
    blocks_used: int
    blocks_total: int
    max_num_seqs: int


PrefixMatch = Callable[[int, Request], int]
"""(replica id, request) -> prompt tokens that the replica's cache holds."""


class Router(Protocol):
    """Chooses a replica for a request.

    A router whose choice is the first replica with the least `a x waiting + b x running` may say
    so in a class attribute `linear_load = (a, b)`; the gateway then need not build signals.
    """

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """Index into `signals` (never empty, ascending replica id)."""
        ...
