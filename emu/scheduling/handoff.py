"""KV that is here without running here: outgoing (detached) and incoming (reserved, activated).

Owns: which requests are detached (their blocks stay until the transfer ended), which inbound
requests have a reservation, and which arrived ones wait for a place in the running set. Works on
the pool of the scheduler that it belongs to. Does not choose destinations or time transfers.

The handoff of KV is explicit: hold (`detach`), `reserve` at the destination, transfer, `activate`
there, `release` here. A reservation is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from emu.kv.pool import KvPool
from emu.request import Request


@final
class Reservation:
    """Blocks set aside for one inbound request, or held for an outgoing one.

    The request's own fields name the blocks at whichever replica it runs; a source that waits
    for the end of a transfer must remember its blocks itself.
    """

    request: Request
    blocks: int
    block_ids: list[int]

    __slots__ = (
        "block_ids",
        "blocks",
        "request",
    )

    def __init__(
        self,
        request: Request,
        blocks: int,
        block_ids: list[int],
    ) -> None:
        self.request = request
        self.blocks = blocks
        self.block_ids = block_ids


class Handoff:
    """Books of detached, reserved and arrived requests of one replica."""

    def __init__(self, pool: KvPool, blocks_for: Callable[[Request], int]) -> None:
        """`blocks_for`: blocks to reserve for an inbound request."""
        self._pool = pool
        self._blocks_for = blocks_for
        self.detached: dict[int, Reservation] = {}
        self.reserved: dict[int, Reservation] = {}
        self.arrived: dict[int, Request] = {}
        """Activated requests that have no seat yet, in order of arrival here."""
        self.lost: list[tuple[int, list[int]]] = []
        """Blocks that a fault has taken out of the pool: counts and ids."""

    # --- outgoing ---------------------------------------------------------------------------
    def hold(self, request: Request) -> None:
        """The request left the running set; its blocks stay."""
        assert request.request_id not in self.detached
        self.detached[request.request_id] = Reservation(
            request, request.kv_blocks, request.block_ids or []
        )

    def release(self, request: Request) -> bool:
        """Free what is held for it. False if nothing is (the replica was evacuated meanwhile)."""
        held = self.detached.pop(request.request_id, None)
        if held is None:
            return False
        self._pool.put_back(held.blocks, held.block_ids)
        return True

    # --- incoming ---------------------------------------------------------------------------
    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks for all of them together."""
        return sum(map(self._blocks_for, requests))

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Take the blocks of all, or none."""
        wanted = list(map(self._blocks_for, requests))
        if sum(wanted) > self._pool.blocks_free:
            return False
        for request, blocks in zip(requests, wanted, strict=True):
            assert request.request_id not in self.reserved
            self.reserved[request.request_id] = Reservation(
                request, blocks, self._pool.take(blocks)
            )
        return True

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give reservations back; unknown ones are ignored (evacuated meanwhile)."""
        for request in requests:
            reservation = self.reserved.pop(request.request_id, None)
            if reservation is not None:
                self._pool.put_back(reservation.blocks, reservation.block_ids)

    def activate(self, requests: Sequence[Request]) -> None:
        """KV is complete: the reservation becomes the request's blocks."""
        for request in requests:
            reservation = self.reserved.pop(request.request_id)
            self._pool.hand_over(request, reservation.blocks, reservation.block_ids)
            self.arrived[request.request_id] = request

    def adopt(self, requests: Sequence[Request]) -> None:
        """Detached requests go on here, with the blocks that they have."""
        for request in requests:
            held = self.detached.pop(request.request_id)
            request.kv_blocks = held.blocks
            if self._pool.has_identities:
                request.block_ids = held.block_ids
            self.arrived[request.request_id] = request

    # --- both -------------------------------------------------------------------------------
    @property
    def holds_blocks(self) -> bool:
        """Some blocks belong to requests that are on their way in or out."""
        return bool(self.detached or self.reserved or self.arrived)

    def clear(self) -> list[Request]:
        """Forget everything; returns the arrived requests (the others have another owner)."""
        arrived = list(self.arrived.values())
        self.detached.clear()
        self.reserved.clear()
        self.arrived.clear()
        self.lost.clear()
        return arrived

    def blocks_held(self) -> int:
        """Blocks of detached and reserved requests, and lost ones, counted from scratch."""
        lost = sum(blocks for blocks, _ in self.lost)
        return lost + sum(entry.blocks for entry in self._entries())

    def block_lists(self) -> list[list[int]]:
        """Ids of the same blocks, where they have any."""
        return [entry.block_ids for entry in self._entries()] + [ids for _, ids in self.lost]

    def _entries(self) -> list[Reservation]:
        return [*self.detached.values(), *self.reserved.values()]


class WithHandoff:
    """The part of the scheduler protocol that only concerns `Handoff`."""

    _handoff: Handoff

    def release(self, request: Request) -> None:
        """Free the blocks of a detached request (no-op after an evacuation)."""
        self._handoff.release(request)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks for the reached length of each: prompt and output so far."""
        return self._handoff.blocks_to_reserve(requests)

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Reserve blocks for inbound requests, all or nothing."""
        return self._handoff.reserve(requests)

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give back reservations that will not be used."""
        self._handoff.unreserve(requests)

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        """Reserved requests join the running set as soon as there is a seat."""
        for request in requests:
            request.computed_tokens = request.reached_tokens - 1
        self._handoff.activate(requests)

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests of this replica go on here."""
        self._handoff.adopt(requests)
