"""Keeps what happens to requests that have a trace, and hands their spans on at their end.

Times in spans are emulated. Each call has its anchor: the wall clock at its arrival, from which its
emulated instants are counted, so that a span lies beside its client's, and lasts as long as it
would on the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from emu.apps.serve.traces.context import Ids, TraceContext, read_context
from emu.apps.serve.traces.spans import (
    CallFacts,
    Half,
    Journey,
    Mark,
    Span,
    Transfer,
    leg_of,
    spans_of_call,
    spans_of_half,
)
from emu.migration.transfer import MigratingBatch
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.world import Observer

Sink = Callable[[list[Span], int], None]
"""Takes the spans of a call, and the Unix time in ns of emulated time 0 for them."""


class TracedCall(Struct, frozen=True, kw_only=True):
    """A call whose trace is wanted."""

    context: TraceContext
    facts: CallFacts
    came_unix_ns: int
    """The wall clock when it was read."""


class Recorder(Observer):
    """The journeys of all requests under way."""

    def __init__(self, session: str, sink: Sink) -> None:
        self.ids = Ids(session)
        self._sink = sink
        self._journeys: dict[int, Journey] = {}
        self._open: dict[int, Request] = {}

    def context(self, headers: Mapping[str, str]) -> TraceContext | None:
        """The trace of a call; None where its caller wants none."""
        found = read_context(headers, self.ids)
        return found if found.is_sampled else None

    def arrived(self, request: Request) -> None:
        """A request has reached the gateway."""
        self._open[request.request_id] = request
        self._journeys[request.request_id] = Journey()

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        """An engine has lost it."""
        journey = self._journeys.get(request.request_id)
        if journey is None:
            return
        begin_ns = max([request.arrival_ns, *(leg.last_ns for leg in journey.legs)])
        leg = leg_of(request, begin_ns, at_ns, reason)
        journey.legs.append(leg)
        journey.marks.append(Mark(at_ns, reason, {"emu.replica": leg.holder}))

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """KV has arrived."""
        share = batch.kv_bytes // max(1, len(batch.requests))
        for request in batch.requests:
            journey = self._journeys.get(request.request_id)
            if journey is not None:
                move = Transfer(
                    source=source.replica_id,
                    destination=destination.replica_id,
                    begin_ns=batch.started_ns,
                    end_ns=ended_ns,
                    kv_bytes=share,
                )
                journey.transfers.append(move)

    def fault(self, at_ns: int, kind: str, target: str, text: str, replica_id: int) -> None:
        """A fault strikes all that its replica holds."""
        if replica_id < 0:
            return
        for request_id, request in self._open.items():
            if replica_id in (request.holder_id, request.replica_id, request.decode_replica_id):
                mark = Mark(at_ns, kind, {"emu.target": target, "emu.fault": text})
                self._journeys[request_id].marks.append(mark)

    def finish(
        self,
        request: Request,
        whole: TracedCall | None,
        halves: list[tuple[TracedCall, Half]],
        finish: str,
        now_ns: int,
    ) -> None:
        """A request has ended: its spans go out, those of a pair of ports for each call."""
        self._open.pop(request.request_id, None)
        journey = self._journeys.pop(request.request_id, Journey())
        if whole is not None:
            anchor_ns = whole.came_unix_ns - request.arrival_ns
            spans = spans_of_call(
                whole.context, whole.facts, request, journey, finish, now_ns, self.ids
            )
            self._sink(spans, anchor_ns)
        for call, half in halves:
            self._end_half(call, half, request, journey, finish)

    def broken(self, request: Request, traced: tuple[TracedCall, Half] | None) -> None:
        """A port of a fleet was to fetch the KV of a request, and did not get it."""
        if traced is not None:
            call, half = traced
            journey = self._journeys.get(request.request_id, Journey())
            half = structs.replace(half, problem=half.problem or "kv_transfer_failed")
            self._end_half(call, half, request, journey, "")

    def _end_half(
        self, call: TracedCall, half: Half, request: Request, journey: Journey, finish: str
    ) -> None:
        spans = spans_of_half(call.context, call.facts, request, half, journey, finish, self.ids)
        self._sink(spans, call.came_unix_ns - half.came_ns)


def problem_of(request: Request) -> str:
    """Why a request failed; empty where it did not."""
    if request.status is Status.COMPLETED or not request.status.is_terminal:
        return ""
    return request.reason or request.status.name.lower()
