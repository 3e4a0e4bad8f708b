"""What the control loop of autoscaling asks of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from emu.kernel.clock import Kernel
from emu.network.carrier import Carrier
from emu.replica.view import ReplicaHandle


class Waiting(msgspec.Struct, frozen=True):
    """Requests of a model that are in the system."""

    requests: int
    """Those that no replica has begun."""
    tokens: int
    """Prompt tokens of these."""
    outstanding: int
    """All that have not ended."""


class ScalerWorld(Protocol):
    """The cluster, as the control loop sees it."""

    kernel: Kernel
    scarce_decode: bool

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens whose KV waits for a migration or is under way."""
        ...

    @property
    def replicas(self) -> Sequence[ReplicaHandle]:
        """All of them, by id."""
        ...

    @property
    def members(self) -> Sequence[ReplicaHandle]:
        """Those of the model that this loop scales, ascending id."""
        ...

    @property
    def is_only(self) -> bool:
        """The cluster serves no other model."""
        ...

    @property
    def placements(self) -> int:
        """Changes whenever GPUs that models share are taken or given back."""
        ...

    def is_placeable(self, replica: ReplicaHandle) -> bool:
        """No replica of another model is on its GPUs."""
        ...

    def wants_room(self, replicas: int) -> None:
        """So many replicas find no GPUs; 0 = none lacks any."""
        ...

    @property
    def network(self) -> Carrier:
        """The links."""
        ...

    def waiting(self) -> Waiting:
        """What waits now."""
        ...

    def note(self, kind: str, target: str, text: str) -> None:
        """Write a line into the run's timeline."""
        ...

    def give_up(self, replica: ReplicaHandle) -> None:
        """A live load has failed: KV that waits there, and batches handed over, are lost."""
        ...
