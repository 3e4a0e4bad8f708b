"""What a scaler sees of its replicas, kept between looks: most are inactive most of the time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emu.autoscale.ports import ScalerWorld
from emu.autoscale.snapshot import ReplicaView
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle

S = ReplicaState


class ReplicaViews:
    """Views of all replicas of a model; inactive ones are looked at when they change."""

    def __init__(
        self,
        world: ScalerWorld,
        view: Callable[[ReplicaHandle], ReplicaView],
        is_marked: Callable[[int], bool],
    ) -> None:
        """`view` looks at one replica; `is_marked`: weights go to it or come from it."""
        self._world = world
        self._view = view
        self._is_marked = is_marked
        self._inactive = [
            ReplicaView(
                replica.replica_id,
                S.INACTIVE,
                replica.machine,
                blocks_total=replica.view().blocks_total,
            )
            for replica in world.members
        ]
        self._places = {view.replica_id: place for place, view in enumerate(self._inactive)}
        """Position of a replica among those of the model."""
        self.placements = -1
        """Of the shared GPUs, when the views were made."""
        self._views: list[ReplicaView] = []
        self._present: list[ReplicaHandle] = []
        self._has_moved = True

    def note_move(self) -> None:
        """Some replica has changed its state."""
        self._has_moved = True

    def all(self) -> tuple[ReplicaView, ...]:
        """The replicas as they are."""
        world = self._world
        if self._has_moved or self.placements != world.placements:
            self._has_moved = False
            self.placements = world.placements
            self._views = list(self._inactive)
            if not world.is_only:
                for place, replica in enumerate(world.members):
                    if not world.is_placeable(replica):
                        view = self._views[place]
                        self._views[place] = msgspec.structs.replace(view, state=S.FAILED)
            self._present = [
                replica
                for replica in world.members
                if replica.state is not S.INACTIVE or self._is_marked(replica.replica_id)
            ]
        views = self._views
        for replica in self._present:
            views[self._places[replica.replica_id]] = self._view(replica)
        return tuple(views)
