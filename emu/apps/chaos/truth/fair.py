"""Fair queues: the tenant that was served least goes first.

Restates `scheduler.order = "fair"` of docs/lab/schedulers.md: a tenant is charged the prompt when a
request is admitted and its output when it leaves, and starts at the level of the least served one
that waits. A queue is followed until something else than arrivals and ends happens to it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from emu.apps.chaos.truth.choices import FAIR
from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape

_OWN_QUEUE: Final = ("colocated", "prefill")


class Line(msgspec.Struct):
    """The queue of one replica."""

    waiting: dict[str, list[tuple[int, int, int]]] = {}
    """(arrival, request, row) of each that waits, by tenant."""
    served: dict[str, int] = {}
    running: set[int] = set()

    def rank(self, tenant: str) -> tuple[int, int, int]:
        """Smaller goes first."""
        arrival_ns, request, _ = min(self.waiting[tenant])
        return self.served[tenant], arrival_ns, request


class Fair:
    """All fair queues of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._lines: dict[int, Line] = {}
        self._place: dict[int, int] = {}
        """The replica of each row."""
        self._got: dict[int, int] = defaultdict(int)

    def judge(self) -> None:
        """Replay all queues."""
        for seat in self._tape.seats:
            if self._is_followed(seat):
                self._lines[seat.replica] = Line()
        if not self._lines:
            return
        self._tape.replay(
            {
                "queued": self._queued,
                "lost": self._lost,
                "routed": self._lost,
                "migrated": self._migrated,
                "state": self._state,
                "tokens": self._tokens,
                "ended": self._ended,
                "batch": self._batch,
            }
        )

    def _is_followed(self, seat: Seat) -> bool:
        table = seat.scheduler
        is_own = isinstance(table, FAIR)
        is_plain = seat.is_plain and not seat.is_ahead and not seat.passes_over
        return is_own and is_plain and table.order == "fair" and seat.role in _OWN_QUEUE

    def _stop(self, row: int) -> None:
        """Something else has happened to the row: what its queue has charged is not known."""
        self._lines.pop(self._place.get(row, -1), None)

    def _queued(self, record: Record) -> None:
        row, replica = record["row"], record["replica"]
        if row in self._place:
            self._stop(row)
        self._place[row] = replica
        line, arrived = self._lines.get(replica), self._tape.arrived[row]
        if line is None:
            return
        tenant = arrived.get("tenant", "")
        if tenant not in line.waiting:
            floor = min((line.served[other] for other in line.waiting), default=0)
            line.served[tenant] = max(line.served.get(tenant, 0), floor)
            line.waiting[tenant] = []
        line.waiting[tenant].append((arrived["at_ns"], arrived["request"], row))

    def _lost(self, record: Record) -> None:
        self._stop(record["row"])

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            if record.get("live"):
                self._stop(row)
                self._lines.pop(record["destination"], None)

    def _state(self, record: Record) -> None:
        self._lines.pop(record["replica"], None)

    def _tokens(self, record: Record) -> None:
        line = self._lines.get(record["replica"])
        for row in record["rows"]:
            self._got[row] += len(record["ends"])
            if line is None or row not in line.running:
                continue
            arrived = self._tape.arrived[row]
            is_prefill = self._tape.seats[record["replica"]].role == "prefill"
            if is_prefill or self._got[row] >= arrived["output"]:
                line.running.remove(row)
                line.served[arrived.get("tenant", "")] += self._got[row]

    def _ended(self, record: Record) -> None:
        if record["status"] != "completed":
            self._stop(record["row"])

    def _batch(self, record: Record) -> None:
        line = self._lines.get(record["replica"])
        if line is None:
            return
        if record.get("preempted") or "first_layer" in record:
            del self._lines[record["replica"]]
            return
        for row, before, _ in record["members"]:
            if row in line.running:
                continue
            tenant = self._tape.arrived[row].get("tenant", "")
            queue = line.waiting.get(tenant, [])
            entry = next((one for one in queue if one[2] == row), None)
            if entry is None or (before and self._got[row]):
                del self._lines[record["replica"]]
                return
            best = min(line.waiting, key=line.rank)
            self._tape.count("fair")
            if best != tenant or min(queue) != entry:
                first = min(line.waiting[best])[2]
                self._tape.say(
                    f"T5: batch {record['batch']} of replica {record['replica']} at "
                    f"{record['at_ns']} ns takes row {row} of tenant {tenant!r} before row {first} "
                    f"of tenant {best!r}, which was served less: {line.served}"
                )
                del self._lines[record["replica"]]
                return
            queue.remove(entry)
            if not queue:
                del line.waiting[tenant]
            line.running.add(row)
            line.served[tenant] += self._tape.arrived[row]["prompt"]
