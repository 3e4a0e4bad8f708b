"""Tells the history of a run (`events.jsonl`) what happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from emu.cluster.ports import LiveMove, Observer, StateChange, wishes
from emu.replica.view import ReplicaHandle
from emu.report.history import History
from emu.request import Request

if TYPE_CHECKING:
    from emu.migration.transfer import MigratingBatch


class HistoryObserver(Observer):
    """Owns the history and closes it."""

    def __init__(self, history: History) -> None:
        self._history = history

    def arrived(self, request: Request) -> None:
        """A request has reached the gateway."""
        self._history.add(
            request.arrival_ns,
            "arrived",
            row=request.row,
            request=request.request_id,
            prompt=request.prompt_tokens,
            output=request.output_tokens,
            **wishes(request),
        )

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended."""
        self._history.add(
            at_ns,
            "ended",
            row=request.row,
            status=request.status.name.lower(),
            reason=request.reason,
            first_out=request.first_out_ns,
            last_out=request.last_out_ns,
        )

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""
        self._history.add(at_ns, "lost", row=request.row, reason=reason)

    def rerouted(self, request: Request, at_ns: int) -> None:
        """A request leaves a replica for another one."""
        self._history.add(at_ns, "routed", row=request.row)

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A migration has ended."""
        rows = [request.row for request in batch.requests]
        what = {"rows": rows, "kv_bytes": batch.kv_bytes}
        self._note_move(source, destination, ended_ns, what)

    def moved_live(self, move: LiveMove) -> None:
        """A running request has moved."""
        what = {"rows": [move.request.row], "live": True}
        self._note_move(move.source, move.destination, move.source.clock.now_ns, what)

    def _note_move(
        self,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        at_ns: int,
        what: Mapping[str, object],
    ) -> None:
        self._history.add(
            at_ns,
            "migrated",
            source=source.replica_id,
            destination=destination.replica_id,
            **what,
        )

    def moved(self, change: StateChange) -> None:
        """A replica has changed its state."""
        replica, writer = change.replica, change.writer
        what = {"from": change.before.value, "to": replica.state.value, "writer": writer}
        self._history.add(change.at_ns, "state", replica=replica.replica_id, **what)

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a command, a load that is complete."""
        if kind == "plan":
            self._history.add(at_ns, "plan", target=target, text=text)
        elif kind not in ("fault over", "host_cache"):
            self._history.add(at_ns, "noted", kind=kind, target=target, text=text)

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        self._history.add(at_ns, "fault", kind=kind, target=target, figures=text)

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""
        self._history.add(at_ns, "fault_over", kind=kind, target=target)

    def close(self) -> None:
        """Write the rest."""
        self._history.close()
