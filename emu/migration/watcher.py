"""The migration watcher of a replica: it hands events to the machine of the outbound KV and
applies the machine's actions.

Owns the choice of a destination (`Destinations`), the machine (`outbound.py`), the handles of the
transfers that it has started, and its timers. Waits, never polls: a lock or blocks that became free
and changes of state wake it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from emu.kernel.clock import PARK, Actor
from emu.kernel.natives import partial
from emu.kernel.priorities import PRIORITY_WATCHER, PRIORITY_WORLD
from emu.migration import messages as msg
from emu.migration.outbound import HALVES_OFFERED, Outbound
from emu.migration.ports import MigrationWorld
from emu.network.ports import Transfer
from emu.replica.events import KvDelivered, Released, Unreserved
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request

S = ReplicaState
_GOES_ON: Final = (S.PREFILL, S.NEW_PREFILL, S.OLD_PREFILL, S.REFRACTORY_PREFILL)
"""States of a source that do not wait for the end of its migrations."""
_LOOKED: Final = msg.Looked()
_OFFERED: Final = msg.Offered()
_PAUSE_ENDED: Final = msg.PauseEnded()
_LEASE_ENDED: Final = msg.LeaseEnded()


class Watcher(Actor):
    """Outbound migrations of one replica."""

    def __init__(
        self,
        source: ReplicaHandle,
        world: MigrationWorld,
        outbound: Outbound,
        *,
        layers: int,
    ) -> None:
        """`layers`: pieces of a layer-wise transfer."""
        super().__init__(
            world.kernel, name_of(source.replica_id), PRIORITY_WATCHER + source.replica_id
        )
        self.source = source
        self.world = world
        self.outbound = outbound
        self._layers = layers
        self._transfer: Transfer | None = None
        """Of the full batch that is on its way."""
        self._half_transfer: Transfer | None = None
        self._effects: dict[type[msg.Action], Callable[[Any], None]] = {
            msg.Release: self._release,
            msg.WakeSource: self._wake_source,
            msg.Unreserve: self._unreserve,
            msg.Deliver: self._deliver,
            msg.Unlock: self._unlock,
            msg.Pin: self._pin,
            msg.Unpin: self._unpin,
            msg.FreeCapacity: self._free_capacity,
            msg.Send: self._send,
            msg.CancelTransfer: self._cancel_transfer,
            msg.Record: self._record,
            msg.HandOver: self._hand_over,
            msg.Offer: self._offer,
            msg.OfferBatch: self._offer_batch,
            msg.OfferHalves: self._offer_halves,
            msg.Pause: self._pause,
            msg.SetStuck: self._set_stuck,
            msg.WakeSelf: self._wake_self,
            msg.LookAt: self._look_at,
            msg.ArmLease: self._arm_lease,
            msg.End: self._end,
            msg.Lose: self._lose,
            msg.Tell: self._tell,
        }
        """How each action is applied."""

    def tell(self, event: msg.Event) -> None:
        """Handle it now; its actions are applied before the sender goes on."""
        for action in self.outbound.step(event, self.kernel.now_ns):
            self._effects[action.__class__](action)

    def tick(self) -> int:
        """Look for a destination again: something has changed that a stuck batch needs."""
        self.inbox.clear()
        self.tell(_LOOKED)
        return PARK

    def look(self) -> None:
        """Something has changed that a batch may wait for."""
        self.kernel.wake(self)

    @property
    def unfinished(self) -> int:
        """Batches whose KV waits at the source or leaves from there."""
        return self.outbound.unfinished

    def append(self, requests: list[Request], prefill_ns: int) -> None:
        """Queue a batch; its KV stays at the source until the transfer has ended."""
        done = msg.PromptsDone(requests, prefill_ns)
        for action in self.outbound.step(done, self.kernel.now_ns):
            self._effects[action.__class__](action)

    def append_first(self, split: SplitBatch) -> None:
        """The first layers' KV of a batch that another replica goes on with."""
        self.tell(msg.FirstComputed(split))

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        """The other layers' KV of those that go on."""
        self.tell(msg.SecondComputed(split, survivors))

    def flush(self) -> list[list[Request]]:
        """Take back what is queued (not what is on its way)."""
        batches: list[list[Request]] = []
        self.tell(msg.Flushed(batches))
        return batches

    def cancel(self, request: Request) -> bool:
        """The client has gone; True if its KV is on its way out from here."""
        found: list[Request] = []
        self.tell(msg.Cancelled(request, found))
        return bool(found)

    def lose_source(self) -> list[Request]:
        """All KV that waits here or leaves from here is gone; the requests that it was of."""
        lost: list[Request] = []
        self.tell(msg.SourceLost(lost))
        return lost

    def describe(self) -> str:
        """One line for a story."""
        return f"{self.name}: {self.outbound.describe()}"

    def _release(self, action: msg.Release) -> None:
        self.source.actor.tell(Released(requests=action.requests))

    def _wake_source(self, action: msg.WakeSource) -> None:
        self.source.actor.look()

    def _unreserve(self, action: msg.Unreserve) -> None:
        self._destination(action.destination_id).actor.tell(Unreserved(requests=action.requests))

    def _deliver(self, action: msg.Deliver) -> None:
        self._destination(action.destination_id).actor.post(KvDelivered(requests=action.requests))

    def _unlock(self, action: msg.Unlock) -> None:
        self._destination(action.destination_id).lock.release(self.name)

    def _pin(self, action: msg.Pin) -> None:
        self._destination(action.destination_id).lock.pin(self.name)

    def _unpin(self, action: msg.Unpin) -> None:
        self._destination(action.destination_id).lock.unpin()

    def _free_capacity(self, action: msg.FreeCapacity) -> None:
        self.world.on_capacity(self.world.replicas[action.destination_id])

    def _send(self, action: msg.Send) -> None:
        source, destination = self.source, self.world.replicas[action.destination_id]
        number = action.number
        if self.world.on_sent is not None:
            self.world.on_sent(action.batch, source, destination)
        if action.is_half:
            self._half_transfer = self.world.network.send(
                source.grid,
                destination.grid,
                action.batch.kv_bytes,
                kind="kv",
                on_done=partial(self.tell, msg.HalfDone(number)),
                on_failed=lambda reason: self.tell(msg.HalfFailed(number, reason)),
                pair=(source.replica_id, destination.replica_id),
            )
            return
        self._transfer = self.world.network.send(
            source.grid,
            destination.grid,
            action.batch.kv_bytes,
            kind="kv",
            on_done=partial(self.tell, msg.TransferDone(number)),
            on_failed=lambda reason: self.tell(msg.TransferFailed(number, reason)),
            overlapped_ns=action.overlapped_ns,
            pieces=self._layers,
            pair=(source.replica_id, destination.replica_id),
            setup_ns=action.setup_ns,
        )

    def _cancel_transfer(self, action: msg.CancelTransfer) -> None:
        transfer = self._half_transfer if action.is_half else self._transfer
        assert transfer is not None
        transfer.cancel()

    def _record(self, action: msg.Record) -> None:
        destination = self._destination(action.destination_id)
        self.world.on_transfer(action.batch, self.source, destination, self.kernel.now_ns)

    def _hand_over(self, action: msg.HandOver) -> None:
        source, batch = self.source, action.batch
        destination = self.world.replicas[action.destination_id]
        source.actor.tell(Released(requests=batch.requests))
        for request in action.ended:
            destination.actor.tell(Unreserved(requests=[request]))
        if action.arrived:
            destination.actor.post(KvDelivered(requests=action.arrived))
        destination.lock.release(self.name)
        self.world.on_transfer(batch, source, destination, self.kernel.now_ns)
        if source.state not in _GOES_ON:
            source.actor.look()

    def _offer(self, action: msg.Offer) -> None:
        self.tell(_LOOKED)

    def _offer_batch(self, action: msg.OfferBatch) -> None:
        self.tell(_OFFERED)

    def _offer_halves(self, action: msg.OfferHalves) -> None:
        self.tell(HALVES_OFFERED)

    def _pause(self, action: msg.Pause) -> None:
        self._call_at(self.kernel.now_ns + action.delay_ns, partial(self.tell, _PAUSE_ENDED))

    def _set_stuck(self, action: msg.SetStuck) -> None:
        self.world.set_stuck(self.source.replica_id, is_stuck=action.is_stuck)

    def _wake_self(self, action: msg.WakeSelf) -> None:
        self.look()

    def _look_at(self, action: msg.LookAt) -> None:
        self._call_at(action.at_ns, self.look)

    def _arm_lease(self, action: msg.ArmLease) -> None:
        self._call_at(action.at_ns, partial(self.tell, _LEASE_ENDED))

    def _end(self, action: msg.End) -> None:
        self.world.terminal(action.request, action.status, action.reason)

    def _lose(self, action: msg.Lose) -> None:
        self.world.lost(action.requests, action.reason)

    def _tell(self, action: msg.Tell) -> None:
        self.world.watchers[action.source_id].tell(action.event)

    def _destination(self, replica_id: int) -> ReplicaHandle:
        return self.world.replicas[replica_id]

    def _call_at(self, at_ns: int, call: Callable[[], None]) -> None:
        self.kernel.call_at(at_ns, PRIORITY_WORLD, call)


def name_of(replica_id: int) -> str:
    """The name of a replica's watcher, in which it holds locks of destinations."""
    return f"watcher {replica_id}"
