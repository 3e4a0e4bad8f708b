"""Everything that a run writes down while it goes on: one object, told by the cluster.

Owns the open files of a run. Formats live in `emu/report/`; this module only says when.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from emu.cluster.gateway import Gateway
from emu.config.schema import OutputTable
from emu.log import Log
from emu.network.carrier import Carrier
from emu.replica.ports import BatchSink
from emu.replica.states import ReplicaState, Writer
from emu.replica.view import ReplicaHandle
from emu.report.history import History
from emu.report.itl import GapLog
from emu.report.model_figures import ModelLog
from emu.report.records import RequestLog
from emu.report.runfiles import MarkLog, TransitionLog
from emu.report.timeseries import ReplicaSeries, Sample, TimeseriesWriter
from emu.request import Request, Status
from emu.scheduling.base import Batch, StageSpan

if TYPE_CHECKING:
    from emu.migration.transfer import MigratingBatch
    from emu.migration.watcher import Watcher
    from emu.report.trace_sink import TraceSink

_COMPLETED = Status.COMPLETED
FLOW_KINDS = ("kv", "weights", "activation")
_EVENTS: Final = {
    "plan": "plan.made",
    "loaded": "load.completed",
    "layers": "load.advanced",
    "kv_rejected": "kv.rejected",
    "kv_accepted": "kv.accepted",
    "fault missed": "fault.missed",
    "host_cache": "host_cache.summed",
    "recall lost": "recall.lost",
    "command refused": "command.refused",
}
"""Names of log events, by kind of mark; a mark of another kind is `timeline.noted`."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder:
    """The files of one run in its staging directory."""

    def __init__(
        self,
        directory: Path,
        table: OutputTable,
        log: Log | None = None,
        *,
        models: Sequence[str] = (),
    ) -> None:
        """`models`: names of several models, whose figures are kept apart."""
        self.log = log
        self.models = ModelLog(models) if models else None
        self.gaps = GapLog(over_time=table.report)
        self.requests = RequestLog(directory / "requests.csv", models)
        self.transitions = TransitionLog(directory / "transitions.csv")
        self.marks = MarkLog(directory / "marks.csv")
        self.series = TimeseriesWriter(
            directory / "timeseries.csv", [s.value for s in ReplicaState], FLOW_KINDS
        )
        self.per_replica = ReplicaSeries(directory / "replicas.csv")
        self.history: History | None = None
        if table.events:
            self.history = History(directory / "events.jsonl")
        self.trace: TraceSink | None = None
        if table.trace:
            from emu.report.trace_sink import TraceSink

            self.trace = TraceSink(directory / "trace.json.gz", table.trace_events_max)
        self.completed = 0
        self.preemptions = 0
        self.live_migrations = 0
        self.faults: dict[str, int] = {}
        """Faults that struck, by kind."""
        self._stages: dict[int, int] = {}
        self._states: list[str] = []
        self._counts: dict[str, int] = {}
        """Replicas by state, as `_states`, which were looked at before the last one has moved."""
        self._have_moved = True

    @property
    def tells_lives(self) -> bool:
        """There is a log, and it follows requests and replicas."""
        return self.log is not None and self.log.tells_lives

    def batch_sink(self) -> BatchSink | None:
        """What is told of every batch: the trace, the log, both, or nothing."""
        if self.log is None or not self.log.tells_lives:
            return self.trace
        return _LoggedBatches(self.log, self.trace)

    # --- told by the cluster ------------------------------------------------------------------
    def released(self, request: Request) -> None:
        """A request has reached the gateway."""
        self.requests.released(request)
        if self.history is not None:
            self.history.add(
                request.arrival_ns,
                "arrived",
                row=request.row,
                request=request.request_id,
                prompt=request.prompt_tokens,
                output=request.output_tokens,
                **_wishes(request),
            )
        if self.trace is not None:
            self.trace.arrived(request, request.arrival_ns)
        if self.log is not None:
            self.log.event(
                "request.arrived",
                request_id=request.request_id,
                prompt_tokens=request.prompt_tokens,
                **_wishes(request),
            )

    def routed(self, request: Request) -> None:
        """A request has been given to a replica, waits in the common queue, or for a replica."""
        assert self.log is not None
        if request.holder_id >= 0:
            replica_id = request.holder_id
            self.log.event("request.routed", request_id=request.request_id, replica_id=replica_id)
        elif not request.status.is_terminal:
            self.log.event("request.queued", request_id=request.request_id)

    def terminal(self, request: Request, at_ns: int) -> None:
        """A request has ended."""
        if self.history is not None:
            self.history.add(
                at_ns,
                "ended",
                row=request.row,
                status=request.status.name.lower(),
                reason=request.reason,
                first_out=request.first_out_ns,
                last_out=request.last_out_ns,
            )
        if request.status is _COMPLETED:
            self.completed += 1
        if self.log is not None:
            self.log.event(
                "request.ended",
                request_id=request.request_id,
                status=request.status.name.lower(),
                reason=request.reason,
                replica_id=request.replica_id,
                decode_replica_id=request.decode_replica_id,
                output_tokens=request.generated_tokens,
                preemptions=request.preemptions,
                ttft_ns=_ttft_ns(request),
            )
        self.preemptions += request.preemptions
        if self.models is not None:
            self.models.terminal(request)
        if self.trace is not None:
            self.trace.ended(request, self._stages)
        self.requests.terminal(request)

    def actor_started(self, name: str) -> None:
        """An actor's life begins: a coroutine, or a task, with this name."""
        if self.log is not None and self.log.tells_batches:
            self.log.debug("actor.started", actor=name)

    def started(self, replicas: Sequence[ReplicaHandle]) -> None:
        """First line of each replica."""
        for replica in replicas:
            self.transitions.record(
                0, replica.replica_id, "", replica.state.value, "loop", "start of the run"
            )
            if self.trace is not None:
                self.trace.start(replica)
                self._stages[replica.replica_id] = replica.stages
            if self.log is not None:
                self.log.event(
                    "replica.started",
                    replica_id=replica.replica_id,
                    state=replica.state.value,
                    machine=replica.machine,
                    gpus=list(replica.gpus),
                )

    def moved(
        self, replica: ReplicaHandle, before: ReplicaState, writer: Writer, cause: str, at_ns: int
    ) -> None:
        """A replica has changed its state."""
        self._have_moved = True
        after = replica.state.value
        self.transitions.record(at_ns, replica.replica_id, before.value, after, writer, cause)
        if self.history is not None:
            self.history.add(
                at_ns,
                "state",
                replica=replica.replica_id,
                **{"from": before.value, "to": after, "writer": writer},
            )
        if self.trace is not None:
            self.trace.mark(at_ns, replica.replica_id, f"{before.value} -> {after}", cause)
        if self.log is not None:
            self.log.event(
                "replica.moved",
                replica_id=replica.replica_id,
                **{"from": before.value, "to": after},
                writer=writer,
                cause=cause,
            )

    def formed(self, replica_id: int, batch: Batch) -> None:
        """A replica has formed a batch: some of its prompts may begin with it."""
        log = self.log
        assert log is not None
        for chunk in batch.chunks:
            request = chunk.request
            if request.first_scheduled_ns == batch.formed_ns:
                log.event(
                    "request.scheduled",
                    request_id=request.request_id,
                    replica_id=replica_id,
                    queued_ns=batch.formed_ns - request.arrival_ns,
                )

    def sent(
        self, batch: MigratingBatch, source: ReplicaHandle, destination: ReplicaHandle
    ) -> None:
        """A migration begins."""
        assert self.log is not None
        self.log.event(
            "migration.started",
            request_ids=[request.request_id for request in batch.requests],
            source_id=source.replica_id,
            destination_id=destination.replica_id,
            kv_bytes=batch.kv_bytes,
        )

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A migration has ended."""
        if self.history is not None:
            rows = [r.row for r in batch.requests]
            self._note_move(rows, source, destination, ended_ns, kv_bytes=batch.kv_bytes)
        if self.trace is not None:
            self.trace.transfer(batch, source, destination, ended_ns)
        if self.log is not None:
            self.log.event(
                "migration.finished",
                request_ids=[request.request_id for request in batch.requests],
                source_id=source.replica_id,
                destination_id=destination.replica_id,
                kv_bytes=batch.kv_bytes,
                took_ns=ended_ns - batch.started_ns,
            )

    def moved_live(
        self,
        request: Request,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        started_ns: int,
        stop_ns: int,
    ) -> None:
        """A running request went from one replica to another."""
        self.live_migrations += 1
        if self.history is not None:
            at_ns, is_live = source.clock.now_ns, True
            self._note_move([request.row], source, destination, at_ns, live=is_live)
        if self.log is not None:
            self.log.event(
                "request.moved_live",
                request_id=request.request_id,
                source_id=source.replica_id,
                destination_id=destination.replica_id,
                stop_ns=stop_ns,
            )
        if self.trace is not None:
            self.trace.moved_live(request, source, destination, started_ns, stop_ns)

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a load that is complete: what explains the timeline."""
        self.marks.record(at_ns, kind, target, text)
        if self.log is not None and kind != "fault over":  # `fault_over` has said so
            name = _EVENTS.get(kind)
            if name is not None:
                self.log.event(name, **_whose(target), text=text)
            else:
                self.log.event("timeline.noted", kind=kind, **_whose(target), text=text)
        if self.history is not None:
            if kind == "plan":
                self.history.add(at_ns, "plan", target=target, text=text)
            elif kind not in ("fault over", "host_cache"):
                self.history.add(at_ns, "noted", kind=kind, target=target, text=text)
        if self.trace is not None:
            replica = int(target.removeprefix("replica ")) if target.startswith("replica ") else 0
            self.trace.mark(at_ns, replica, kind, text)

    def _note_move(
        self,
        rows: list[int],
        source: ReplicaHandle,
        destination: ReplicaHandle,
        at_ns: int,
        **what: object,
    ) -> None:
        assert self.history is not None
        self.history.add(
            at_ns,
            "migrated",
            source=source.replica_id,
            destination=destination.replica_id,
            rows=rows,
            **what,
        )

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.marks.record(at_ns, "fault", target, f"{kind} ({text})")
        if self.log is not None:
            self.log.warn("fault.struck", kind=kind, **_whose(target), figures=text)
        if self.trace is not None:
            self.trace.mark(at_ns, max(0, replica_id), f"fault: {kind}", target)

        if self.history is not None:
            self.history.add(at_ns, "fault", kind=kind, target=target, figures=text)

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""
        if self.history is not None:
            self.history.add(at_ns, "fault_over", kind=kind, target=target)
        if self.log is not None:
            self.log.event("fault.ended", kind=kind, **_whose(target))

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""
        if self.history is not None:
            self.history.add(at_ns, "lost", row=request.row, reason=reason)
        if self.log is not None:
            self.log.warn("request.lost", request_id=request.request_id, reason=reason)

    def rerouted(self, request: Request, at_ns: int) -> None:
        """A request leaves a replica that has not begun it, or will not go on with it."""
        if self.history is not None:
            self.history.add(at_ns, "routed", row=request.row)
        if self.log is not None:
            self.log.event("request.requeued", request_id=request.request_id)

    def relayed(
        self,
        source: ReplicaHandle,
        old: ReplicaHandle,
        requests: list[Request],
        start_layer: int,
        at_ns: int,
    ) -> None:
        """A helper got a batch of which `start_layer` layers are done."""
        ids = " ".join(str(request.request_id) for request in requests)
        text = f"to replica {old.replica_id} after {start_layer} layers: requests {ids}"
        self.marks.record(at_ns, "relay", f"replica {source.replica_id}", text)
        if self.trace is not None:
            self.trace.mark(at_ns, source.replica_id, "relay", text)
        if self.log is not None:
            self.log.event(
                "batch.relayed",
                request_ids=[request.request_id for request in requests],
                source_id=source.replica_id,
                helper_id=old.replica_id,
                start_layer=start_layer,
            )

    def rejected(self, replica: ReplicaHandle, *, is_rejected: bool, at_ns: int) -> None:
        """A decode replica stops receiving KV because it is far fuller than the rest, or no longer.

        In marks.csv, the trace and the log: results of requests do not depend on being told.
        """
        self.noted(at_ns, "kv_rejected" if is_rejected else "kv_accepted", replica.name, "")

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
        if self._have_moved:
            self._states = [replica.state.value for replica in replicas]
            self._counts = dict(Counter(self._states))
            self._have_moved = False
        waiting = waiting_tokens = running = used = total = prefill = decode = 0
        for replica, state in zip(replicas, self._states, strict=True):
            if state == "inactive" and is_shared[replica.replica_id]:
                continue  # another replica is on its GPUs, or none
            view = replica.view()
            replica_prefill, replica_decode = view.tokens_produced
            its_running, its_waiting = view.running_count, view.waiting_count
            blocks_used, blocks_total = view.blocks_used, view.blocks_total
            if its_waiting:
                waiting += its_waiting
                waiting_tokens += view.waiting_tokens
            running += its_running
            used += blocks_used
            total += blocks_total
            prefill += replica_prefill
            decode += replica_decode
            self.per_replica.add(
                at_ns,
                replica.replica_id,
                state,
                its_running,
                its_waiting,
                blocks_used,
                blocks_total,
            )
        waiting += len(gateway.held)
        for queue in gateway.queues:
            waiting += len(queue)
            waiting_tokens += queue.waiting_prefill_tokens
        migrating = 0
        for watcher in watchers:
            outbound = watcher.outbound
            if outbound.unfinished:
                migrating += sum(len(batch.requests) for batch in outbound.batches())
        self.series.add(
            Sample(
                time_ns=at_ns,
                replicas=self._counts,
                waiting=waiting,
                waiting_prefill_tokens=waiting_tokens,
                running=running,
                migrating=migrating,
                used_blocks=used,
                total_blocks=total,
                prefill_tokens=prefill,
                decode_tokens=decode,
                completed=self.completed,
                preemptions=self.preemptions,
                flows=network.active,
                flow_bytes=dict(network.moved_bytes),
            )
        )

    # --- ending -------------------------------------------------------------------------------
    def close(self) -> None:
        """Write what is still in buffers (the requests' file is finished by the caller)."""
        with contextlib.ExitStack() as files:  # closes all of them, whatever one of them raises
            if self.trace is not None:
                files.callback(self.trace.writer.close)
            if self.history is not None:
                files.callback(self.history.close)
            for file in (self.per_replica, self.series, self.marks, self.transitions):
                files.callback(file.close)


class _LoggedBatches:
    """Writes first tokens, and on level `debug` every batch; then the batch is drawn."""

    def __init__(self, log: Log, drawn: BatchSink | None) -> None:
        self._log = log
        self._drawn = drawn

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
        log = self._log
        for chunk in batch.chunks:
            request = chunk.request
            if request.first_token_ns == end_ns:
                log.event(
                    "request.first_token",
                    request_id=request.request_id,
                    replica_id=replica_id,
                    ttft_ns=_ttft_ns(request),
                )
        if log.tells_batches:
            log.debug(
                "batch.ended",
                replica_id=replica_id,
                batch_id=batch.batch_id,
                iterations=steps,
                prompt_tokens=sum(batch.shape.prefill_new),
                decodes=batch.shape.decode_count,
                took_ns=end_ns - start_ns,
            )
        if self._drawn is not None:
            self._drawn.batch(replica_id, batch, start_ns, end_ns, steps, spans)


def _ttft_ns(request: Request) -> int | None:
    """How long its client has waited for the first token; None = there is none."""
    if request.first_token_ns < 0:
        return None
    return request.first_token_ns + request.first_out_ns - request.arrival_ns


def _whose(target: str) -> dict[str, object]:
    """The target of a mark, with the id of the replica if it is one."""
    if target.startswith("replica "):
        number = target.removeprefix("replica ").partition(":")[0]
        return {"replica_id": int(number), "target": target}
    return {"target": target}


def _wishes(request: Request) -> dict[str, object]:
    """What a request asks for besides its tokens."""
    wishes: dict[str, object] = {}
    if request.priority:
        wishes["priority"] = request.priority
    if request.tenant:
        wishes["tenant"] = request.tenant
    if request.deadline_ns >= 0:
        wishes["deadline_ns"] = request.deadline_ns
    if request.model:
        wishes["model"] = request.model
    return wishes
