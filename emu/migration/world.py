"""What the watchers of all replicas share, so that they need not know the floors above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from emu.kernel.clock import Kernel
from emu.migration.transfer import MigratingBatch
from emu.network.base import Network
from emu.replica.replica import Replica
from emu.request import Request, Status

if TYPE_CHECKING:
    from emu.migration.watcher import Watcher


class MigrationWorld(Protocol):
    """The cluster, as a watcher sees it."""

    kernel: Kernel
    scarce_decode: bool
    """A batch found no destination: idle decode replicas are not to be dropped now."""
    tokens_in_migration: int
    """Prompt tokens that wait for or are under migration."""

    @property
    def network(self) -> Network:
        """The links."""
        ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them, ascending id."""
        ...

    @property
    def members(self) -> Sequence[Replica]:
        """Those that serve the same model, ascending id."""
        ...

    def receivers(self) -> Sequence[Replica]:
        """Those whose state lets them receive KV, ascending id."""
        ...

    def set_stuck(self, watcher: Watcher, *, is_stuck: bool) -> None:
        """This watcher waits for a destination (and wants to be poked), or no longer."""
        ...

    def on_transfer(
        self, batch: MigratingBatch, source: Replica, destination: Replica, ended_ns: int
    ) -> None:
        """A transfer has ended (trace, statistics)."""
        ...

    def next_batch_id(self) -> int:
        """Ids of migrating batches, in order of creation."""
        ...

    attempts_max: int
    """A batch is given up after so many failed transfers beyond the first."""

    def refuses(self, source: Replica, destination: Replica, requests: list[Request]) -> bool:
        """A fault makes this destination refuse what it has room for."""
        ...

    def retry_pause_ns(self, attempts: int) -> int:
        """How long a batch that is refused everywhere waits; it doubles with each attempt."""
        ...

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """The request's one terminal event."""
        ...

    def on_capacity(self, replica: Replica) -> None:
        """Blocks or the lock of a replica have become free."""
        ...

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        """The KV of these requests is gone: they start again elsewhere, or fail."""
        ...
