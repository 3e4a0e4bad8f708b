"""GPUs that several models share: which replica has them now, and which gives way.

A GPU belongs to one replica at a time: the one on it that is neither inactive nor failed. A model
that lacks room asks for it. Spares of other models (weights loaded, nothing to do) leave at once,
the one that became a spare first first. If the model has no replica at all, one replica of another
model that has more than its minimum is to be shut: of the model that has the fewest requests for
each of its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emu.autoscale.scaler import Scaler
from emu.cluster.plan import Plan
from emu.errors import InvariantViolation
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle

S = ReplicaState


class GpuSharing:
    """Books of shared GPUs."""

    def __init__(
        self,
        plan: Plan,
        replicas: Sequence[ReplicaHandle],
        members: Sequence[Sequence[ReplicaHandle]],
        scalers: Sequence[Scaler],
        outstanding: Callable[[int], int],
    ) -> None:
        """`members`: the replicas of each model; `scalers`: of each model, made later.
        `outstanding`: requests of a model."""
        self.version = 0
        self._models = plan.models
        self._replicas = replicas
        self._members = members
        self._scalers = scalers
        self._outstanding = outstanding
        self._shared = frozenset(r.replica_id for r in plan.replicas if r.shared)
        self._owner: dict[int, int] = {}
        """Replica by GPU."""
        self._starving: list[int] = []
        """Models that want replicas and have none."""
        for replica in replicas:
            if replica.replica_id in self._shared and replica.state is not S.INACTIVE:
                self._take(replica)

    def owner(self, gpu: int) -> int | None:
        """The replica that has a shared GPU now; None = no replica."""
        return self._owner.get(gpu)

    def is_free(self, replica: ReplicaHandle) -> bool:
        """No other replica is on its GPUs, and no model without any is to get them first."""
        if replica.replica_id not in self._shared:
            return True
        if self._starving and replica.model not in self._starving:
            return False
        own, owner = replica.replica_id, self._owner
        return all(owner.get(gpu, own) == own for gpu in replica.gpus)

    def on_moved(self, replica: ReplicaHandle, before: ReplicaState) -> None:
        """A replica has changed its state: its GPUs are taken, or free."""
        if replica.replica_id not in self._shared:
            return
        was_there = before not in (S.INACTIVE, S.FAILED)
        is_there = replica.state not in (S.INACTIVE, S.FAILED)
        if is_there and not was_there:
            self._take(replica)
        elif was_there and not is_there:
            for gpu in replica.gpus:
                del self._owner[gpu]
            self.version += 1
            for scaler in self._scalers:
                scaler.look()

    def _take(self, replica: ReplicaHandle) -> None:
        for gpu in replica.gpus:
            if gpu in self._owner:
                raise InvariantViolation(
                    f"I14: GPU {gpu}: replicas {self._owner[gpu]} and {replica.replica_id}"
                )
            self._owner[gpu] = replica.replica_id
        self.version += 1

    def make_room(self, asking: int, replicas: int) -> None:
        """Spares of other models go; a model without any replica may ask for more.

        Until it has one, no other model that has replicas gets any GPU.
        `asking` is the index of the model.
        """
        has_none = all(r.state in (S.INACTIVE, S.FAILED) for r in self._members[asking])
        if replicas <= 0 or not has_none:
            if asking in self._starving:
                self._starving.remove(asking)
                self.version += 1
            if replicas <= 0:
                return
        elif asking not in self._starving:
            self._starving.append(asking)
            self.version += 1
        others = [(model, scaler) for model, scaler in enumerate(self._scalers) if model != asking]
        spares = [
            (scaler.shut_since_ns(replica), replica.replica_id, scaler)
            for model, scaler in others
            for replica in self._members[model]
            if scaler.may_drop(replica)
        ]
        name = self._models[asking]
        for _, replica_id, scaler in sorted(spares, key=lambda spare: spare[:2])[:replicas]:
            scaler.drop(self._replicas[replica_id], f"{name} needs its GPUs")
        if len(spares) >= replicas or not has_none:
            return
        loads = [
            (self._outstanding(model) / len(self._members[model]), model, scaler)
            for model, scaler in others
            if scaler.can_spare()
        ]
        if loads and not any(scaler.is_yielding for _, scaler in others):
            min(loads, key=lambda load: load[:2])[2].yield_one(name)
