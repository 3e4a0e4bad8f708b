"""The migration watcher of a prefill replica: outbound queue and transfers.

Owns the outbound batches of one source. At most one full batch of a source is on its way; full
batches leave in the order in which their prompts ended, each to a destination of their choice
(`emu/migration/destinations.py`).

Waits, never polls: a new batch, a lock or blocks that became free, and changes of state poke it.
The delivery to the destination comes before its lock is released, always.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final, Literal

from emu.kernel.actor import PARK, Actor
from emu.kernel.priorities import PRIORITY_WATCHER, PRIORITY_WORLD
from emu.migration.destinations import Destinations
from emu.migration.halves import Halves
from emu.migration.lease import Leases
from emu.migration.transfer import (
    MigratingBatch,
    carry_first_token,
    kv_blocks,
    kv_bytes,
    prompt_tokens,
)
from emu.migration.world import MigrationWorld
from emu.network.base import Transfer
from emu.replica.events import KvDelivered, Released, Unreserved
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.request import HANDOFF_NEVER_NS, Request, Status

S = ReplicaState
_RUNNING: Final = Status.RUNNING
_GOES_ON: Final = (S.PREFILL, S.NEW_PREFILL, S.OLD_PREFILL, S.REFRACTORY_PREFILL)
"""States of a source that do not wait for the end of its migrations."""


class Watcher(Actor):
    """Outbound migrations of one replica."""

    def __init__(
        self,
        source: Replica,
        world: MigrationWorld,
        *,
        policy: Literal["first_free", "least_used"],
        block_size: int,
        kv_bytes_per_token: int,
        layers: int,
        layerwise: bool,
        lease_ns: int = 0,
        are_alike: bool = False,
        connector_ns: tuple[int, int] = (0, 0),
    ) -> None:
        """`are_alike`: every replica reserves the same number of blocks for a request.
        `connector_ns`: what a handover costs beside its bytes, and each of its blocks.
        """
        super().__init__(
            world.kernel,
            f"watcher {source.replica_id}",
            PRIORITY_WATCHER + source.replica_id,
        )
        self.source = source
        self.world = world
        self.queue: deque[MigratingBatch] = deque()
        self.unfinished = 0
        """Batches that wait here or are on their way, halves included."""
        self.in_flight: tuple[MigratingBatch, Replica, Transfer] | None = None
        self.destinations = Destinations(
            source, world, holder=self.name, policy=policy, are_alike=are_alike
        )
        self.halves = Halves(self)
        self.block_size = block_size
        self.kv_bytes_per_token = kv_bytes_per_token
        self.is_pausing = False
        """Refused everywhere: nothing is offered for a while, whatever changes."""
        self._is_stuck = False
        self._has_handoffs = False
        """Some of its batches wait for an outside router."""
        self._layers = layers
        self._layerwise = layerwise
        self._connector_ns = connector_ns
        self.leases = Leases(self, lease_ns)

    # --- the replica's side -------------------------------------------------------------------
    def append(self, requests: list[Request], prefill_ns: int) -> None:
        """Queue a batch; its KV stays at the source until the transfer has ended."""
        world = self.world
        for request in requests:
            if request.handoff_after_ns >= 0:
                self._append_apart(requests, prefill_ns)
                break
        else:
            self.queue.append(
                MigratingBatch(world.next_batch_id(), requests, prefill_ns, world.kernel.now_ns)
            )
            self.unfinished += 1
        world.tokens_in_migration += prompt_tokens(requests)
        self._pump()
        self.leases.watch()

    def _append_apart(self, requests: list[Request], prefill_ns: int) -> None:
        """Those whose decode replica an outside router names leave alone, when it has."""
        self._has_handoffs = True
        world = self.world
        waiting = [r for r in requests if r.handoff_after_ns >= 0]
        together = [r for r in requests if r.handoff_after_ns < 0]
        for group in [*([together] if together else []), *([r] for r in waiting)]:
            overlapped_ns = prefill_ns if group is together else 0
            self.queue.append(
                MigratingBatch(world.next_batch_id(), group, overlapped_ns, world.kernel.now_ns)
            )
            self.unfinished += 1
        for request in waiting:
            self._await_handoff(request)

    def _await_handoff(self, request: Request) -> None:
        """Look again when an outside router has named the request's decode replica."""
        due_ns = request.arrival_ns + request.handoff_after_ns
        kernel = self.world.kernel
        if kernel.now_ns < due_ns < HANDOFF_NEVER_NS:
            kernel.call_at(due_ns, PRIORITY_WORLD, self.look)

    def append_first(self, split: SplitBatch) -> None:
        """The first layers' KV of a batch that another replica goes on with."""
        self.halves.append_first(split)

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        """The other layers' KV of those that go on."""
        self.halves.append_second(split, survivors)

    def flush(self) -> list[list[Request]]:
        """Take back what is queued (not what is on its way)."""
        batches = list(self.queue)
        self.queue.clear()
        for batch in batches:
            self._account_gone(batch.requests)
            self.unfinished -= 1
        return [batch.requests for batch in batches]

    def cancel(self, request: Request) -> bool:
        """The client has gone: a queued request leaves now, one on its way at the end of it."""
        for batch in self.queue:
            if request in batch.requests:
                batch.requests.remove(request)
                self._account_gone([request])
                self.release([request])
                if not batch.requests:
                    self.queue.remove(batch)
                    self.ended()
                return True
        if self.in_flight is not None and request in self.in_flight[0].requests:
            batch, destination, transfer = self.in_flight
            if all(r is request or r.status.is_terminal for r in batch.requests):
                transfer.cancel()
                self._drop(batch, destination)
            return True
        return self.halves.cancel(request)

    def _drop(self, batch: MigratingBatch, destination: Replica) -> None:
        """No request waits for this KV: its transfer has been stopped, its blocks are free."""
        self.in_flight = None
        self.unfinished -= 1
        self._account_gone(batch.requests)
        self.release(batch.requests)
        destination.actor.tell(Unreserved(requests=batch.requests))
        destination.lock.release(self.name)
        self.source.actor.look()
        self._pump()
        self.world.on_capacity(destination)

    def _account_gone(self, requests: list[Request]) -> None:
        self.world.tokens_in_migration -= prompt_tokens(requests)

    def describe(self) -> str:
        """One line for a story."""
        waiting = "; ".join(
            ",".join(str(r.request_id) for r in batch.requests) for batch in self.queue
        )
        flying = ""
        if self.in_flight is not None:
            batch, destination, _ = self.in_flight
            flying = f", {len(batch.requests)} requests on their way to {destination.name}"
        halves = f", halves of batches {[s.batch_id for s in self.halves.own()]}"
        return f"{self.name}: waiting [{waiting}]{flying}{halves if self.halves.own() else ''}"

    # --- the actor ----------------------------------------------------------------------------
    def tick(self) -> int:
        """Look for a destination again: something has changed that a stuck batch needs."""
        self.inbox.clear()
        self._pump()
        return PARK

    def look(self) -> None:
        """Something has changed that a batch may wait for."""
        self.kernel.wake(self)

    def pause(self, pause_ns: int) -> None:
        """Every destination refuses: nothing is offered for so long, whatever changes."""
        if not self.is_pausing:
            self.is_pausing = True
            self.kernel.call_at(self.kernel.now_ns + pause_ns, PRIORITY_WORLD, self._offer_again)

    def _offer_again(self) -> None:
        self.is_pausing = False
        self.look()

    def ended(self) -> None:
        """A batch less is on its way out, and the source may wait for the last one."""
        self.unfinished -= 1
        self.source.actor.look()

    def release(self, requests: list[Request]) -> None:
        """The KV of these requests has left the source, or is given up."""
        self.source.actor.tell(Released(requests=requests))

    def _pump(self) -> None:
        """Start the next transfer if there is a batch and a destination (else be stuck)."""
        if self.is_pausing:
            return
        halves = self.halves
        if halves.firsts or halves.seconds:
            halves.pump()
        if not self.queue or self.in_flight is not None:
            return
        if self._has_handoffs:
            batch, destination = self._choose()
            if batch is None:
                return
        else:
            batch = self.queue[0]
            destination = self.destinations.take(batch.requests)
        self.note_search(destination is not None)
        if destination is not None:
            self.queue.remove(batch)
            self._start(batch, destination)
        elif self.destinations.none_could_hold(batch.requests):
            self._divide(batch)
        elif self.destinations.was_refused:
            batch.attempts += 1
            if batch.attempts > self.world.attempts_max:
                self.queue.remove(batch)
                self.release(batch.requests)
                self._forget(batch)
                self.world.lost(batch.requests, "destination_refused")
            self.pause(self.world.retry_pause_ns(batch.attempts))

    def _choose(self) -> tuple[MigratingBatch | None, Replica | None]:
        """The first batch that may leave and has a destination, or the first that may leave.

        Full batches leave in order, but for those whose place is given.
        """
        now_ns = self.world.kernel.now_ns
        first: MigratingBatch | None = None
        for batch in self.queue:
            if batch.is_ready(now_ns):
                first = first or batch
                destination = self.destinations.take(batch.requests)
                if destination is not None:
                    return batch, destination
                if batch.requests[0].decode_pin < 0:
                    break
        return first, None

    def _divide(self, batch: MigratingBatch) -> None:
        """The first request goes alone, the others after it; one that fits nowhere fails."""
        first, *rest = batch.requests
        if rest:
            batch.requests = [first]
            tail = MigratingBatch(
                self.world.next_batch_id(), rest, batch.prefill_ns, batch.queued_ns
            )
            self.queue.insert(self.queue.index(batch) + 1, tail)
            self.unfinished += 1
        else:
            self.queue.remove(batch)
            self.release([first])
            self._forget(batch)
            if not first.status.is_terminal:
                self.world.terminal(first, Status.FAILED, "no_decode_replica_holds_it")
        self._pump()

    def note_search(self, is_found: bool) -> None:
        """Remember whether there was a destination; without one, wait for a change."""
        self.world.scarce_decode = not is_found
        is_stuck = not is_found or self.halves.is_stuck
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            self.world.set_stuck(self, is_stuck=is_stuck)

    def _start(self, batch: MigratingBatch, destination: Replica) -> None:
        world = self.world
        batch.started_ns = world.kernel.now_ns
        batch.kv_bytes = kv_bytes(batch.requests, self.block_size, self.kv_bytes_per_token)
        fixed_ns, block_ns = self._connector_ns
        if block_ns:
            fixed_ns += block_ns * sum([kv_blocks(r, self.block_size) for r in batch.requests])
        transfer = world.network.send(
            self.source.grid,
            destination.grid,
            batch.kv_bytes,
            kind="kv",
            on_done=partial(self._on_done, batch, batch.attempts, destination),
            on_failed=partial(self._on_failed, batch, destination),
            overlapped_ns=batch.prefill_ns if self._layerwise else 0,
            pieces=self._layers,
            pair=(self.source.replica_id, destination.replica_id),
            setup_ns=fixed_ns,
        )
        self.in_flight = (batch, destination, transfer)

    def _on_done(self, batch: MigratingBatch, attempt: int, destination: Replica) -> None:
        """Release at the source, deliver, then open the destination."""
        world = self.world
        if self.in_flight is None or self.in_flight[0] is not batch or batch.attempts != attempt:
            return  # a second notice of the same end
        self.in_flight = None
        self.destinations.failures.pop(destination.replica_id, None)
        source = self.source
        self.unfinished -= 1
        self._account_gone(batch.requests)
        self.release(batch.requests)
        migration_ns = world.kernel.now_ns - batch.queued_ns
        arrived: list[Request] = []
        for request in batch.requests:
            if request.status.is_terminal:
                destination.actor.tell(Unreserved(requests=[request]))
                continue
            if world.decode_delivers:
                carry_first_token(request, world.kernel.now_ns)
            request.migrations += 1
            request.migration_ns += migration_ns
            request.holder_id = destination.replica_id
            request.status = _RUNNING
            arrived.append(request)
        if arrived:
            destination.actor.post(KvDelivered(requests=arrived))
        destination.lock.release(self.name)
        world.on_transfer(batch, source, destination, world.kernel.now_ns)
        if source.state not in _GOES_ON:
            source.actor.look()
        self._pump()
        world.on_capacity(destination)

    # --- faults -------------------------------------------------------------------------------
    def _on_failed(self, batch: MigratingBatch, destination: Replica, reason: str) -> None:
        """The transfer has failed: the KV is still here, another destination may take it."""
        assert self.in_flight is not None
        assert self.in_flight[0] is batch
        self.in_flight = None
        destination.actor.tell(Unreserved(requests=batch.requests))
        destination.lock.release(self.name)
        failures = self.destinations.failures
        failures[destination.replica_id] = failures.get(destination.replica_id, 0) + 1
        self._try_again(batch, reason)
        self._pump()
        self.world.on_capacity(destination)

    def _try_again(self, batch: MigratingBatch, reason: str) -> None:
        batch.attempts += 1
        gone = [r for r in batch.requests if r.status.is_terminal]
        if gone:
            self._account_gone(gone)
            self.release(gone)
            batch.requests = [r for r in batch.requests if not r.status.is_terminal]
        if batch.requests and batch.attempts <= self.world.attempts_max:
            self.queue.appendleft(batch)
            self.leases.watch()
            return
        self.release(batch.requests)
        self._forget(batch)
        self.world.lost(batch.requests, reason)

    def _forget(self, batch: MigratingBatch) -> None:
        self._account_gone(batch.requests)
        self.ended()

    def lose_destination(self, destination: Replica) -> None:
        """A destination has crashed: what was on its way there goes elsewhere."""
        if self.in_flight is not None and self.in_flight[1] is destination:
            batch, _, transfer = self.in_flight
            transfer.cancel()
            self.in_flight = None
            destination.lock.release(self.name)
            batch.attempts -= 1  # not the transfer's fault
            self._try_again(batch, "replica_lost")
        self.halves.lose_destination(destination)
        self._pump()

    def lose_old(self, since_ns: int) -> list[Request]:
        """What waits here since then is gone, not what is on its way; the requests."""
        lost = self.halves.lose_old(since_ns)
        for batch in [b for b in self.queue if b.queued_ns <= since_ns]:
            self.queue.remove(batch)
            self.release(batch.requests)
            self._forget(batch)
            lost += batch.requests
        for request in lost:
            request.recomputed_tokens += request.reached_tokens
        return [request for request in lost if not request.status.is_terminal]

    def lose_source(self) -> list[Request]:
        """All KV that waits here or leaves from here is gone; the requests that it was of."""
        lost: list[Request] = []
        if self.in_flight is not None:
            batch, destination, transfer = self.in_flight
            transfer.cancel()
            self.in_flight = None
            destination.actor.tell(Unreserved(requests=batch.requests))
            destination.lock.release(self.name)
            self.queue.appendleft(batch)
            self.world.on_capacity(destination)
        for batch in self.queue:
            self.release(batch.requests)
            self._forget(batch)
            lost += batch.requests
        self.queue.clear()
        lost += self.halves.lose_source()
        self.destinations.failures.clear()
        for request in lost:
            request.recomputed_tokens += request.reached_tokens
        return [request for request in lost if not request.status.is_terminal]
