"""Where a world is connected with what stands around it.

An observer is told of everything that the files of a run are made of, while it happens: the log,
the history and the trace of a run are observers, and so is what live mode tells its clients. It
decides nothing and changes nothing: a run has the same results with and without it. A plain run
has nothing plugged in, and then nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from emu.replica.ports import BatchSink
from emu.replica.states import ReplicaState, Writer
from emu.replica.view import ReplicaHandle
from emu.request import Request

if TYPE_CHECKING:
    from emu.log import Log
    from emu.migration.transfer import MigratingBatch
    from emu.report.history import History
    from emu.report.timeseries import Sample


class StateChange(msgspec.Struct, frozen=True):
    """A replica has changed its state, from `before` to the one that it has now."""

    replica: ReplicaHandle
    before: ReplicaState
    writer: Writer
    cause: str
    at_ns: int


class LiveMove(msgspec.Struct, frozen=True):
    """A running request went from one replica to another; for `stop_ns` it stood still."""

    request: Request
    source: ReplicaHandle
    destination: ReplicaHandle
    started_ns: int
    stop_ns: int


class Relay(msgspec.Struct, frozen=True):
    """A helper (`old`) got a batch of which `start_layer` layers are done."""

    source: ReplicaHandle
    old: ReplicaHandle
    requests: list[Request]
    start_layer: int
    at_ns: int

    @property
    def text(self) -> str:
        """What the timeline says of it."""
        ids = " ".join(str(request.request_id) for request in self.requests)
        return f"to replica {self.old.replica_id} after {self.start_layer} layers: requests {ids}"


class Observer:
    """Hears of everything and does nothing: a class of it overrides what it wants to know.

    Instants are simulated ns. A replica that is handed over stands as it does after the event.
    """

    def started(self, replicas: Sequence[ReplicaHandle]) -> None:
        """The run begins with these replicas."""

    def arrived(self, request: Request) -> None:
        """A request has reached the gateway."""

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended, in whatever way: its status and reason are set."""

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""

    def rerouted(self, request: Request, at_ns: int) -> None:
        """A request leaves a replica that has not begun it, or will not go on with it."""

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A migration has ended: the KV of the batch is at its destination."""

    def moved_live(self, move: LiveMove) -> None:
        """A running request went from one replica to another."""

    def relayed(self, relay: Relay) -> None:
        """A helper got a batch of which some layers are done."""

    def moved(self, change: StateChange) -> None:
        """A replica has changed its state."""

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a command, a load that is complete: what explains the timeline."""

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck; `replica_id` below 0: no replica."""

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""

    def sampled(self, sample: Sample) -> None:
        """A row of the time series was written."""

    def close(self) -> None:
        """The run is over: write what is still in buffers."""


class Ports(msgspec.Struct, frozen=True):
    """What is plugged in besides the plan and the requests; a plain run has none of it."""

    log: Log | None = None
    history: History | None = None
    """Instead of the file that `output.events` asks for. One that follows steps forbids leaps."""
    observers: Sequence[Observer] = ()
    """Told of everything that happens, in this order, after the files of the run."""
    batches: BatchSink | None = None
    """Told of every batch that has ended; it does not forbid leaps."""
    tokens: Callable[[int, list[Request]], None] | None = None
    """Told of every token, which forbids leaps: (replica, requests that received one now)."""
    leap: bool | None = None
    """False: one iteration after another; None: as `scheduler.leap` says."""


PLAIN: Final = Ports()


def wishes(request: Request) -> dict[str, object]:
    """What a request asks for besides its tokens, as the log and the history name it."""
    found: dict[str, object] = {}
    if request.priority:
        found["priority"] = request.priority
    if request.tenant:
        found["tenant"] = request.tenant
    if request.deadline_ns >= 0:
        found["deadline_ns"] = request.deadline_ns
    if request.model:
        found["model"] = request.model
    return found
