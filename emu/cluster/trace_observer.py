"""Draws the trace of a run (`trace.json.gz`) while it happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emu.cluster.ports import LiveMove, Observer, Relay, StateChange
from emu.replica.view import ReplicaHandle
from emu.report.trace_sink import TraceSink
from emu.request import Request

if TYPE_CHECKING:
    from emu.migration.transfer import MigratingBatch


class TraceObserver(Observer):
    """Owns the trace and closes it."""

    def __init__(self, trace: TraceSink) -> None:
        self._trace = trace
        self._stages: dict[int, int] = {}
        """Pipeline stages by replica."""

    def started(self, replicas: Sequence[ReplicaHandle]) -> None:
        """Titles of all tracks."""
        for replica in replicas:
            self._trace.start(replica)
            self._stages[replica.replica_id] = replica.stages

    def arrived(self, request: Request) -> None:
        """A request has reached the gateway."""
        self._trace.arrived(request, request.arrival_ns)

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended."""
        self._trace.ended(request, self._stages)

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A migration has ended."""
        self._trace.transfer(batch, source, destination, ended_ns)

    def moved_live(self, move: LiveMove) -> None:
        """A running request has moved."""
        self._trace.moved_live(
            move.request, move.source, move.destination, move.started_ns, move.stop_ns
        )

    def relayed(self, relay: Relay) -> None:
        """A helper got a batch."""
        self._trace.mark(relay.at_ns, relay.source.replica_id, "relay", relay.text)

    def moved(self, change: StateChange) -> None:
        """A replica has changed its state."""
        replica = change.replica
        name = f"{change.before.value} -> {replica.state.value}"
        self._trace.mark(change.at_ns, replica.replica_id, name, change.cause)

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a command, a load that is complete."""
        replica = int(target.removeprefix("replica ")) if target.startswith("replica ") else 0
        self._trace.mark(at_ns, replica, kind, text)

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        self._trace.mark(at_ns, max(0, replica_id), f"fault: {kind}", target)

    def close(self) -> None:
        """Write the rest."""
        self._trace.writer.close()
