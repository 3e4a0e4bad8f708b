"""What a router is, what it sees and what it may ask.

A router is pure: it takes signals and a request and returns the index of the chosen signal. It
sees what a real gateway sees: counts, never a request's true output length. Signals may be
stale (`router.signal_delay_ms`); the gateway keeps the history, not the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

from emu.request import Request


@final
class Signal:
    """What a replica reports about itself: exact now, or as it was `router.signal_delay_ms` ago.

    `blocks_used` is -1 for a router that declares what it reads (`Router.reads`) without it.
    """

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
"""(replica id, request) -> whether the weights that it names beside the model are on its GPU."""


@final
class Pool:
    """The replicas that a router chooses from, and what it may ask of them beside their signals."""

    name: str
    """Names the pool's own random stream."""
    seed: int
    match: PrefixMatch
    holds: AdapterMatch

    __slots__ = ("holds", "match", "name", "seed")

    def __init__(self, name: str, seed: int, match: PrefixMatch, holds: AdapterMatch) -> None:
        self.name = name
        self.seed = seed
        self.match = match
        self.holds = holds


SIGNAL_FIELDS: Final = frozenset(
    {
        "blocks_total",
        "blocks_used",
        "max_num_seqs",
        "replica_id",
        "running",
        "waiting",
        "waiting_tokens",
    }
)


class Router(Protocol):
    """Chooses a replica for a request.

    A class attribute `reads` names the fields of signals that a router looks at. Without it all of
    them are exact. Blocks grow in a leap: a router that does not read them spares the gateway a
    look into each replica.

    A router whose choice is the first replica with the least `a x waiting + b x running` may say
    so in a class attribute `linear_load = (a, b)`; the gateway then need not build signals.
    """

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """Index into `signals` (never empty, ascending replica id)."""
        ...


def reads_of(router: object) -> frozenset[str]:
    """What a router reads of signals: all of it, unless it declares that (`Router.reads`)."""
    reads: frozenset[str] = getattr(router, "reads", SIGNAL_FIELDS)
    return reads
