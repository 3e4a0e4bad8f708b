"""The history of a run: what happened to every request, in order.

Written to events.jsonl when `output.events` is set, kept in memory by chaos runs. It is told by
the same calls that change the world and never asked by it, so that a checker that reads only this
(`emu/apps/chaos/judge.py`, `emu/apps/chaos/truth/`) can find the world's books wrong.

A record is a JSON object with `at_ns` and `event`; docs/reference/outputs.md lists them all. A
run that writes them takes one iteration after another, without leaps: the file does not depend on
`scheduler.leap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from emu.documents import Document
from emu.replica.states import Marker, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan

if TYPE_CHECKING:
    from emu.autoscale.demand import Demand
    from emu.autoscale.kv_reject import Use
    from emu.autoscale.snapshot import Snapshot
    from emu.latency.ends import Ends
    from emu.migration.destinations import Taken
    from emu.network.carrier import Carried
    from emu.network.flows import Parts, TransferSpec
    from emu.network.topology import Topology


Record = Document
_ABSENT: Final = (ReplicaState.INACTIVE, ReplicaState.FAILED)


class History:
    """Collects records, in memory or in a file."""

    def __init__(self, path: Path | None = None, *, follows_steps: bool = True) -> None:
        """`follows_steps`: single iterations are told, so the run must not leap."""
        self.follows_steps = follows_steps
        self.records: list[Record] = []
        self._encoder = msgspec.json.Encoder()
        self._file: TextIO | None = None if path is None else path.open("w", encoding="utf-8")

    def add(self, at_ns: int, event: str, **what: object) -> None:
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

    def formed(
        self,
        at_ns: int,
        replica: int,
        batch: Batch,
        members: Iterable[tuple[Request, int, int]],
        first_layer: int,
    ) -> None:
        """A replica has formed a batch; `first_layer`: another one has run the layers before."""
        rows = [[request.row, before, new] for request, before, new in members]
        what: dict[str, object] = {"members": rows}
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
        self.add(at_ns, "batch", replica=replica, batch=batch.batch_id, **what)

    def began(self, at_ns: int, replica: int, batch: Batch, wave_wait_ns: int) -> None:
        """What the batch waited for is there: it runs from now on."""
        what: dict[str, object] = {}
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
        what: dict[str, object] = {}
        if spans is not None:
            what["stages"] = [[span.start_ns, span.end_ns] for span in spans]
        self.add(at_ns, "ran", replica=replica, batch=batch.batch_id, start_ns=start_ns, **what)

    def layer(self, at_ns: int, replica: int, batch: Batch, layer: int, start_ns: int) -> None:
        """One layer of a batch has ended now (live scaling)."""
        what = {"batch": batch.batch_id, "layer": layer, "start_ns": start_ns}
        self.add(at_ns, "layer", replica=replica, **what)

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

    def taken(self, at_ns: int, taken: Taken) -> None:
        """KV that leaves a replica has found a destination among those that are open."""
        pin = taken.requests[0].decode_pin
        what = {"pinned": pin} if pin >= 0 else {}
        self.add(
            at_ns,
            "taken",
            source=taken.source,
            destination=taken.destination,
            rows=[request.row for request in taken.requests],
            uses=[list(use) for use in taken.uses],
            **what,
        )

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
        spec: TransferSpec,
    ) -> None:
        """Bytes set out, in parallel parts (links, bytes)."""
        what: dict[str, object] = {}
        if carried.pair is not None:
            what["source"], what["destination"] = carried.pair
        if carried.overlapped_bytes:
            what["overlapped_bytes"] = carried.overlapped_bytes
        if spec.after is not None:
            what |= {"after": spec.after, "lag_bytes": spec.lag_bytes}
        self.add(
            at_ns,
            "transfer",
            transfer=carried.flow_id,
            kind=carried.kind,
            bytes=carried.size_bytes,
            latency_ns=spec.latency_ns,
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
