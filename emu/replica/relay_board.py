"""The relay: helpers that wait for work, and the books of live scaling (BlitzScale 4.2, 4.7).

Owns the FIFO of old replicas that ask for a batch, and two counters: `zigzag_active`, the new
replicas that have not yet given back their helper, and `relay_deactive` (signed), the helpers that
may leave. The invariant `#old == zigzag_active + relay_deactive` is checked at every change of a
state; the counters follow from the changes themselves, whoever makes them:

    a replica becomes NewPrefill     zigzag + 1, deactive - 1
    a replica becomes OldPrefill     deactive + 1
    a new one has nothing to give    zigzag - 1, deactive + 1
    an old one leaves                deactive - 1

Event-driven: an old replica's request stays parked until some new replica has a batch for it, or
until a helper may leave. New and old replicas are not paired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.request import Request
from emu.scheduling import layerwise
from emu.scheduling.base import Batch

if TYPE_CHECKING:
    from emu.replica.replica import Replica

S = ReplicaState
_NEW = (S.NEW_PREFILL, S.REFRACTORY_PREFILL)


class Relayed(msgspec.Struct, eq=False):
    """A batch on its way to, or at, an old replica."""

    batch: Batch
    """As the old replica's scheduler knows it."""
    start_layer: int
    """0 = nothing has been done (kind Embedding)."""
    split: SplitBatch | None
    """Where the two halves of its KV meet; None for kind Embedding."""
    source_id: int
    is_here: bool = False
    """Its activation has arrived."""


class RelayBoard:
    """One for the cluster."""

    def __init__(
        self, replicas: Callable[[], Sequence[Replica]], next_batch_id: Callable[[], int]
    ) -> None:
        self.zigzag_active = 0
        self.relay_deactive = 0
        self.olds = 0
        self.batches_relayed = 0
        self.next_batch_id = next_batch_id
        self._replicas = replicas
        self._parked: deque[Replica] = deque()
        self._answers: dict[int, Relayed] = {}
        self._unreleased: list[int] = []

    # --- the old side ---------------------------------------------------------------------------
    def park(self, old: Replica) -> None:
        """An old replica asks for work (again); new replicas hear of it."""
        if old in self._parked:
            return
        self._parked.append(old)
        for replica in self.news():
            replica.actor.look()

    def answer(self, old: Replica) -> Relayed | None:
        """What this old replica has been given, if anything (it stays until `finished`)."""
        return self._answers.get(old.replica_id)

    def arrived(self, relayed: Relayed) -> None:
        """The activation of a batch is at its helper."""
        relayed.is_here = True

    def abandon(self, old: Replica) -> list[Request]:
        """What the old replica was given will never be computed; its requests, if still there."""
        relayed = self._answers.pop(old.replica_id, None)
        scheduler = old.scheduler
        if relayed is None or not layerwise.can_relay(scheduler):
            return []
        requests = layerwise.in_flight(scheduler, relayed.batch)
        for request in requests:
            scheduler.cancel(request)
        layerwise.drop(scheduler, relayed.batch)
        old.actor.look()
        return requests

    def finished(self, old: Replica) -> None:
        """The old replica has computed what it was given (or lost it)."""
        self._answers.pop(old.replica_id, None)

    @property
    def may_leave(self) -> bool:
        """A helper may go back to Prefill."""
        return self.relay_deactive > 0

    # --- the new side ---------------------------------------------------------------------------
    def news(self) -> list[Replica]:
        """Replicas whose weights are arriving, or that finish what they began meanwhile."""
        return [replica for replica in self._replicas() if replica.state in _NEW]

    @property
    def asking(self) -> Sequence[Replica]:
        """Old replicas whose requests are parked, first come first."""
        return self._parked

    def give(self, old: Replica, relayed: Relayed) -> None:
        """Hand a batch to a parked old replica."""
        self._parked.remove(old)
        assert old.replica_id not in self._answers
        self._answers[old.replica_id] = relayed
        self.batches_relayed += 1
        old.actor.look()

    def release(self, new: Replica) -> None:
        """A new replica has nothing more to give: one helper may leave."""
        if new.replica_id not in self._unreleased:
            return
        self._unreleased.remove(new.replica_id)
        self.zigzag_active -= 1
        self.relay_deactive += 1
        self._check()
        for old in list(self._parked)[: max(0, self.relay_deactive)]:
            old.actor.look()

    # --- books ----------------------------------------------------------------------------------
    def on_moved(self, replica: Replica, before: ReplicaState) -> None:
        """A replica changed its state: keep the counters."""
        after = replica.state
        if after is S.NEW_PREFILL:
            self.zigzag_active += 1
            self.relay_deactive -= 1
            self._unreleased.append(replica.replica_id)
        elif after is S.OLD_PREFILL:
            self.olds += 1
            self.relay_deactive += 1
        if before is S.OLD_PREFILL:
            self.olds -= 1
            self.relay_deactive -= 1
            if replica in self._parked:
                self._parked.remove(replica)
        elif before in _NEW and after not in _NEW:
            self.release(replica)
        elif after not in _NEW and after is not S.OLD_PREFILL:
            return
        self._check()

    def _check(self) -> None:
        """I10."""
        assert self.olds == self.zigzag_active + self.relay_deactive, (
            f"{self.olds} old replicas, {self.zigzag_active} active, {self.relay_deactive} to leave"
        )
