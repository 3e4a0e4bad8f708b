"""A Chrome/Perfetto trace.

    trace = TraceWriter(directory / "trace.json.gz", events_max=1_000_000)
    trace.name_replica(replica_id, "replica 3 (decode)", stages=1)  # before or after its events
    trace.batch(replica_id, StageSpan(0, start_ns, end_ns), batch_id=7,
                args={"tokens": 512, "sequences": 9, "attention_ns": ...})
    trace.transfer("node0.nic3 -> node1.nic0", start_ns, end_ns, "kv 17", args={"bytes": n})
    trace.counter("queue", time_ns, {"waiting": 4})        # `replica=3`: in that replica's group
    trace.instant("replica_crash", time_ns, replica=3, args={...})
    trace.arrive(request_id, time_ns)                    # a request enters: its arrow starts
    trace.visit(request_id, time_ns, replica_id, stage=0)    # the arrow passes the batch there
    trace.visit_transfer(request_id, start_ns, end_ns, link)     # ... or that transfer
    trace.leave(request_id, time_ns, replica_id, stage=0)    # the arrow ends
    trace.close()

Processes: 1 = gateway (arrivals, counters), 2 = network (one lane per transfer under way on a
link), 100 + id = replicas (one thread per pipeline stage). Times are integer ns, written as us
with three digits. An arrow binds to the slice that encloses its instant on that track: call
`batch` before `visit` or `leave`, with an instant of its span.

After `events_max` events nothing is added; the metadata (`otherData`) says how many were left
out. The same calls give the same bytes.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from emu.scheduling.pipeline import StageSpan

_PID_GATEWAY: Final = 1
_PID_NETWORK: Final = 2
_PID_REPLICA_0: Final = 100
_BATCH_EVENTS: Final = 256

Args = Mapping[str, object]


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _us(time_ns: int) -> str:
    """ns as us, exact: 1234567 -> 1234.567."""
    return f"{time_ns // 1000}.{str(1000 + time_ns % 1000)[1:]}"  # compiled faster than :03d


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

    def batch(
        self,
        replica: int,
        span: StageSpan,
        *,
        batch_id: int,
        name: str = "",
        args: Args | None = None,
    ) -> None:
        """One iteration (or one leap of equal iterations) on one pipeline stage."""
        if self._is_full():
            return
        label = _encode(name or f"batch {batch_id}")
        extra = _encode({"batch": batch_id, **(args or {})})
        self._event(
            f'{{"ph":"X","pid":{_PID_REPLICA_0 + replica},"tid":{span.stage},'
            f'"ts":{_us(span.start_ns)},"dur":{_us(span.end_ns - span.start_ns)},'
            f'"name":{label},"cat":"batch","args":{extra}}}'
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
