"""Scratch of a plan in the making: lists of replicas by what may be done with them.

Used by the plan generators only. Lists are sorted as the executor wants them (blocks in use
ascending, then id); the step that takes a replica removes it, so that nothing is used twice.
"""

from __future__ import annotations

from emu.autoscale.demand import Demand, floor_of
from emu.autoscale.orders import Action, Expire, MakeSpare, Mutate, Reuse, Revive, Role, Shut
from emu.autoscale.snapshot import ReplicaView, Snapshot
from emu.config.schema import CarriedTable
from emu.replica.states import Marker, ReplicaState
from emu.units import ms_to_ns

S = ReplicaState


class Draft:
    """Demands, candidates and actions of one plan."""

    def __init__(self, snapshot: Snapshot, demand: Demand, table: CarriedTable) -> None:
        self.snapshot = snapshot
        self.table = table
        self.prefill = demand.prefill
        self.decode = demand.decode
        self.actions: list[Action] = []
        by_state: dict[ReplicaState, list[ReplicaView]] = {}
        for view in snapshot.replicas:
            by_state.setdefault(view.state, []).append(view)
        self.normal_prefill = sorted(by_state.get(S.PREFILL, ()), key=_load)
        self.normal_decode = sorted(by_state.get(S.DECODE, ()), key=_load)
        self.shutting_prefill = sorted(by_state.get(S.SHUTTING_PREFILL, ()), key=_load)
        self.shutting_decode = sorted(by_state.get(S.SHUTTING_DECODE, ()), key=_load)
        self.spares = sorted(by_state.get(S.SHUTTING_NULL, ()), key=_load)
        self.inactive = by_state.get(S.INACTIVE, [])
        self.prefill_floor = floor_of(snapshot, table.min_prefill, len(self.normal_prefill))
        self.decode_floor = floor_of(snapshot, table.min_decode, len(self.normal_decode))

    def revive(self) -> None:
        """Step 1: shutting replicas of the growing kind come back, least loaded first."""
        while self.decode > 0 and self.shutting_decode:
            self.actions.append(Revive(self.shutting_decode.pop(0).replica_id))
            self.decode -= 1
        while self.prefill > 0 and self.shutting_prefill:
            self.actions.append(Revive(self.shutting_prefill.pop(0).replica_id))
            self.prefill -= 1

    def collect_idle(self) -> None:
        """Step 2 with expiry: idle decode replicas become spares while there are too many."""
        if self.snapshot.scarce_decode:
            return
        for view in list(self.normal_decode):
            if self.decode >= 0 or len(self.normal_decode) <= self.decode_floor:
                return
            if view.blocks_used == 0 and view.is_lock_free and not view.running:
                self.normal_decode.remove(view)
                self.actions.append(MakeSpare(view.replica_id))
                self.decode += 1

    def reuse(self) -> None:
        """Step 3: spares serve again; decode and prefill in turn if both are wanted."""
        wants_decode = True
        while self.spares and (self.prefill > 0 or self.decode > 0):
            if (wants_decode and self.decode > 0) or self.prefill <= 0:
                self._reuse("decode")
                self.decode -= 1
            else:
                self._reuse("prefill")
                self.prefill -= 1
            wants_decode = not wants_decode

    def _reuse(self, role: Role) -> None:
        # A spare that was closed already needs no wait for its lock to prefill, and the other
        # way round; any spare will do.
        suited = [v for v in self.spares if v.is_closed == (role == "prefill")]
        view = (suited or self.spares)[0]
        self.spares.remove(view)
        self.actions.append(Reuse(view.replica_id, role))

    def evict(self, *, prefill: bool) -> None:
        """Step 4: spares go, whatever their age, while the kind still shrinks (faithful only).

        It counts as the reduction; by default spares keep their weights until their time is up.
        """
        if "evict_spares" not in self.table.faithful:
            return
        while self.spares and (self.prefill if prefill else self.decode) < 0:
            view = self._next_evictable()
            if view is None:
                return
            self.spares.remove(view)
            self.actions.append(Expire(view.replica_id, "evicted"))
            if prefill:
                self.prefill += 1
            else:
                self.decode += 1

    def _next_evictable(self) -> ReplicaView | None:
        free = [v for v in self.spares if is_unmarked(v) and v.is_closed]
        return min(free, key=_shut_since) if free else None

    def expire(self, *, one: bool = False) -> None:
        """Spares whose time is up lose their weights, the one that shut first first."""
        ttl_ns = ms_to_ns(self.table.spare_ttl_ms)
        while True:
            view = self._next_evictable()
            if view is None or self.snapshot.now_ns - view.shut_ns < ttl_ns:
                return
            self.spares.remove(view)
            self.actions.append(Expire(view.replica_id, "spare time is up"))
            if one:
                return

    def mutate(self) -> None:
        """Step 6: prefill replicas that are too many become the decode replicas that lack."""
        if not self.table.mutate:
            return
        while self.prefill < 0 < self.decode and len(self.normal_prefill) > 1:
            self.actions.append(Mutate(self.normal_prefill.pop(0).replica_id))
            self.prefill += 1
            self.decode -= 1

    def shut_prefill(self) -> None:
        """Step 8: one prefill replica, the least loaded, if more than one is left."""
        if self.prefill < 0 and len(self.normal_prefill) > self.prefill_floor:
            self.actions.append(Shut(self.normal_prefill.pop(0).replica_id))
            self.prefill += 1

    def shut_decode(self) -> None:
        """Step 8: one decode replica; the original takes the most loaded."""
        is_faithful = "shut_most_loaded" in self.table.faithful
        if (self.decode < 0 or is_faithful) and len(self.normal_decode) > self.decode_floor:
            index = -1 if is_faithful else 0
            self.actions.append(Shut(self.normal_decode.pop(index).replica_id))
            self.decode += 1

    def sources(self) -> list[ReplicaView]:
        """Replicas that may send weights over RDMA, in the order of section 6.4.

        Pruned (interference), prefill replicas send only if no other replica has the weights: after
        the loss of every decode replica the original finds no source and never loads again. Those
        that never send are not even then in the list.
        """
        others = [*self.normal_decode, *self.shutting_decode, *self.spares]
        is_pruned = self.table.prefill_never_sends or (
            self.table.prune_sources and any(v.is_loaded for v in others)
        )
        candidates = others if is_pruned else [*self.normal_prefill, *others]
        return [v for v in candidates if v.is_loaded and v.rdma is Marker.NONE]


def is_unmarked(view: ReplicaView) -> bool:
    """It takes part in no transfer of weights."""
    return view.rdma is Marker.NONE and view.nvl is Marker.NONE


def _load(view: ReplicaView) -> tuple[int, int]:
    return view.blocks_used, view.replica_id


def _shut_since(view: ReplicaView) -> tuple[int, int]:
    return view.shut_ns, view.replica_id
