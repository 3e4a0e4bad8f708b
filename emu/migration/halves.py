"""KV of a batch that two replicas computed: two halves that meet at one destination.

Owns, for the watcher of one replica, its halves of split batches (BlitzScale 3.4, 4.8). The first
half, layers [0, k), leaves the new replica while the old one still computes: its watcher chooses
the destination, locks it and reserves the blocks of the whole batch once. The second half, layers
[k, L), leaves the old replica for the same destination when the prompt is done. What is delivered
is one batch, when both halves are there; then the destination is opened, in this order.

At most one half of a source is on its way; the smallest batch id goes first. A half without a
destination waits without holding up anything else (the original freezes the whole watcher).
A batch whose requests all end at their first token sends no second half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from emu.migration.transfer import (
    MigratingBatch,
    carry_first_token,
    kv_bytes,
    prompt_tokens,
)
from emu.network.base import Transfer
from emu.replica.events import KvDelivered, Unreserved
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.request import Request, Status

if TYPE_CHECKING:
    from emu.migration.watcher import Watcher


class Halves:
    """Halves of split batches that leave one source."""

    def __init__(self, watcher: Watcher) -> None:
        self.firsts: list[SplitBatch] = []
        """Computed here, waiting for a destination; ascending id."""
        self.seconds: list[SplitBatch] = []
        """Finished here, waiting for the first half to have found a destination."""
        self.in_flight: tuple[SplitBatch, Transfer] | None = None
        self._watcher = watcher

    @property
    def name(self) -> str:
        """In whose name the destination's lock is held."""
        return self._watcher.name

    def _destination(self, split: SplitBatch) -> Replica:
        return self._watcher.world.replicas[split.destination_id]

    # --- entering -------------------------------------------------------------------------------
    def append_first(self, split: SplitBatch) -> None:
        """The source holds the first layers' KV of a batch."""
        watcher = self._watcher
        split.first_half = self
        watcher.unfinished += 1
        watcher.world.tokens_in_migration += prompt_tokens(split.requests)
        self.firsts.append(split)
        self.pump()
        watcher.leases.watch()

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        """The source holds the other layers' KV of those that go on."""
        split.survivors = survivors
        if split.is_dropped:  # the other half was lost while this one was computed
            self._watcher.release(survivors)
            self._watcher.world.lost(survivors, "replica_lost")
            return
        if not survivors:
            self._drop(split)
            return
        self._watcher.unfinished += 1
        self.seconds.append(split)
        split.second_half = self
        self.pump()

    def cancel(self, request: Request) -> bool:
        """The client has gone: True if the KV is here on its way out (it ends with the batch)."""
        for split in self.own():
            if request not in split.requests:
                continue
            going = split.survivors or split.requests
            if all(r is request or r.status.is_terminal for r in going):
                self._drop(split)
            return True
        return False

    def own(self) -> list[SplitBatch]:
        """Batches of which a half waits here or leaves from here."""
        flying = [] if self.in_flight is None else [self.in_flight[0]]
        return [*self.firsts, *self.seconds, *flying]

    # --- transfers ------------------------------------------------------------------------------
    @property
    def is_stuck(self) -> bool:
        """The next half needs a destination that there is not."""
        return self.in_flight is None and bool(self.firsts)

    def pump(self) -> None:
        """Start the next half, smallest batch id first."""
        if self.in_flight is not None or self._watcher.is_pausing:
            return
        eligible = [split for split in self.seconds if split.destination_id >= 0]
        for split in sorted([*self.firsts[:1], *eligible], key=_batch_id):
            if split.destination_id >= 0:
                self.seconds.remove(split)
                self._start_second(split)
                return
            if self._find_destination(split):
                self.firsts.remove(split)
                self._start_first(split)
                return

    def _find_destination(self, split: SplitBatch) -> bool:
        watcher = self._watcher
        wanted = [r for r in split.requests if not r.status.is_terminal]
        destination = watcher.destinations.take(wanted)
        watcher.note_search(destination is not None)
        if destination is None:
            if watcher.destinations.was_refused:
                self._refused(split)
            return False
        split.destination_id = destination.replica_id
        split.reserved = wanted
        return True

    def _start_first(self, split: SplitBatch) -> None:
        size_bytes = self._size(split.requests) * split.start_layer // split.layers
        self._send(split, split.requests, size_bytes, self._on_first_done)
        second = split.second_half
        if second is not None:
            second.pump()

    def _start_second(self, split: SplitBatch) -> None:
        assert split.survivors is not None
        size = self._size(split.survivors)
        size_bytes = size - size * split.start_layer // split.layers
        self._send(split, split.survivors, size_bytes, self._on_second_done)

    def _size(self, requests: list[Request]) -> int:
        watcher = self._watcher
        return kv_bytes(requests, watcher.block_size, watcher.kv_bytes_per_token)

    def _send(
        self,
        split: SplitBatch,
        requests: list[Request],
        size_bytes: int,
        on_done: Callable[[MigratingBatch], None],
    ) -> None:
        watcher = self._watcher
        destination = self._destination(split)
        half = MigratingBatch(
            split.batch_id, requests, 0, split.queued_ns, watcher.world.kernel.now_ns, size_bytes
        )
        transfer = watcher.world.network.send(
            watcher.source.grid,
            destination.grid,
            size_bytes,
            kind="kv",
            on_done=lambda: on_done(half) if self._is_current(half) else None,
            on_failed=lambda reason: self._on_failed(split, reason),
            pair=(watcher.source.replica_id, destination.replica_id),
        )
        self.in_flight = (split, transfer)

    def _is_current(self, half: MigratingBatch) -> bool:
        """False for a second notice of the same end."""
        return self.in_flight is not None and self.in_flight[0].batch_id == half.batch_id

    def _refused(self, split: SplitBatch) -> None:
        """Every destination refuses: again later, but not for ever."""
        watcher = self._watcher
        split.attempts += 1
        if split.attempts > watcher.world.attempts_max:
            watcher.world.lost(self._lose(split), "destination_refused")
        watcher.pause(watcher.world.retry_pause_ns(split.attempts))

    def _on_failed(self, split: SplitBatch, reason: str) -> None:
        """A half did not arrive: the batch is computed again."""
        self._watcher.world.lost(self._lose(split), reason)

    def _on_first_done(self, half: MigratingBatch) -> None:
        split = self._leave_flight(half)
        split.is_first_done = True
        self._watcher.release(split.requests)
        self._source_done()
        if split.is_second_done:
            self._deliver(split)

    def _on_second_done(self, half: MigratingBatch) -> None:
        split = self._leave_flight(half)
        split.is_second_done = True
        assert split.survivors is not None
        self._watcher.release(split.survivors)
        self._source_done()
        if split.is_first_done:
            self._deliver(split)

    def _leave_flight(self, half: MigratingBatch) -> SplitBatch:
        assert self.in_flight is not None
        split = self.in_flight[0]
        self.in_flight = None
        watcher = self._watcher
        watcher.world.on_transfer(
            half, watcher.source, self._destination(split), watcher.world.kernel.now_ns
        )
        return split

    def _source_done(self) -> None:
        watcher = self._watcher
        watcher.ended()
        self.pump()

    # --- ends -----------------------------------------------------------------------------------
    def _deliver(self, split: SplitBatch) -> None:
        """Both halves are there: one batch to decode. Deliver, then open the destination."""
        destination = self._destination(split)
        assert split.survivors is not None
        world = self._watcher.world
        arrived = [r for r in split.survivors if not r.status.is_terminal]
        going_on = {request.request_id for request in arrived}
        gone = [r for r in split.reserved if r.request_id not in going_on]
        if gone:
            destination.actor.tell(Unreserved(requests=gone))
        for request in arrived:
            if world.decode_delivers:
                carry_first_token(request, world.kernel.now_ns)
            request.migrations += 1
            request.migration_ns += world.kernel.now_ns - request.first_token_ns
            request.holder_id = destination.replica_id
            request.status = Status.RUNNING
        if arrived:
            destination.actor.post(KvDelivered(requests=arrived))
        self._close(split, destination)

    # --- faults ---------------------------------------------------------------------------------
    def lose_destination(self, destination: Replica) -> None:
        """The destination of some batches has crashed, with the halves that had arrived."""
        lost: list[Request] = []
        for split in self.own():
            if split.destination_id == destination.replica_id and not split.is_dropped:
                lost += self._lose(split)
        self._watcher.world.lost(lost, "replica_lost")

    def lose_source(self) -> list[Request]:
        """All halves that are here are gone; the requests that were to go on."""
        splits = self.own()
        self.firsts, self.seconds = [], []
        lost: list[Request] = []
        for split in splits:
            lost += self._lose(split)
        return lost

    def lose_old(self, since_ns: int) -> list[Request]:
        """Halves that wait for a destination since then are gone; requests that were to go on."""
        lost: list[Request] = []
        for split in [split for split in self.firsts if split.queued_ns <= since_ns]:
            lost += self._lose(split)
        return lost

    def drop_lost(self, split: SplitBatch) -> None:
        """A replica that was computing or receiving a part of the batch has crashed."""
        if not split.is_dropped:
            self._drop(split)

    def _lose(self, split: SplitBatch) -> list[Request]:
        """Requests still being computed are lost when that ends (`append_second`)."""
        self._drop(split)
        return [r for r in split.survivors or () if not r.status.is_terminal]

    def _drop(self, split: SplitBatch) -> None:
        """No request goes on: stop what is on its way, free all blocks."""
        first, second = split.first_half, split.second_half
        assert first is not None
        split.is_dropped = True
        if not split.is_first_done:
            first.forget(split, split.requests)
        if second is not None and not split.is_second_done:
            assert split.survivors is not None
            second.forget(split, split.survivors)
        if split.destination_id < 0:
            self._account_gone(split)
        else:
            destination = self._destination(split)
            destination.actor.tell(Unreserved(requests=split.reserved))
            self._close(split, destination)
        first.pump()
        if second is not None:
            second.pump()

    def forget(self, split: SplitBatch, requests: list[Request]) -> None:
        """A half does not leave this source, and its blocks are free."""
        if split in self.firsts:
            self.firsts.remove(split)
        elif split in self.seconds:
            self.seconds.remove(split)
        elif self.in_flight is not None and self.in_flight[0] is split:
            self.in_flight[1].cancel()
            self.in_flight = None
        self._watcher.release(requests)
        self._watcher.ended()

    def _close(self, split: SplitBatch, destination: Replica) -> None:
        first = split.first_half
        assert first is not None
        self._account_gone(split)
        destination.lock.release(first.name)
        self._watcher.world.on_capacity(destination)

    def _account_gone(self, split: SplitBatch) -> None:
        self._watcher.world.tokens_in_migration -= prompt_tokens(split.requests)


def _batch_id(split: SplitBatch) -> int:
    return split.batch_id
