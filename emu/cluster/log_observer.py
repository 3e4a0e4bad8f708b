"""Writes the events of a run into its log (`emu run --log`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from emu.cluster.ports import LiveMove, Observer, Relay, StateChange, wishes
from emu.log import Log
from emu.replica.view import ReplicaHandle
from emu.request import Request
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan

if TYPE_CHECKING:
    from emu.migration.transfer import MigratingBatch

EVENTS: Final = {
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


class LogObserver(Observer):
    """What every log holds; one that follows requests and replicas is told more (`formed`, ...)."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def started(self, replicas: Sequence[ReplicaHandle]) -> None:
        """First line of each replica."""
        for replica in replicas:
            self._log.event(
                "replica.started",
                replica_id=replica.replica_id,
                state=replica.state.value,
                machine=replica.machine,
                gpus=list(replica.gpus),
            )

    def actor_started(self, name: str) -> None:
        """An actor's life begins: a coroutine, or a task, with this name."""
        if self._log.tells_batches:
            self._log.debug("actor.started", actor=name)

    # Requests
    def arrived(self, request: Request) -> None:
        """A request has reached the gateway."""
        self._log.event(
            "request.arrived",
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            **wishes(request),
        )

    def routed(self, request: Request) -> None:
        """A request has been given to a replica, waits in the common queue, or for a replica."""
        if request.holder_id >= 0:
            replica_id = request.holder_id
            self._log.event("request.routed", request_id=request.request_id, replica_id=replica_id)
        elif not request.status.is_terminal:
            self._log.event("request.queued", request_id=request.request_id)

    def formed(self, replica_id: int, batch: Batch) -> None:
        """A replica has formed a batch: some of its prompts may begin with it."""
        for chunk in batch.chunks:
            request = chunk.request
            if request.first_scheduled_ns == batch.formed_ns:
                self._log.event(
                    "request.scheduled",
                    request_id=request.request_id,
                    replica_id=replica_id,
                    queued_ns=batch.formed_ns - request.arrival_ns,
                )

    def batch(
        self,
        replica_id: int,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: list[StageSpan] | None = None,
    ) -> None:
        """A batch has ended: first tokens, and on level `debug` the batch itself."""
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

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended."""
        self._log.event(
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

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """A request's KV is gone."""
        self._log.warn("request.lost", request_id=request.request_id, reason=reason)

    def rerouted(self, request: Request, at_ns: int) -> None:
        """A request leaves a replica for another one."""
        self._log.event("request.requeued", request_id=request.request_id)

    # Transfers
    def sent(
        self, batch: MigratingBatch, source: ReplicaHandle, destination: ReplicaHandle
    ) -> None:
        """A migration begins."""
        self._log.event(
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
        self._log.event(
            "migration.finished",
            request_ids=[request.request_id for request in batch.requests],
            source_id=source.replica_id,
            destination_id=destination.replica_id,
            kv_bytes=batch.kv_bytes,
            took_ns=ended_ns - batch.started_ns,
        )

    def moved_live(self, move: LiveMove) -> None:
        """A running request has moved."""
        self._log.event(
            "request.moved_live",
            request_id=move.request.request_id,
            source_id=move.source.replica_id,
            destination_id=move.destination.replica_id,
            stop_ns=move.stop_ns,
        )

    def relayed(self, relay: Relay) -> None:
        """A helper got a batch."""
        self._log.event(
            "batch.relayed",
            request_ids=[request.request_id for request in relay.requests],
            source_id=relay.source.replica_id,
            helper_id=relay.old.replica_id,
            start_layer=relay.start_layer,
        )

    # Replicas and the timeline
    def moved(self, change: StateChange) -> None:
        """A replica has changed its state."""
        self._log.event(
            "replica.moved",
            replica_id=change.replica.replica_id,
            **{"from": change.before.value, "to": change.replica.state.value},
            writer=change.writer,
            cause=change.cause,
        )

    def noted(self, at_ns: int, kind: str, target: str, text: str) -> None:
        """A plan, a command, a load that is complete."""
        if kind == "fault over":
            return  # `fault_over` has said so
        name = EVENTS.get(kind)
        if name is not None:
            self._log.event(name, **_whose(target), text=text)
        else:
            self._log.event("timeline.noted", kind=kind, **_whose(target), text=text)

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault has struck."""
        self._log.warn("fault.struck", kind=kind, **_whose(target), figures=text)

    def fault_over(self, at_ns: int, kind: str, target: str) -> None:
        """A fault that lasted is over."""
        self._log.event("fault.ended", kind=kind, **_whose(target))


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
