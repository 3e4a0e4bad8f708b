"""Which replica gets the KV that leaves a source.

A destination is usable if it decodes, its lock can be taken now (it is held for the whole
transfer: one inbound batch at a time), and its blocks can hold the batch. `first_free` takes the
usable replica with the lowest id (BlitzScale), `least_used` the one with the fewest blocks in
use. Those to which transfers have failed are tried last. A policy of a user's own sees all usable
ones with room and may wait; what it chooses and does not get is not offered again in the same
search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from emu.kernel.natives import heapify, heappop, heapreplace
from emu.migration.ports import MigrationWorld
from emu.policy import ReplicaView
from emu.policy.own import OwnPlacement
from emu.replica.view import ReplicaHandle, View
from emu.request import Request


class Taken(NamedTuple):
    """KV that leaves a replica has found a destination."""

    source: int
    requests: Sequence[Request]
    uses: Sequence[tuple[int, int, int]]
    """Replicas that were open, with blocks in use and blocks."""
    destination: int


OnTaken = Callable[[Taken], None]


class Choosing:
    """How destinations are chosen, for all sources alike."""

    def __init__(
        self,
        policy: str,
        own: OwnPlacement | None = None,
        see: Callable[[ReplicaHandle], ReplicaView] | None = None,
        on_taken: OnTaken | None = None,
    ) -> None:
        """`own`: a policy of a user's own, which sees replicas as `see` shows them. `on_taken`:
        told of each choice."""
        self.policy = policy
        self.own = own
        self.see = see
        self.on_taken = on_taken


class Destinations:
    """The choice of one source."""

    def __init__(
        self,
        source: ReplicaHandle,
        world: MigrationWorld,
        choosing: Choosing,
        *,
        holder: str,
        are_alike: bool,
    ) -> None:
        """`holder`: in whose name locks are taken. `are_alike`: every replica reserves the same
        number of blocks for a request."""
        self._own = choosing.own
        self._see = choosing.see
        self._on_taken = choosing.on_taken
        self.was_refused = False
        """The last search found only destinations that a fault makes refuse."""
        self.was_full = False
        """Some destination of the last search had blocks for all requests, and places for fewer."""
        self.failures: dict[int, int] = {}
        """How often a transfer has failed, by destination, since the last that did not."""
        self._source = source
        self._world = world
        self._holder = holder
        self._policy = choosing.policy
        self._are_alike = are_alike
        self._its = source.view()
        self._views: dict[int, View] = {}
        """Figures of the destinations seen so far, by id."""

    def take(self, requests: list[Request]) -> int:
        """A destination whose lock and blocks are taken now, by id, or -1."""
        uses = () if self._on_taken is None else self._uses()
        self.was_refused = self.was_full = False
        world, source = self._world, self._source
        candidates: Iterable[ReplicaHandle] = self._in_order(requests)
        if self.failures:
            candidates = sorted(candidates, key=lambda r: self.failures.get(r.replica_id, 0))
        pin = requests[0].decode_pin
        if self._own is not None and pin < 0:
            candidates = self._chosen(requests)
        for replica in candidates:
            if pin >= 0 and replica.replica_id != pin:
                continue
            if not replica.view().has_places(len(requests)):
                self.was_full = True
                continue
            if not replica.lock.try_acquire(self._holder):
                continue
            if world.refuses(source, replica, requests):
                self.was_refused = True
            elif replica.actor.reserve(requests):
                if world.scarce_decode:
                    world.searched(is_found=True)
                if self._on_taken is not None:
                    self._on_taken(Taken(source.replica_id, requests, uses, replica.replica_id))
                return replica.replica_id
            replica.lock.release(self._holder)
        world.searched(is_found=False)
        return -1

    def _uses(self) -> Sequence[tuple[int, int, int]]:
        """Open replicas, with their blocks in use and all their blocks."""
        found = []
        for replica in self._world.receivers():
            if replica is not self._source and not replica.lock.is_held:
                view = replica.view()
                found.append((replica.replica_id, view.blocks_used, view.blocks_total))
        return found

    def _chosen(self, requests: list[Request]) -> Iterator[ReplicaHandle]:
        """Those that a policy of a user's own names, one after the other."""
        assert self._own is not None and self._see is not None
        left = []
        for replica in self._world.receivers():
            if replica is self._source or replica.lock.is_held:
                continue
            if replica.view().has_room(requests):
                left.append(replica)
        while left:
            chosen = self._own.choose(requests, [self._see(replica) for replica in left])
            if chosen < 0:
                return
            yield left.pop(chosen)

    def _in_order(self, requests: list[Request]) -> Iterator[ReplicaHandle]:
        """Those with room, as the policy wants them; only those that may be next are settled."""
        source, views, is_first_free = self._source, self._views, self._policy == "first_free"
        least = self._its.blocks_to_reserve(requests) if self._are_alike else 0
        heap: list[tuple[int, int, bool, ReplicaHandle]] = []
        for replica in self._world.receivers():
            view = views.get(replica.replica_id)
            if view is None:
                view = views[replica.replica_id] = replica.view()
            blocks_free = view.promised_blocks_free
            if blocks_free < least or replica is source:
                continue
            if is_first_free:
                yield replica
            else:
                used = view.blocks_total - blocks_free
                heap.append((used, replica.replica_id, False, replica))
        heapify(heap)
        while heap:
            _, replica_id, is_settled, replica = heap[0]
            if is_settled:
                heappop(heap)
                yield replica
            else:
                heapreplace(heap, (views[replica_id].blocks_used, replica_id, True, replica))

    def failed(self, destination_id: int) -> None:
        """A transfer there has failed: it is tried last."""
        self.failures[destination_id] = self.failures.get(destination_id, 0) + 1

    def arrived(self, destination_id: int) -> None:
        """A transfer there went well."""
        self.failures.pop(destination_id, None)

    def forget(self) -> None:
        """The source begins another life."""
        self.failures.clear()

    def none_could_hold(self, requests: list[Request]) -> bool:
        """True if not even an empty replica could (shared prefixes are not shared there)."""
        others = (r.view() for r in self._world.members if r is not self._source)
        return all(s.blocks_to_reserve(requests) > s.blocks_total for s in others)
