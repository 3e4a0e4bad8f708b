"""Which replica gets the KV that leaves a source.

A destination is usable if it decodes, its lock can be taken now (it is held for the whole transfer:
one inbound batch at a time), and its blocks can hold the batch. `first_free` takes the usable
replica with the lowest id (BlitzScale), `least_used` the one with the fewest blocks in use. Those
to which transfers have failed are tried last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Literal

from emu.migration.world import MigrationWorld
from emu.replica.replica import Replica
from emu.request import Request


class Destinations:
    """The choice of one source."""

    def __init__(
        self,
        source: Replica,
        world: MigrationWorld,
        *,
        holder: str,
        policy: Literal["first_free", "least_used"],
        are_alike: bool,
    ) -> None:
        """`holder`: in whose name locks are taken. `are_alike`: as for a `Watcher`."""
        self.was_refused = False
        """The last search found only destinations that a fault makes refuse."""
        self.failures: dict[int, int] = {}
        """How often a transfer has failed, by destination, since the last that did not."""
        self._source = source
        self._world = world
        self._holder = holder
        self._policy = policy
        self._are_alike = are_alike

    def take(self, requests: list[Request]) -> Replica | None:
        """A destination whose lock and blocks we have taken, or None."""
        self.was_refused = False
        world, source = self._world, self._source
        candidates: Iterable[Replica] = self._in_order(requests)
        if self.failures:
            candidates = sorted(candidates, key=lambda r: self.failures.get(r.replica_id, 0))
        pin = requests[0].decode_pin
        for replica in candidates:
            if pin >= 0 and replica.replica_id != pin:
                continue
            if not replica.lock.try_acquire(self._holder):
                continue
            if world.refuses(source, replica, requests):
                self.was_refused = True
            elif replica.actor.reserve(requests):
                return replica
            replica.lock.release(self._holder)
        return None

    def _in_order(self, requests: list[Request]) -> Iterator[Replica]:
        """Those with room, as the policy wants them; only those that may be next are settled."""
        source, is_first_free = self._source, self._policy == "first_free"
        least = source.scheduler.blocks_to_reserve(requests) if self._are_alike else 0
        heap: list[tuple[int, int, bool, Replica]] = []
        for replica in self._world.receivers():
            # A replica whose leap is not settled looks emptier than it is, never fuller.
            ledger = replica.scheduler.ledger
            blocks_free = ledger.pool.blocks_free
            if blocks_free < least or replica is source:
                continue
            if is_first_free:
                yield replica
            else:
                used = ledger.blocks_total - blocks_free
                heap.append((used, replica.replica_id, False, replica))
        heapify(heap)
        while heap:
            _, replica_id, is_settled, replica = heap[0]
            if is_settled:
                heappop(heap)
                yield replica
            else:
                replica.settle()
                used = replica.scheduler.blocks_used
                heapreplace(heap, (used, replica_id, True, replica))

    def none_could_hold(self, requests: list[Request]) -> bool:
        """Not even an empty replica (shared prefixes are not shared there)."""
        others = (r.scheduler for r in self._world.members if r is not self._source)
        return all(s.blocks_to_reserve(requests) > s.blocks_total for s in others)
