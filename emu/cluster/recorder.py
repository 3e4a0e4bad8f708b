"""Everything that a run writes down while it goes on: one object, told by the cluster.

Owns the open files of a run. Formats live in `emu/report/`; this module only says when. The log,
the history and the trace, where a run has them, are observers beside the files, and so is whatever
else wants to know.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emu.cluster.gateway import Gateway
from emu.cluster.ports import PLAIN, LiveMove, Observer, Ports, Relay, StateChange
from emu.config.schema import OutputTable
from emu.network.carrier import Carrier
from emu.replica.ports import BatchSink
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.report.itl import GapLog
from emu.report.model_figures import ModelLog
from emu.report.records import RequestLog
from emu.report.runfiles import MarkLog, TransitionLog
from emu.report.timeseries import ReplicaSeries, Sample, TimeseriesWriter
from emu.request import Request, Status
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan

if TYPE_CHECKING:
    from emu.migration.transfer import MigratingBatch
    from emu.migration.watcher import Watcher

_COMPLETED = Status.COMPLETED
FLOW_KINDS = ("kv", "weights", "activation")


_Figures = tuple[int, int, int, int, int]
"""(running, blocks used, blocks in all, prefill tokens, decode tokens)."""
_NOTHING: Final[_Figures] = (0, 0, 0, 0, 0)


class Recorder:
    """The files of one run in its staging directory, and its observers."""

    def __init__(
        self,
        directory: Path,
        table: OutputTable,
        ports: Ports = PLAIN,
        *,
        models: Sequence[str] = (),
    ) -> None:
        """`models`: names of several models, whose figures are kept apart."""
        self.models = ModelLog(models) if models else None
        self.gaps = GapLog(over_time=table.report)
        self.requests = RequestLog(directory / "requests.csv", models)
        self.transitions = TransitionLog(directory / "transitions.csv")
        self.marks = MarkLog(directory / "marks.csv")
        self.series = TimeseriesWriter(
            directory / "timeseries.csv", [s.value for s in ReplicaState], FLOW_KINDS
        )
        self.per_replica = ReplicaSeries(directory / "replicas.csv")
        self.completed = 0
        self.preemptions = 0
        self.faults: dict[str, int] = {}
        """Faults that struck, by kind."""
        self.log = ports.log
        self.history = ports.history
        self.on_routed: Callable[[Request], None] | None = None
        """Told of each request that is routed, where a log follows requests; so the other two."""
        self.on_formed: Callable[[int, Batch], None] | None = None
        self.on_sent: Callable[[MigratingBatch, ReplicaHandle, ReplicaHandle], None] | None = None
        self.on_actor: Callable[[str], None] | None = None
        """Told of the name of each actor that begins to live, where there is a log."""
        self._batches: list[BatchSink] = [] if ports.batches is None else [ports.batches]
        self._observers: list[Observer] = []
        self._follow(directory, table)
        self._observers += ports.observers
        self._states: list[str] = []
        self._counts: dict[str, int] = {}
        """Replicas by state, as `_states`, which were looked at before the last one has moved."""
        self._have_moved = True
        self._sampled: list[_Figures] = []
        """By replica, what it was when it was last looked at."""
        self._sums: _Figures = _NOTHING

    def _follow(self, directory: Path, table: OutputTable) -> None:
        """The history, the log and the trace, as far as they are asked for."""
        if self.history is None and table.events:
            from emu.report.history import History

            self.history = History(directory / "events.jsonl")
        if self.history is not None:
            from emu.cluster.history_observer import HistoryObserver

            self._observers.append(HistoryObserver(self.history))
        if self.log is not None:
            from emu.cluster.log_observer import LogObserver

            told = LogObserver(self.log)
            self._observers.append(told)
            self.on_actor = told.actor_started
            if self.log.tells_lives:
                self.on_routed, self.on_formed, self.on_sent = told.routed, told.formed, told.sent
                self._batches.append(told)
        if table.heartbeat_s:
            from emu.cluster.heartbeat import Heartbeat

            self._observers.append(Heartbeat(table.heartbeat_s, self.log))
        if table.trace:
            from emu.cluster.trace_observer import TraceObserver
            from emu.report.trace_sink import TraceSink

            trace = TraceSink(directory / "trace.json.gz", table.trace_events_max)
            self._observers.append(TraceObserver(trace))
            self._batches.append(trace)

    def batch_sink(self) -> BatchSink | None:
        """What is told of every batch; None = nothing wants to know."""
        if len(self._batches) > 1:
            return _Sinks(self._batches)
        return self._batches[0] if self._batches else None

    def started(self, replicas: Sequence[ReplicaHandle]) -> None:
        """First line of each replica."""
        for replica in replicas:
            self.transitions.record(
                0, replica.replica_id, "", replica.state.value, "loop", "start of the run"
            )
        for observer in self._observers:
            observer.started(replicas)

    def released(self, request: Request) -> None:
        """A request has reached the gateway."""
        self.requests.released(request)
        for observer in self._observers:
            observer.arrived(request)

    def terminal(self, request: Request, at_ns: int) -> None:
        """A request has ended."""
        if request.status is _COMPLETED:
            self.completed += 1
        self.preemptions += request.preemptions
        if self.models is not None:
            self.models.terminal(request)
        self.requests.terminal(request)
        for observer in self._observers:
            observer.ended(request, at_ns)

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""
        for observer in self._observers:
            observer.lost(request, reason, at_ns)

    def rerouted(self, request: Request, at_ns: int) -> None:
        """A request leaves a replica that has not begun it, or will not go on with it."""
        for observer in self._observers:
            observer.rerouted(request, at_ns)

    def moved(self, change: StateChange) -> None:
        """A replica has changed its state."""
        self._have_moved = True
        replica, old = change.replica, change.before.value
        new, writer = replica.state.value, change.writer
        self.transitions.record(change.at_ns, replica.replica_id, old, new, writer, change.cause)
        for observer in self._observers:
            observer.moved(change)

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A migration has ended."""
        for observer in self._observers:
            observer.transferred(batch, source, destination, ended_ns)

    def moved_live(self, move: LiveMove) -> None:
        """A running request went from one replica to another."""
        for observer in self._observers:
            observer.moved_live(move)

    def relayed(self, relay: Relay) -> None:
        """A helper got a batch of which `start_layer` layers are done."""
        target = f"replica {relay.source.replica_id}"
        self.marks.record(relay.at_ns, "relay", target, relay.text)
        for observer in self._observers:
            observer.relayed(relay)

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a load that is complete: what explains the timeline."""
        self.marks.record(at_ns, kind, target, text)
        for observer in self._observers:
            observer.noted(at_ns, kind, target, text)

    def rejected(self, replica: ReplicaHandle, *, is_rejected: bool, at_ns: int) -> None:
        """A decode replica stops receiving KV because it is far fuller than the rest, or no longer.

        In marks.csv, the trace and the log: results of requests do not depend on being told.
        """
        self.noted(at_ns, "kv_rejected" if is_rejected else "kv_accepted", replica.name, "")

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.marks.record(at_ns, "fault", target, f"{kind} ({text})")
        for observer in self._observers:
            observer.fault(at_ns, kind, target, text, replica_id)

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""
        for observer in self._observers:
            observer.fault_over(at_ns, kind, target)

    def sample(
        self,
        at_ns: int,
        replicas: Sequence[ReplicaHandle],
        is_shared: Sequence[bool],
        gateway: Gateway,
        watchers: Collection[Watcher],
        network: Carrier,
    ) -> None:
        """A row of the time series. `is_shared`: by replica, its GPUs are those of others too."""
        waiting, waiting_tokens = len(gateway.held), 0
        for queue in gateway.queues:
            waiting += len(queue)
            waiting_tokens += queue.waiting_prefill_tokens
        looks_at_all = self._have_moved
        if looks_at_all:
            self._states = [replica.state.value for replica in replicas]
            self._counts = dict(Counter(self._states))
            self._sampled = [_NOTHING] * len(replicas)
            self._sums = _NOTHING
            self._have_moved = False
        for replica in replicas:
            if not (looks_at_all or replica.is_stirred):
                continue  # its figures are those of the sample before
            if self._states[replica.replica_id] == "inactive" and is_shared[replica.replica_id]:
                self._sample_absent(at_ns, replica)
                continue
            its_waiting, its_tokens = self._sample_replica(at_ns, replica)
            waiting += its_waiting
            waiting_tokens += its_tokens
        running, used, total, prefill, decode = self._sums
        sample = Sample(
            time_ns=at_ns,
            replicas=self._counts,
            waiting=waiting,
            waiting_prefill_tokens=waiting_tokens,
            running=running,
            migrating=_migrating(watchers),
            used_blocks=used,
            total_blocks=total,
            prefill_tokens=prefill,
            decode_tokens=decode,
            completed=self.completed,
            preemptions=self.preemptions,
            flows=network.active,
            flow_bytes=dict(network.moved_bytes),
        )
        self.series.add(sample)
        for observer in self._observers:
            observer.sampled(sample)

    def _sample_replica(self, at_ns: int, replica: ReplicaHandle) -> tuple[int, int]:
        """A replica's row, and what it changes in the sums; requests and tokens that wait there."""
        replica_id = replica.replica_id
        view = replica.view()
        waiting, running, used, total, prefill, decode = view.figures()
        now = (running, used, total, prefill, decode)
        waiting_tokens = 0
        if waiting:
            waiting_tokens = view.waiting_tokens
        elif not running:
            replica.look_for_rest()
        self._enter(replica_id, now)
        self.per_replica.add(
            at_ns, replica_id, self._states[replica_id], running, waiting, used, total
        )
        return waiting, waiting_tokens

    def _sample_absent(self, at_ns: int, replica: ReplicaHandle) -> None:
        """A replica without its GPUs, which another one has, or none: what it made stays made."""
        _, _, _, _, prefill, decode = replica.view().figures()
        self._enter(replica.replica_id, (0, 0, 0, prefill, decode))
        self.per_replica.add(at_ns, replica.replica_id, "inactive", 0, 0, 0)

    def _enter(self, replica_id: int, now: _Figures) -> None:
        """A replica's part of the sums is this now."""
        before, sums = self._sampled[replica_id], self._sums
        self._sums = (
            sums[0] + now[0] - before[0],
            sums[1] + now[1] - before[1],
            sums[2] + now[2] - before[2],
            sums[3] + now[3] - before[3],
            sums[4] + now[4] - before[4],
        )
        self._sampled[replica_id] = now

    def flush(self) -> None:
        """Let what has happened so far be seen in the files."""
        for log in (self.transitions, self.marks, self.series, self.per_replica):
            log.file.flush()

    def close(self) -> None:
        """Write what is still in buffers (the requests' file is finished by the caller)."""
        with contextlib.ExitStack() as files:  # closes all of them, whatever one of them raises
            for observer in self._observers:
                files.callback(observer.close)
            for file in (self.per_replica, self.series, self.marks, self.transitions):
                files.callback(file.close)

    def leave(self) -> None:
        """Let go of all files, whatever state they are in; called again, it does nothing more."""
        with contextlib.suppress(OSError):  # a full disk: the buffers go nowhere
            self.close()
        with contextlib.suppress(OSError):
            self.requests.discard()


def _migrating(watchers: Collection[Watcher]) -> int:
    """Requests between two replicas."""
    count = 0
    for watcher in watchers:
        outbound = watcher.outbound
        if outbound.unfinished:
            count += sum(len(batch.requests) for batch in outbound.batches())
    return count


class _Sinks:
    """Tells several of every batch."""

    def __init__(self, sinks: Sequence[BatchSink]) -> None:
        self._sinks = sinks

    def batch(
        self,
        replica_id: int,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: list[StageSpan] | None = None,
    ) -> None:
        """A batch, or a leap of `steps` equal decode iterations, has ended."""
        for sink in self._sinks:
            sink.batch(replica_id, batch, start_ns, end_ns, steps, spans)
