"""Ways around pairs whose load was given up: a plan is changed where it would take one again. Pure.

A control plane does not see why a load did not end in time. It remembers between which replicas
the weights should have gone and takes, for a while, another way: another source, then the memory
or the disk of the target's own machine. If its own machine failed it as well, another target. If
there is no other way at all, the plan stays as it is: trying again is all that is left.

Without such pairs a plan is returned as it came.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from emu.autoscale.draft import is_unmarked
from emu.autoscale.local_plans import copy_load
from emu.autoscale.orders import Action, Load, Target, involved
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import AutoscaleTable
from emu.replica.states import Marker, ReplicaState

S = ReplicaState

OWN: Final = -1
"""Source of a load from the target's own machine."""
_SOURCES: Final = (S.DECODE, S.SHUTTING_DECODE, S.SHUTTING_NULL, S.PREFILL)
"""The replicas that may send instead, the least valuable for prompts first."""


def detour(actions: list[Action], snapshot: Snapshot, table: AutoscaleTable) -> list[Action]:
    """The plan without the pairs in `snapshot.avoided`, as far as there is another way."""
    if not snapshot.avoided or not any(isinstance(action, Load) for action in actions):
        return actions
    return _Detours(actions, snapshot, table).actions


def hops(load: Load) -> list[tuple[int, int]]:
    """Between which replicas a load goes; rings between the nodes of a machine included."""
    targets = [target.replica for target in load.targets]
    if not load.sources:
        return [(OWN, target) for target in targets]
    lanes = len(load.sources)
    if load.method != "tanz":
        return list(zip((load.sources[0], *targets), targets, strict=False))
    pairs = list(zip((*load.sources, *targets), targets, strict=False))
    for first in range(0, len(targets), lanes):
        column = targets[first : first + lanes]
        pairs += [(a, b) for a, b in zip(column, column[1:] + column[:1], strict=True) if a != b]
    return pairs


class _Detours:
    """One plan being changed."""

    def __init__(
        self, actions: Sequence[Action], snapshot: Snapshot, table: AutoscaleTable
    ) -> None:
        self._snapshot = snapshot
        self._table = table
        self._avoided: Collection[tuple[int, int]] = frozenset(snapshot.avoided)
        self._busy = {replica for action in actions for replica in involved(action)}
        self.actions: list[Action] = []
        for action in actions:
            self.actions += self._changed(action) if isinstance(action, Load) else [action]

    def _changed(self, load: Load) -> list[Action]:
        if not any(pair in self._avoided for pair in hops(load)):
            return [load]
        if load.method == "tanz":
            for turn in range(1, len(load.sources)):
                sources = load.sources[turn:] + load.sources[:turn]
                other = msgspec.structs.replace(load, sources=sources)
                if not any(pair in self._avoided for pair in hops(other)):
                    return [other]
            self._busy -= {*load.sources}  # they may send one to one
            return [self._single(target, load) for target in load.targets]
        if not load.sources:
            return [self._single(target, load) for target in load.targets]
        bad = next(i for i, pair in enumerate(hops(load)) if pair in self._avoided)
        head: list[Action] = []
        if bad:  # the chain ends before the first target that it did not reach
            head = [msgspec.structs.replace(load, targets=load.targets[:bad])]
        else:
            self._busy -= {*load.sources}
        return head + [self._single(target, load) for target in load.targets[bad:]]

    def _single(self, target: Target, load: Load) -> Load:
        """One target by itself: another source, its own machine, another target, or as it was."""
        views = self._snapshot.replicas
        if load.sources:
            candidates = [
                view.replica_id
                for state in _SOURCES
                for view in views
                if view.state is state
                and view.is_loaded
                and view.rdma is Marker.NONE
                and view.replica_id not in self._busy
            ]
            for source in candidates:
                if (source, target.replica) not in self._avoided:
                    self._busy.add(source)
                    return Load("p2p", (target,), (source,))
        if (OWN, target.replica) not in self._avoided:
            return self._own(target)
        for view in views:
            if (
                view.state is S.INACTIVE
                and is_unmarked(view)
                and view.replica_id not in self._busy
                and (OWN, view.replica_id) not in self._avoided
            ):
                self._busy.add(view.replica_id)
                return self._own(Target(view.replica_id, target.role))
        return self._own(target)

    def _own(self, target: Target) -> Load:
        views = self._snapshot.replicas
        view = next(view for view in views if view.replica_id == target.replica)
        return copy_load(view, target.role, self._snapshot, self._table)
