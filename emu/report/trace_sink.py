"""What a run draws into the trace: turns batches, transfers and ends into trace events."""

from __future__ import annotations

from pathlib import Path

from emu.latency.base import LatencyBackend
from emu.migration.transfer import MigratingBatch
from emu.replica.view import ReplicaHandle
from emu.report.perfetto import TraceWriter
from emu.request import Request
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan


class TraceSink:
    """Implements `BatchSink` over a `TraceWriter`."""

    def __init__(self, path: Path, events_max: int) -> None:
        self.writer = TraceWriter(path, events_max)
        self._latency: dict[int, LatencyBackend] = {}
        """By replica."""

    def start(self, replica: ReplicaHandle) -> None:
        """Title of a replica's tracks."""
        self._latency[replica.replica_id] = replica.latency
        label = f"replica {replica.replica_id} ({replica.state.value})"
        self.writer.name_replica(replica.replica_id, label, replica.stages)

    def batch(
        self,
        replica_id: int,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: list[StageSpan] | None = None,
    ) -> None:
        """A batch (one slice for each pipeline stage), or a leap of `steps` iterations."""
        shape, latency = batch.shape, self._latency[replica_id]
        chunks = [c for c in batch.chunks if c.new_tokens > 1 or c.request.generated_tokens == 0]
        prompts = sum(c.new_tokens for c in chunks)
        args: dict[str, object] = {
            "prompt_tokens": prompts,
            "decodes": shape.decode_count,
            "sequences": shape.sequences,
            "context_tokens": shape.decode_context_sum + sum(shape.prefill_context),
        }
        if shape.verify is not None:
            args["verifying"] = shape.verify.count
            args["verified_tokens"] = shape.verify.tokens
        if chunks:
            args["requests"] = [c.request.request_id for c in batch.chunks]
        if steps > 1:
            args["iterations"] = steps
        elif not latency.foreign:
            for name, cost_ns in latency.components_ns(shape).items():
                if cost_ns:
                    args[f"{name}_ns"] = cost_ns
        kind = (
            "decode"
            if not shape.prefill_new
            else "mixed"
            if shape.decode_count or shape.verify
            else "prefill"
        )
        name = f"{kind} x{steps}" if steps > 1 else kind
        for span in spans or [StageSpan(0, start_ns, end_ns)]:
            self.writer.batch(replica_id, span, batch_id=batch.batch_id, name=name, args=args)
        first_ns = spans[0].start_ns if spans else start_ns
        for chunk in chunks:
            self.writer.visit(chunk.request.request_id, first_ns, replica_id)

    def arrived(self, request: Request, now_ns: int) -> None:
        """A request has reached the gateway."""
        self.writer.arrive(request.request_id, now_ns)

    def ended(self, request: Request, stages_of: dict[int, int]) -> None:
        """A request has received its last token."""
        replica_id = request.decode_replica_id
        if replica_id >= 0:
            last = stages_of.get(replica_id, 1) - 1
            self.writer.leave(request.request_id, request.last_token_ns, replica_id, last)

    def transfer(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """A migration has ended."""
        link = f"replica {source.replica_id} -> replica {destination.replica_id}"
        ids = [request.request_id for request in batch.requests]
        self.writer.transfer(
            link,
            batch.started_ns,
            ended_ns,
            f"kv {batch.batch_id}",
            {"bytes": batch.kv_bytes, "requests": ids},
        )
        for request_id in ids:
            self.writer.visit_transfer(request_id, batch.started_ns, ended_ns, link)

    def moved_live(
        self,
        request: Request,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        started_ns: int,
        stop_ns: int,
    ) -> None:
        """A running request has moved to another replica."""
        link = f"replica {source.replica_id} -> replica {destination.replica_id}"
        ended_ns = source.clock.now_ns
        self.writer.transfer(
            link,
            started_ns,
            ended_ns,
            f"live {request.request_id}",
            {"request": request.request_id, "stop_ns": stop_ns},
        )
        self.writer.visit_transfer(request.request_id, started_ns, ended_ns, link)

    def mark(self, at_ns: int, replica_id: int, name: str, cause: str) -> None:
        """A change of state, a fault, a decision."""
        self.writer.instant(name, at_ns, replica_id, {"cause": cause})
