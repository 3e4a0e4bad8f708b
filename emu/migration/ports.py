"""What the watchers of all replicas share, so that they need not know the packages above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from emu.kernel.clock import Kernel
from emu.migration.messages import Event
from emu.migration.transfer import MigratingBatch
from emu.network.ports import Network
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status


class Listener(Protocol):
    """The watcher of another replica."""

    def tell(self, event: Event) -> None:
        """Handle it now, before the sender's next line."""
        ...


class MigrationWorld(Protocol):
    """The cluster, as a watcher sees it."""

    kernel: Kernel
    scarce_decode: bool
    """The last batch that looked for a destination found none."""

    @property
    def network(self) -> Network:
        """The links."""
        ...

    @property
    def replicas(self) -> Sequence[ReplicaHandle]:
        """All of them, ascending id."""
        ...

    @property
    def members(self) -> Sequence[ReplicaHandle]:
        """Those that serve the same model, ascending id."""
        ...

    @property
    def watchers(self) -> Mapping[int, Listener]:
        """Those of all replicas with outbound KV, by the replica's id."""
        ...

    def receivers(self) -> Sequence[ReplicaHandle]:
        """Those whose state lets them receive KV, ascending id."""
        ...

    def searched(self, *, is_found: bool) -> None:
        """A batch looked for a destination: without one, idle decode replicas are kept."""
        ...

    def set_stuck(self, source_id: int, *, is_stuck: bool) -> None:
        """A source's KV waits for a destination (its watcher wants to be woken), or no longer."""
        ...

    @property
    def on_sent(self) -> Callable[[MigratingBatch, ReplicaHandle, ReplicaHandle], None] | None:
        """Told of each transfer that begins, if anything wants to know."""
        ...

    def on_transfer(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A transfer has ended (trace, statistics)."""
        ...

    def next_batch_id(self) -> int:
        """Ids of migrating batches, in order of creation."""
        ...

    def refuses(
        self, source: ReplicaHandle, destination: ReplicaHandle, requests: list[Request]
    ) -> bool:
        """A fault makes this destination refuse what it has room for."""
        ...

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """The request's one terminal event."""
        ...

    def on_capacity(self, replica: ReplicaHandle) -> None:
        """Blocks or the lock of a replica have become free."""
        ...

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        """The KV of these requests is gone: they start again elsewhere, or fail."""
        ...
