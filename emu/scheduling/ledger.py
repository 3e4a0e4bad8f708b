"""The ledger of a replica's scheduler: which requests wait, and whose the KV blocks are.

Owns the waiting queue, the KV pool, the requests that are detached (their blocks stay until the
transfer ended), inbound reservations, arrived requests that do not run yet, blocks lost to a
fault, and requests that failed here and have not been reported. Every scheduler has one. It does
not decide which requests run: running requests are the policy's, their blocks are the pool's.

Places of a request: waiting -> running -> gone; beside these `detached` (left the running set,
blocks stay), `reserved` (blocks without a request) and `arrived` (KV complete, not running yet).

The handoff of KV is explicit: hold at the source, `reserve` at the destination, transfer,
`activate` there, `release` at the source. A reservation is all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool
from emu.kv.grouped import GroupedPool
from emu.request import Request
from emu.scheduling.queues import WaitingQueue
from emu.units import ceil_div


@final
class Reservation:
    """Blocks set aside for one inbound request, or held for an outgoing one.

    The request's own fields name the blocks at whichever replica it runs; a source that waits
    for the end of a transfer must remember its blocks itself.
    """

    request: Request
    blocks: int
    held: Any
    """As in `Request.held`, or what the pool gave."""

    __slots__ = ("blocks", "held", "request")

    def __init__(self, request: Request, blocks: int, held: Any) -> None:
        self.request = request
        self.blocks = blocks
        self.held = held


@final
class Ledger:
    """Waiting requests, the KV pool, and requests on their way in or out."""

    def __init__(self, pool: BlockPool | CountingPool | GroupedPool, queue: WaitingQueue) -> None:
        self.pool = pool
        self.queue = queue
        self.preemptions_max = 0
        """A request preempted more often fails (0 = no limit)."""
        self.blocks_total = pool.blocks_total
        """Blocks of the pool, less the lost ones."""
        self.detached: dict[int, Reservation] = {}
        self.reserved: dict[int, Reservation] = {}
        self.arrived: dict[int, Request] = {}
        """Activated requests that do not run yet, in order of arrival here."""
        self.failed: list[tuple[Request, str]] = []
        """Requests that can never go on here, with the reason, until they are reported."""
        self._lost: dict[int, tuple[int, list[Any]]] = {}
        """Blocks that faults have taken out of the pool, by number of the loss: count and ids."""

    @property
    def inbound(self) -> int:
        """Requests whose KV comes, or has come and is not taken up."""
        return len(self.reserved) + len(self.arrived)

    @property
    def blocks_used(self) -> int:
        """Blocks that are neither free nor lost."""
        return self.blocks_total - self.pool.blocks_free

    @property
    def holds_blocks(self) -> bool:
        """Some blocks belong to requests that are on their way in or out."""
        return bool(self.detached or self.reserved or self.arrived)

    @property
    def blocks_in_transit(self) -> int:
        """Blocks held for requests on their way out, or reserved for those on their way in."""
        entries = [*self.detached.values(), *self.reserved.values()]
        return sum(entry.blocks for entry in entries)

    # Waiting.
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request joins the waiting queue; it has no KV here."""
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        forget_kv(request)
        self.queue.append(request)

    def requeue(self, request: Request) -> bool:
        """A preempted request, its blocks freed, waits at the front. False: it fails instead."""
        request.preemptions += 1
        if self.preemptions_max and request.preemptions > self.preemptions_max:
            self.failed.append((request, f"preempted {request.preemptions} times"))
            return False
        self.queue.push_front(request)
        return True

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests that failed since the last call."""
        failed, self.failed = self.failed, []
        return failed

    # Outgoing KV.
    def hold(self, request: Request) -> None:
        """The request left the running set; its blocks stay."""
        assert request.request_id not in self.detached
        self.detached[request.request_id] = Reservation(request, request.kv_blocks, request.held)

    def release(self, request: Request) -> None:
        """Free the blocks held for it, if there are any (the replica may have been evacuated)."""
        held = self.detached.pop(request.request_id, None)
        if held is not None:
            self.pool.put_back_held(request.request_id, held.blocks, held.held)

    # Incoming KV.
    def reserve(self, requests: Sequence[Request], blocks: Sequence[int]) -> bool:
        """Take so many blocks for each of the requests, or none at all."""
        if sum(blocks) > self.pool.blocks_free:
            return False
        for at, request in enumerate(requests):
            count = blocks[at]
            assert request.request_id not in self.reserved, "reserved twice"
            self.reserved[request.request_id] = Reservation(request, count, self.pool.take(count))
        return True

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give reservations back; unknown ones are ignored (evacuated meanwhile)."""
        for request in requests:
            reservation = self.reserved.pop(request.request_id, None)
            if reservation is not None:
                self.pool.put_back(reservation.blocks, reservation.held)

    def activate(self, requests: Sequence[Request]) -> None:
        """KV is complete: the reservation becomes the request's blocks."""
        for request in requests:
            reservation = self.reserved.pop(request.request_id)
            self.pool.hand_over(request, reservation.blocks, reservation.held)
            self.arrived[request.request_id] = request

    def adopt(self, requests: Sequence[Request]) -> None:
        """Detached requests go on here, with the blocks that they have."""
        for request in requests:
            held = self.detached.pop(request.request_id)
            request.kv_blocks = held.blocks
            if self.pool.has_identities:
                request.held = held.held
            self.arrived[request.request_id] = request

    # Losses.
    def lose(self, loss: int, blocks: int) -> int:
        """A fault takes so many free blocks out of the pool, or as many as are free; how many.

        `loss`: a number of its own, for `restore`. Lost blocks are neither used nor free:
        `blocks_total` is what is left.
        """
        assert loss not in self._lost, "lost twice"
        taken = min(blocks, self.pool.blocks_free)
        if taken <= 0:
            return 0
        self._lost[loss] = (taken, self.pool.take(taken))
        self.blocks_total -= taken
        return taken

    def restore(self, loss: int) -> None:
        """The blocks of one loss are free again, those of others are not.

        Nothing happens if it has taken none.
        """
        blocks, ids = self._lost.pop(loss, (0, []))
        if blocks:
            self.pool.put_back(blocks, ids)
            self.blocks_total += blocks

    def evacuate(self, running: Iterable[Request]) -> list[Request]:
        """Everything leaves, KV lost; the pool is empty, lost blocks are back.

        Returned are the waiting requests, the `running` ones, those that arrived and those that
        failed. Detached and reserved ones have another owner.
        """
        waiting = list(self.queue)
        for request in waiting:
            self.queue.remove(request)
        failed = [request for request, _ in self.take_failed()]
        leaving = [*waiting, *running, *self.arrived.values(), *failed]
        self.detached.clear()
        self.reserved.clear()
        self.arrived.clear()
        self._lost.clear()
        self.pool.clear()
        self.blocks_total = self.pool.blocks_total
        for request in leaving:
            forget_kv(request)
        return leaving

    def forget(self) -> None:
        """Nothing is found again, if nothing is held; what a fault has taken stays taken."""
        pool = self.pool
        if not self._lost and pool.blocks_free == pool.blocks_total:
            pool.clear()

    # Checks.
    def recount(self, holders: Sequence[Request], other_blocks: int = 0) -> list[str]:
        """One line for each thing that is wrong, all blocks counted from scratch.

        `holders`: requests with blocks and exact counts, arrived ones included.
        `other_blocks`: blocks that the policy keeps for no request in particular.
        """
        pool, queue = self.pool, self.queue
        problems = [
            f"request {r.request_id}: {r.computed_tokens} tokens in {r.kv_blocks} blocks"
            for r in holders
            if not isinstance(pool, GroupedPool)
            and r.kv_blocks < ceil_div(r.computed_tokens, pool.block_size)
        ]
        problems += [f"request {r.request_id} waits with blocks" for r in queue if r.kv_blocks]
        if queue.count != len(list(queue)):
            problems.append(f"{queue.count} requests wait, counted {len(list(queue))}")
        if sum(r.prompt_tokens for r in queue) != queue.prompt_tokens:
            problems.append("waiting tokens do not add up")
        if isinstance(pool, GroupedPool):
            outside = [entry.held for entry in self.reserved.values()]
            return problems + pool.recount(outside + [lost for _, lost in self._lost.values()])
        owners = [(r.kv_blocks, r.held) for r in holders]
        owners += [(entry.blocks, entry.held) for entry in self.detached.values()]
        owners += [(entry.blocks, None) for entry in self.reserved.values()]
        owners += [(blocks, None) for blocks, _ in self._lost.values()]
        if other_blocks:
            owners.append((other_blocks, None))
        return problems + pool.recount(owners)


def forget_kv(request: Request) -> None:
    """The request has no KV anywhere."""
    request.computed_tokens = request.kv_blocks = 0
    request.held = None
