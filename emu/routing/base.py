"""What a router sees, and what it answers.

A router is pure: it takes signals and a request and returns the index of the chosen signal. It
sees what a real gateway sees: counts, never a request's true output length. Signals may be
stale (`router.signal_delay_ms`); the gateway keeps the history, not the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

from emu.request import Request


@final
class Signal:
    """What a replica reports about itself."""

    replica_id: int
    waiting: int
    running: int
    waiting_tokens: int
    blocks_used: int
    blocks_total: int
    max_num_seqs: int

    __slots__ = (
        "blocks_total",
        "blocks_used",
        "max_num_seqs",
        "replica_id",
        "running",
        "waiting",
        "waiting_tokens",
    )

    def __init__(
        self,
        replica_id: int,
        waiting: int,
        running: int,
        waiting_tokens: int,
        blocks_used: int,
        blocks_total: int,
        max_num_seqs: int,
    ) -> None:
        self.replica_id = replica_id
        self.waiting = waiting
        self.running = running
        self.waiting_tokens = waiting_tokens
        self.blocks_used = blocks_used
        self.blocks_total = blocks_total
        self.max_num_seqs = max_num_seqs


PrefixMatch = Callable[[int, Request], int]
"""(replica id, request) -> prompt tokens that the replica's cache holds."""


AdapterMatch = Callable[[int, Request], bool]
"""(replica id, request) -> whether the request's LoRA adapter is on the replica's GPU."""


class Router(Protocol):
    """Chooses a replica for a request.

    A router whose choice is the first replica with the least `a x waiting + b x running` may say
    so in a class attribute `linear_load = (a, b)`; the gateway then need not build signals.
    """

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """Index into `signals` (never empty, ascending replica id)."""
        ...
