"""What happens in a run, written as it goes: `events.jsonl` to judge, `trace.json.gz` to view."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec

from emu.latency.base import LatencyBackend
from emu.migration.transfer import MigratingBatch
from emu.replica.states import Marker, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request
from emu.scheduling.base import Batch, StageSpan

if TYPE_CHECKING:
    from emu.autoscale.kv_reject import Use
    from emu.autoscale.planner import Demand
    from emu.autoscale.snapshot import Snapshot
    from emu.latency.ends import Ends
    from emu.network.carrier import Carried
    from emu.network.flows import Parts
    from emu.network.topology import Topology

# --- the history of a run: what happened to every request, in order -------------------------------
# Written to events.jsonl when `output.events` is set, kept in memory by chaos runs. It is told by
# the same calls that change the world and never asked by it, so that a checker that reads only this
# (`emu/apps/chaos/checker.py`, `emu/apps/chaos/truth/`) can find the world's books wrong.
#
# A record is a JSON object with `at_ns` and `event`; docs/reference/outputs.md lists them all. A
# run that writes them takes one iteration after another, without leaps: the file does not depend on
# `scheduler.leap`.

Record = dict[str, Any]
_ABSENT: Final = (ReplicaState.INACTIVE, ReplicaState.FAILED)


class History:
    """Collects records, in memory or in a file."""

    def __init__(self, path: Path | None = None, *, follows_steps: bool = True) -> None:
        """`follows_steps`: single iterations are told, so the run must not leap."""
        self.follows_steps = follows_steps
        self.records: list[Record] = []
        self._encoder = msgspec.json.Encoder()
        self._file: TextIO | None = None if path is None else path.open("w", encoding="utf-8")

    def add(self, at_ns: int, event: str, **what: Any) -> None:
        """Something happened now."""
        record: Record = {"at_ns": at_ns, "event": event, **what}
        if self._file is None:
            self.records.append(record)
        else:
            self._file.write(self._encoder.encode(record).decode() + "\n")

    def tokens(
        self,
        replica: int,
        receivers: Sequence[Request],
        start_ns: int,
        ends: Ends | None,
        now_ns: int,
    ) -> None:
        """These requests received a token at each of the ends (relative to the start), or now."""
        times = [now_ns] if ends is None else [end_ns + start_ns for end_ns in ends]
        rows = [request.row for request in receivers]
        self.add(times[-1], "tokens", replica=replica, rows=rows, ends=times)

    # --- iterations ---------------------------------------------------------------------------
    def formed(
        self,
        at_ns: int,
        replica: int,
        batch: Batch,
        members: Iterable[tuple[Request, int, int]],
        first_layer: int,
    ) -> None:
        """A replica has formed a batch; `first_layer`: another one has run the layers before."""
        what: dict[str, Any] = {}
        if batch.preempted:
            what["preempted"] = [request.row for request in batch.preempted]
        if batch.recalls:
            what["recalls"] = [
                [recall.request.row, recall.tier, recall.size_bytes, recall.tokens]
                for recall in batch.recalls
            ]
        verify = batch.shape.verify
        if verify is not None:
            what["verified"] = [verify.count, verify.tokens, verify.context_sum]
        if first_layer:
            what["first_layer"] = first_layer
        self.add(
            at_ns,
            "batch",
            replica=replica,
            batch=batch.batch_id,
            members=[[request.row, before, new] for request, before, new in members],
            **what,
        )

    def began(self, at_ns: int, replica: int, batch: Batch, wave_wait_ns: int) -> None:
        """What the batch waited for is there: it runs from now on."""
        what: dict[str, Any] = {}
        if wave_wait_ns:
            what["wait_ns"] = wave_wait_ns
        if batch.recalls:  # what a tier lost meanwhile is computed instead
            what["chunks"] = [
                [chunk.request.row, chunk.context_tokens, chunk.new_tokens]
                for chunk in batch.chunks
            ]
        self.add(at_ns, "began", replica=replica, batch=batch.batch_id, **what)

    def ran(
        self,
        at_ns: int,
        replica: int,
        batch: Batch,
        start_ns: int,
        spans: Sequence[StageSpan] | None,
    ) -> None:
        """A batch, or the layers of it that run here, has ended now."""
        what: dict[str, Any] = {}
        if spans is not None:
            what["stages"] = [[span.start_ns, span.end_ns] for span in spans]
        self.add(at_ns, "ran", replica=replica, batch=batch.batch_id, start_ns=start_ns, **what)

    def layer(self, at_ns: int, replica: int, batch: Batch, layer: int, start_ns: int) -> None:
        """One layer of a batch has ended now (live scaling)."""
        self.add(
            at_ns,
            "layer",
            replica=replica,
            batch=batch.batch_id,
            layer=layer,
            start_ns=start_ns,
        )

    # --- decisions ----------------------------------------------------------------------------
    def look(
        self, at_ns: int, planner: str, seen: Snapshot, wanted: Demand, actions: Iterable[str]
    ) -> None:
        """A planner has looked: what it saw, what it wants, and what is done about it."""
        self.add(
            at_ns,
            "look",
            planner=planner,
            wanted=[wanted.prefill, wanted.decode, wanted.colocated],
            figures=dict(wanted.figures),
            waiting_tokens=seen.waiting_tokens,
            waiting=seen.waiting_requests,
            outstanding=seen.outstanding,
            replicas=[
                [
                    view.replica_id,
                    view.state.value,
                    view.blocks_used,
                    view.blocks_total,
                    view.shut_ns,
                    view.is_closed,
                    view.rdma is Marker.NONE and view.nvl is Marker.NONE,
                ]
                for view in seen.replicas
                if view.state not in _ABSENT
            ],
            actions=list(actions),
        )

    def uses(self, at_ns: int, uses: Iterable[Use], rejected: Sequence[int]) -> None:
        """KV rejection has looked at all decode replicas."""
        self.add(at_ns, "uses", uses=[list(use) for use in uses], rejected=list(rejected))

    def choice(
        self, at_ns: int, request: Request, source: ReplicaHandle, destination: ReplicaHandle
    ) -> None:
        """Rebalancing begins to move a request."""
        self.add(
            at_ns,
            "choice",
            row=request.row,
            source=source.replica_id,
            destination=destination.replica_id,
            uses=[
                [replica.view().blocks_used, replica.view().blocks_total]
                for replica in (source, destination)
            ],
        )

    def taken(
        self,
        at_ns: int,
        source: int,
        requests: Sequence[Request],
        uses: Iterable[tuple[int, int, int]],
        destination: int,
    ) -> None:
        """KV that leaves a replica has found a destination among those that are open."""
        pin = requests[0].decode_pin
        what = {"pinned": pin} if pin >= 0 else {}
        self.add(
            at_ns,
            "taken",
            source=source,
            destination=destination,
            rows=[request.row for request in requests],
            uses=[list(use) for use in uses],
            **what,
        )

    # --- transfers ----------------------------------------------------------------------------
    def links(self, topology: Topology) -> None:
        """What the links carry at the start."""
        for link in topology.links:
            self.add(0, "link", link=link.name, bytes_per_s=link.bytes_per_s)

    def transfer(
        self,
        carried: Carried,
        at_ns: int,
        topology: Topology,
        parts: Parts,
        latency_ns: int,
        after: Carried | None,
        lag_bytes: int,
    ) -> None:
        """Bytes set out, in parallel parts (links, bytes)."""
        what: dict[str, Any] = {}
        if carried.pair is not None:
            what["source"], what["destination"] = carried.pair
        if carried.overlapped_bytes:
            what["overlapped_bytes"] = carried.overlapped_bytes
        if after is not None:
            what |= {"after": after.flow_id, "lag_bytes": lag_bytes}
        self.add(
            at_ns,
            "transfer",
            transfer=carried.flow_id,
            kind=carried.kind,
            bytes=carried.size_bytes,
            latency_ns=latency_ns,
            parts=[[[topology.links[link].name for link in links], size] for links, size in parts],
            **what,
        )

    def transfer_over(self, carried: Carried, at_ns: int, how: str, moved_bytes: int) -> None:
        """A transfer has ended; `how`: `arrived`, `stopped`, or why it failed."""
        self.add(at_ns, "transfer_over", transfer=carried.flow_id, how=how, moved_bytes=moved_bytes)

    def close(self) -> None:
        """Write the rest."""
        if self._file is not None:
            self._file.close()


# --- a Chrome/Perfetto trace ----------------------------------------------------------------------
#   trace = TraceWriter(directory / "trace.json.gz", events_max=1_000_000)
#   trace.name_replica(replica_id, "replica 3 (decode)", stages=1)  # before or after its events
#   trace.batch(replica_id, start_ns, duration_ns, batch_id=7, stage=0,
#               args={"tokens": 512, "sequences": 9, "attention_ns": ...})
#   trace.transfer("node0.nic3 -> node1.nic0", start_ns, end_ns, "kv 17", args={"bytes": n})
#   trace.counter("queue", time_ns, {"waiting": 4})        # `replica=3`: in that replica's group
#   trace.instant("replica_crash", time_ns, replica=3, args={...})
#   trace.arrive(request_id, time_ns)                    # a request enters: its arrow starts
#   trace.visit(request_id, time_ns, replica_id, stage=0)    # the arrow passes the batch there
#   trace.visit_transfer(request_id, start_ns, end_ns, link)     # ... or that transfer
#   trace.leave(request_id, time_ns, replica_id, stage=0)    # the arrow ends
#   trace.close()
#
# Processes: 1 = gateway (arrivals, counters), 2 = network (one lane per transfer under way on a
# link), 100 + id = replicas (one thread per pipeline stage). Times are integer ns, written as us
# with three digits. An arrow binds to the slice that encloses its instant on that track: call
# `batch` before `visit` or `leave`, with an instant from `start_ns` up to `start_ns + duration_ns`.
#
# After `events_max` events nothing is added; the metadata (`otherData`) says how many were left
# out. The same calls give the same bytes.

_PID_GATEWAY: Final = 1
_PID_NETWORK: Final = 2
_PID_REPLICA_0: Final = 100
_BATCH_EVENTS: Final = 2048

Args = Mapping[str, object]


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _us(time_ns: int) -> str:
    """ns as us, exact: 1234567 -> 1234.567."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


class TraceWriter:
    """Streams trace events; memory does not grow with the run."""

    def __init__(self, path: Path, events_max: int = 1_000_000) -> None:
        self.events_written = 0
        self.events_left_out = 0
        self._events_max = events_max
        self._file = path.open("wb")
        # No name and no time in the header: the same events give the same bytes.
        self._gzip = gzip.GzipFile(
            filename="", mode="wb", compresslevel=4, fileobj=self._file, mtime=0
        )
        self._gzip.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        self._batch: list[str] = []
        self._is_first = True
        self._is_closed = False
        self._links: dict[str, list[tuple[int, int]]] = {}
        self._lanes = 0
        self._last_lane: dict[str, int] = {}
        self._name(_PID_GATEWAY, "gateway", sort=0)
        self._name(_PID_GATEWAY, "arrivals", tid=0)
        self._name(_PID_NETWORK, "network", sort=1)

    # --- names --------------------------------------------------------------------------------
    def name_replica(self, replica: int, label: str, stages: int = 1) -> None:
        """Title of a replica's group of tracks."""
        pid = _PID_REPLICA_0 + replica
        self._name(pid, label, sort=pid)
        for stage in range(stages):
            self._name(pid, f"stage {stage}" if stages > 1 else "batches", tid=stage)

    def _name(self, pid: int, label: str, *, tid: int = -1, sort: int = -1) -> None:
        kind = "process" if tid < 0 else "thread"
        thread = f',"tid":{tid}' if tid >= 0 else ""
        name = _encode(label)
        self._write(
            f'{{"ph":"M","pid":{pid}{thread},"name":"{kind}_name","args":{{"name":{name}}}}}'
        )
        if sort >= 0:
            self._write(
                f'{{"ph":"M","pid":{pid},"name":"process_sort_index",'
                f'"args":{{"sort_index":{sort}}}}}'
            )

    # --- slices -------------------------------------------------------------------------------
    def batch(
        self,
        replica: int,
        start_ns: int,
        duration_ns: int,
        *,
        batch_id: int,
        stage: int = 0,
        name: str = "",
        args: Args | None = None,
    ) -> None:
        """One iteration (or one leap of equal iterations) on one pipeline stage."""
        if self._is_full():
            return
        label = _encode(name or f"batch {batch_id}")
        extra = _encode({"batch": batch_id, **(args or {})})
        self._event(
            f'{{"ph":"X","pid":{_PID_REPLICA_0 + replica},"tid":{stage},"ts":{_us(start_ns)},'
            f'"dur":{_us(duration_ns)},"name":{label},"cat":"batch","args":{extra}}}'
        )

    def transfer(
        self, link: str, start_ns: int, end_ns: int, name: str, args: Args | None = None
    ) -> None:
        """Bytes that moved over a link. Call at its end: calls come in order of `end_ns`."""
        if self._is_full():
            return
        tid = self._lane(link, start_ns, end_ns)
        extra = _encode(dict(args or {}))
        self._event(
            f'{{"ph":"X","pid":{_PID_NETWORK},"tid":{tid},"ts":{_us(start_ns)},'
            f'"dur":{_us(end_ns - start_ns)},"name":{_encode(name)},"cat":"transfer",'
            f'"args":{extra}}}'
        )

    def counter(
        self, name: str, time_ns: int, values: Mapping[str, int | float], replica: int = -1
    ) -> None:
        """Figures that go on until the next call with the same name."""
        if self._is_full():
            return
        pid = _PID_GATEWAY if replica < 0 else _PID_REPLICA_0 + replica
        self._event(
            f'{{"ph":"C","pid":{pid},"ts":{_us(time_ns)},"name":{_encode(name)},'
            f'"args":{_encode(dict(values))}}}'
        )

    def instant(self, name: str, time_ns: int, replica: int = -1, args: Args | None = None) -> None:
        """A fault, a scaling decision, a change of state: a mark on a replica or on all tracks."""
        if self._is_full():
            return
        pid, scope = (_PID_GATEWAY, "g") if replica < 0 else (_PID_REPLICA_0 + replica, "p")
        self._event(
            f'{{"ph":"i","s":"{scope}","pid":{pid},"tid":0,"ts":{_us(time_ns)},'
            f'"name":{_encode(name)},"cat":"event","args":{_encode(dict(args or {}))}}}'
        )

    # --- the way of a request -----------------------------------------------------------------
    def arrive(self, request_id: int, time_ns: int) -> None:
        """A request reaches the gateway; its arrow starts here."""
        if self._is_full():
            return
        self._event(
            f'{{"ph":"X","pid":{_PID_GATEWAY},"tid":0,"ts":{_us(time_ns)},"dur":0.000,'
            f'"name":"request {request_id}","cat":"arrival","args":{{"request":{request_id}}}}}'
        )
        self._flow("s", request_id, time_ns, _PID_GATEWAY, 0)

    def visit(self, request_id: int, time_ns: int, replica: int, stage: int = 0) -> None:
        """The arrow passes through the batch that runs there at that instant."""
        self._flow("t", request_id, time_ns, _PID_REPLICA_0 + replica, stage)

    def visit_transfer(self, request_id: int, start_ns: int, end_ns: int, link: str) -> None:
        """The arrow passes through a transfer: the one that `transfer` wrote last on this link."""
        if self._is_full():
            return
        if link in self._last_lane:
            middle_ns = (start_ns + end_ns) // 2
            self._flow("t", request_id, middle_ns, _PID_NETWORK, self._last_lane[link])

    def leave(self, request_id: int, time_ns: int, replica: int, stage: int = 0) -> None:
        """The arrow ends in the batch whose end at `time_ns` gave the last token."""
        # A slice does not contain its own end: one ns earlier is inside, at the end it may not be.
        self._flow("f", request_id, max(time_ns - 1, 0), _PID_REPLICA_0 + replica, stage)

    def _flow(self, phase: str, request_id: int, time_ns: int, pid: int, tid: int) -> None:
        if self._is_full():
            return
        self._event(
            f'{{"ph":"{phase}","bp":"e","id":{request_id},"pid":{pid},"tid":{tid},'
            f'"ts":{_us(time_ns)},"name":"request","cat":"request"}}'
        )

    # --- plumbing -----------------------------------------------------------------------------
    def close(self) -> None:
        """Write metadata and end the file; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._flush()
        notes = {
            "events": self.events_written,
            "events_max": self._events_max,
            "events_left_out": self.events_left_out,
            "note": "complete"
            if not self.events_left_out
            else "later events were left out (output.trace_events_max)",
        }
        with contextlib.ExitStack() as files:  # on a full disk they are closed, too
            files.callback(self._file.close)
            files.callback(self._gzip.close)
            self._gzip.write(f'\n],"otherData":{_encode(notes)}}}\n'.encode())

    def _lane(self, link: str, start_ns: int, end_ns: int) -> int:
        """A thread of this link on which nothing else is drawn meanwhile."""
        lanes = self._links.setdefault(link, [])
        for index, (tid, busy_until_ns) in enumerate(lanes):
            if busy_until_ns <= start_ns:
                lanes[index] = (tid, end_ns)
                self._last_lane[link] = tid
                return tid
        tid = self._lanes
        self._lanes += 1
        lanes.append((tid, end_ns))
        self._last_lane[link] = tid
        self._name(_PID_NETWORK, link if len(lanes) == 1 else f"{link} ({len(lanes)})", tid=tid)
        return tid

    def _is_full(self) -> bool:
        """True if one more event would be too many; it is then counted as left out."""
        if self.events_written < self._events_max:
            return False
        self.events_left_out += 1
        return True

    def _event(self, text: str) -> None:
        self.events_written += 1
        self._write(text)

    def _write(self, text: str) -> None:
        self._batch.append(text)
        if len(self._batch) >= _BATCH_EVENTS:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            lead = "" if self._is_first else ",\n"
            self._is_first = False
            self._gzip.write((lead + ",\n".join(self._batch)).encode())
            self._batch.clear()


# --------------------------------------------------------------------------------------------------
# What a run draws into the trace: turns batches, transfers and ends into trace events.


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
            args.update(_components(latency, batch))
        kind = (
            "decode"
            if not shape.prefill_new
            else "mixed"
            if shape.decode_count or shape.verify
            else "prefill"
        )
        name = f"{kind} x{steps}" if steps > 1 else kind
        for span in spans or [StageSpan(0, start_ns, end_ns)]:
            self.writer.batch(
                replica_id,
                span.start_ns,
                span.end_ns - span.start_ns,
                batch_id=batch.batch_id,
                stage=span.stage,
                name=name,
                args=args,
            )
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


def _components(latency: LatencyBackend, batch: Batch) -> dict[str, int]:
    return {
        f"{name}_ns": cost_ns
        for name, cost_ns in latency.components_ns(batch.shape).items()
        if cost_ns
    }
