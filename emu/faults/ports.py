"""What faults and recovery need of the world: owners to send events to, and questions to ask.

The cluster is such a world; faults know no more of it than this.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from emu.autoscale.scaler import Scaler
from emu.config.schema import Config
from emu.kernel.clock import Kernel
from emu.latency.context import LatencyContext
from emu.migration.live import LiveMigrator
from emu.migration.watcher import Watcher
from emu.network.carrier import Carrier
from emu.network.topology import Topology
from emu.replica.relay_board import RelayBoard
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status


class SharedExperts(NamedTuple):
    """A group that shares experts."""

    members: Sequence[int]
    """Replicas, by ascending id."""
    context: LatencyContext
    """What the latency of each is built from."""


class Clients(Protocol):
    """The gateway, as faults of clients see it."""

    @property
    def held(self) -> Sequence[Request]:
        """Requests that no replica can take at the moment."""
        ...

    @property
    def taking(self) -> Iterable[Request]:
        """Requests that the front end is taking in."""
        ...

    @property
    def at_doors(self) -> Mapping[int, Request]:
        """Requests that have not passed what features put before admission, by id."""
        ...

    def echo(self, echo: Callable[[Request], None]) -> Callable[[], None]:
        """Tell `echo` of every arrival from now on; what is returned ends that."""
        ...

    def arrive(self, request: Request) -> None:
        """A request reaches the gateway now."""
        ...

    def route(self, request: Request) -> None:
        """Give the request to a replica, or hold it until one can take it."""
        ...

    def take_held(self, served: Container[int]) -> list[Request]:
        """Requests that no replica will ever take, of models that are not `served`."""
        ...


class Queue(Protocol):
    """The global queue of the fcfs policy."""

    def __iter__(self) -> Iterator[Request]: ...

    def cancel(self, request: Request) -> bool:
        """Remove a request; False if it is not there."""
        ...


class Chronicle(Protocol):
    """Where faults and losses are written down."""

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        ...

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""
        ...

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""
        ...


class Tiers(Protocol):
    """KV tiers of the cluster's machines."""

    @property
    def kinds(self) -> Sequence[str]:
        """`cpu` or `cxl`, nearest first."""
        ...

    def lose(self, kind: str, machine: int) -> Sequence[int]:
        """A tier loses everything; replicas that use it."""
        ...


class FaultWorld(Protocol):
    """The cluster, as faults see it."""

    config: Config
    kernel: Kernel
    live: LiveMigrator | None
    network: Carrier
    scalers: list[Scaler]

    @property
    def replicas(self) -> Sequence[ReplicaHandle]:
        """All of them, by id."""
        ...

    @property
    def gateway(self) -> Clients:
        """Where requests arrive and are routed."""
        ...

    @property
    def queues(self) -> Sequence[Queue]:
        """The global queues of the models, if they have any."""
        ...

    def scaler_of(self, replica: ReplicaHandle) -> Scaler:
        """What loads the replica's weights."""
        ...

    def relay_of(self, replica: ReplicaHandle) -> RelayBoard:
        """Where the replica's model relays batches."""
        ...

    @property
    def recorder(self) -> Chronicle:
        """Where faults and losses are written down."""
        ...

    @property
    def tiers(self) -> Tiers:
        """KV tiers."""
        ...

    @property
    def topology(self) -> Topology:
        """Machines, GPUs and links."""
        ...

    @property
    def watchers(self) -> Mapping[int, Watcher]:
        """Migration watchers by source."""
        ...

    def expert_groups(self) -> Mapping[str, SharedExperts]:
        """Groups that share experts as `[engine]` says, by name."""
        ...

    def is_spare(self, replica: ReplicaHandle) -> bool:
        """The plan gives it no role."""
        ...

    def are_equal(self, one: ReplicaHandle, other: ReplicaHandle) -> bool:
        """Both have the same shape: one can take the other's role."""
        ...

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """The request's one terminal event."""
        ...

    def cancel(self, request: Request) -> None:
        """The client has left, at whatever stage the request is."""
        ...

    def on_capacity(self, replica: ReplicaHandle) -> None:
        """Blocks or the lock of a replica have become free."""
        ...

    def note(self, kind: str, target: str, text: str) -> None:
        """A line in the run's timeline."""
        ...
