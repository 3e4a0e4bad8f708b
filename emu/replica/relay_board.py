"""The relay: helpers that wait for work, and the books of live scaling (BlitzScale 4.2, 4.7).

Owns the FIFO of old replicas that ask for a batch, and two counters: `zigzag_active`, the new
replicas that have not yet given back their helper, and `relay_deactive` (signed), the helpers that
may leave. The invariant `#old == zigzag_active + relay_deactive` is checked at every change of a
state; the counters follow from the changes themselves, whatever makes them:

    a replica becomes NewPrefill     zigzag + 1, deactive - 1
    a replica becomes OldPrefill     deactive + 1
    a new one has nothing to give    zigzag - 1, deactive + 1
    an old one leaves                deactive - 1

Event-driven: an old replica's request stays parked until some new replica has a batch for it, or
until a helper may leave. New and old replicas are not paired.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.scheduling.base import Batch

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
    """One for the replicas of a model, which it knows by their ids."""

    def __init__(self, wake: Callable[[int], None], next_batch_id: Callable[[], int]) -> None:
        """`wake`: a replica is to look at the board."""
        self.zigzag_active = 0
        self.relay_deactive = 0
        self.olds = 0
        self.batches_relayed = 0
        self.next_batch_id = next_batch_id
        self._wake = wake
        self._news: list[int] = []
        """Replicas whose weights are arriving, or that finish what they began, ascending."""
        self._parked: deque[int] = deque()
        self._answers: dict[int, Relayed] = {}
        self._unreleased: list[int] = []

    def park(self, old_id: int) -> None:
        """An old replica asks for work (again); new replicas hear of it."""
        if old_id in self._parked:
            return
        self._parked.append(old_id)
        for replica_id in self._news:
            self._wake(replica_id)

    def answer(self, old_id: int) -> Relayed | None:
        """What this old replica has been given, if anything (it stays until `finished`)."""
        return self._answers.get(old_id)

    def arrived(self, relayed: Relayed) -> None:
        """The activation of a batch is at its helper."""
        relayed.is_here = True

    def finished(self, old_id: int) -> None:
        """The old replica has computed what it was given, or lost it."""
        self._answers.pop(old_id, None)

    @property
    def may_leave(self) -> bool:
        """A helper may go back to Prefill."""
        return self.relay_deactive > 0

    @property
    def news(self) -> Sequence[int]:
        """Replicas whose weights are arriving, or that finish what they began, ascending id."""
        return self._news

    @property
    def asking(self) -> Sequence[int]:
        """Old replicas whose requests are parked, first come first."""
        return self._parked

    def give(self, old_id: int, relayed: Relayed) -> None:
        """Hand a batch to a parked old replica."""
        self._parked.remove(old_id)
        assert old_id not in self._answers
        self._answers[old_id] = relayed
        self.batches_relayed += 1
        self._wake(old_id)

    def release(self, new_id: int) -> None:
        """A new replica has nothing more to give: one helper may leave."""
        if new_id not in self._unreleased:
            return
        self._unreleased.remove(new_id)
        self.zigzag_active -= 1
        self.relay_deactive += 1
        self._check()
        for old_id in list(self._parked)[: max(0, self.relay_deactive)]:
            self._wake(old_id)

    def on_moved(self, replica_id: int, before: ReplicaState, after: ReplicaState) -> None:
        """A replica changed its state: keep the counters."""
        if before in _NEW and after not in _NEW:
            self._news.remove(replica_id)
        elif after in _NEW and before not in _NEW:
            insort(self._news, replica_id)
        if after is S.NEW_PREFILL:
            self.zigzag_active += 1
            self.relay_deactive -= 1
            self._unreleased.append(replica_id)
        elif after is S.OLD_PREFILL:
            self.olds += 1
            self.relay_deactive += 1
        if before is S.OLD_PREFILL:
            self.olds -= 1
            self.relay_deactive -= 1
            if replica_id in self._parked:
                self._parked.remove(replica_id)
        elif before in _NEW and after not in _NEW:
            self.release(replica_id)
        elif after not in _NEW and after is not S.OLD_PREFILL:
            return
        self._check()

    def _check(self) -> None:
        """I10."""
        assert self.olds == self.zigzag_active + self.relay_deactive, (
            f"{self.olds} old replicas, {self.zigzag_active} active, {self.relay_deactive} to leave"
        )
