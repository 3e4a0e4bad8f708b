"""KV rejection: decode replicas that are far fuller than the rest stop receiving KV.

Rule (BlitzScale): among replicas in state Decode, one is hot if it uses more than `factor` times
the mean and more than `min_use` of its capacity. A hot replica's lock is taken, so that watchers
pass it by; it goes on decoding. The lock is given back when it is no longer hot or no longer
decodes. Several replicas may be hot; the last one with room is never locked; taking a lock
never waits (BlitzScale waits and aborts with two hot replicas: repaired).

The loop wakes at most once a period, and only while something that it reads has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from emu.config.schema import KvRejectTable
from emu.kernel.clock import PARK, Actor, Kernel
from emu.kernel.priorities import PRIORITY_REJECTER
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import ms_to_ns

HOLDER: Final = "kv rejecter"


class Use(NamedTuple):
    """What the rule sees of a decode replica."""

    replica_id: int
    blocks_used: int
    blocks_total: int


def hot_replicas(uses: Sequence[Use], factor: float, min_use: float) -> list[int]:
    """Ids of the replicas that should not receive KV, in the order given.

    Never all of them: if every replica with room were hot, the least used one stays open.
    """
    if not uses:
        return []
    total = sum(use.blocks_used for use in uses)
    hot = [
        use.replica_id
        for use in uses
        if use.blocks_used * len(uses) > factor * total
        and use.blocks_used > min_use * use.blocks_total
    ]
    roomy = [u for u in uses if u.blocks_used < u.blocks_total]
    if roomy and all(u.replica_id in hot for u in roomy):
        spared = min(roomy, key=lambda u: (u.blocks_used, u.replica_id)).replica_id
        hot.remove(spared)
    return hot


class KvRejecter(Actor):
    """The actor that applies the rule."""

    def __init__(
        self,
        kernel: Kernel,
        replicas: Sequence[ReplicaHandle],
        table: KvRejectTable,
        *,
        on_capacity: Callable[[ReplicaHandle], None],
        on_changed: Callable[[ReplicaHandle, bool], None],
    ) -> None:
        """`on_changed`: told of each replica that is rejected (True) or open again."""
        super().__init__(kernel, "kv rejecter", PRIORITY_REJECTER)
        self.locked: list[ReplicaHandle] = []
        self.rejections = 0
        self._replicas = replicas
        self._table = table
        self._period_ns = ms_to_ns(table.period_ms)
        self._on_capacity = on_capacity
        self._on_changed = on_changed
        self._has_started = False
        self._is_due = False
        """The rule is to be applied when the timer comes."""
        self._on_applied: Callable[[Sequence[Use], Sequence[int]], None] | None = None

    def tell_uses(self, on_applied: Callable[[Sequence[Use], Sequence[int]], None]) -> None:
        """Tell of every time that the rule is applied: what it saw, and what it rejects then."""
        self._on_applied = on_applied

    def look(self) -> None:
        """A decode replica's use or state has changed."""
        if not self._is_due:
            self.kernel.wake(self)

    def tick(self) -> int:
        """After a change, apply the rule at the next multiple of the period."""
        if self._is_due:
            self.apply()
            self._is_due = False
        elif self._has_started:
            self._is_due = True
            return (self.kernel.now_ns // self._period_ns + 1) * self._period_ns
        self._has_started = True
        return PARK

    def apply(self) -> None:
        """One pass of the rule over the present state."""
        decoding = [r for r in self._replicas if r.state is ReplicaState.DECODE]
        views = [(r.replica_id, r.view()) for r in decoding]
        uses = [Use(replica_id, view.blocks_used, view.blocks_total) for replica_id, view in views]
        hot = hot_replicas(uses, self._table.factor, self._table.min_use)
        for replica in list(self.locked):
            if replica.replica_id not in hot:
                self.locked.remove(replica)
                replica.lock.release(HOLDER)
                self._on_changed(replica, False)
                self._on_capacity(replica)
        held = [replica.replica_id for replica in self.locked]
        for replica in decoding:
            if (
                replica.replica_id in hot
                and replica.replica_id not in held
                and replica.lock.try_acquire(HOLDER)
            ):
                self.locked.append(replica)
                self.rejections += 1
                self._on_changed(replica, True)
        if self._on_applied is not None:
            self._on_applied(uses, [replica.replica_id for replica in self.locked])
