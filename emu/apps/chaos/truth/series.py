"""Figures over time, and how long requests waited.

Restates docs/reference/outputs.md (timeseries.csv: rows count what has happened since the row
before; rates are whole numbers, so short rows give the counts back) and docs/metrics.md (wait:
until first scheduled, plus between replicas; the last quarter of those that completed, in order of
arrival). What happens at a sampling instant may be in its row or in the next.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape
from emu.documents import DocumentView

Row = Mapping[str, str]
_NEAR_MS: Final = 2e-6
_KINDS: Final = ("kv", "weights", "activation")
_SHORT_NS: Final = 900_000_000
"""In a row of so long at most a rate in whole units gives its count back."""


class Series:
    """All that timeseries.csv counts, up to an instant."""

    def __init__(self, tape: Tape, rows: Sequence[Row]) -> None:
        """`rows`: of requests.csv."""
        self._tape = tape
        self._preempted = [int(row["preemptions"] or 0) for row in rows]
        self._got: dict[int, int] = defaultdict(int)
        self._members: dict[tuple[int, int], Sequence[Sequence[int]]] = {}
        self._begun: set[int] = set()
        """Rows that have KV on their replica."""
        self._reading: set[int] = set()
        """Of these, rows whose prompt is read, or read again."""
        self._flows: dict[int, tuple[str, int]] = {}
        self._known: Counter[str] = Counter()
        self._unsure = 0
        """Decodes that may have been the last tokens of a prompt that found all others again, and
        tokens of requests that left while a batch had them."""
        self._left: set[int] = set()
        self._wrong: set[str] = set()
        """What differed once: later rows would say it again."""
        odd = any(tape.by_event[event] for event in ("layer", "lost", "migrated"))
        self._counts_prompts = not odd and all(seat.is_plain for seat in tape.seats)

    def judge(self, rows: Sequence[Row]) -> None:
        """`rows`: of timeseries.csv."""
        told: Counter[str] = Counter()
        records, at, before_ns = self._tape.records, 0, 0
        for row in rows:
            at_ns = int(row["time_ns"])
            while at < len(records) and records[at]["at_ns"] < at_ns:
                self._see(records[at])
                at += 1
            low = self._known.copy()
            while at < len(records) and records[at]["at_ns"] == at_ns:
                self._see(records[at])
                at += 1
            is_short = at_ns - before_ns <= _SHORT_NS
            names = _read(row, at_ns - before_ns, told)
            before_ns = at_ns
            for name in names if is_short or at == len(records) else ():
                self._compare(name, at_ns, told[name], low[name])
            if not is_short:
                told |= {name: self._known[name] for name in names}

    def _compare(self, name: str, at_ns: int, count: int, low: int) -> None:
        if name in self._wrong or (name == "prompt tokens" and not self._counts_prompts):
            return
        bounds = sorted((low, self._known[name]))
        if name == "prompt tokens":
            bounds[1] += self._unsure
        if name.startswith("flows"):  # parts of a transfer may have ended, or go as one
            is_sure = not self._tape.by_event["fault"]  # what stops is told of later
            bounds[0] = min(bounds[0], 1 if is_sure else 0)
        self._tape.count("series")
        if not bounds[0] <= count <= bounds[1]:
            self._wrong.add(name)
            self._tape.say(f"T4: timeseries.csv counts {count} {name} by {at_ns} ns, not {bounds}")

    def _see(self, record: Record) -> None:
        known, event = self._known, record["event"]
        if event == "tokens":
            self._reading.difference_update(record["rows"])
            for row in record["rows"]:
                self._got[row] += len(record["ends"])
                known["output tokens"] += len(record["ends"])
        elif event == "ended":
            known["completed"] += record["status"] == "completed"
            known["preemptions"] += self._preempted[record["row"]]
            if record["status"] != "completed":
                self._left.add(record["row"])
        elif event == "batch":
            self._begun.difference_update(record.get("preempted", ()))
            self._members[record["replica"], record["batch"]] = record["members"]
            rows = {member[0] for member in record["members"]}
            self._reading |= rows - self._begun
            self._begun |= rows
        elif event == "ran":
            batch = record["replica"], record["batch"]
            for row, had, new in self._members.pop(batch, ()):
                if row in self._left:
                    self._unsure += new
                    continue
                last = self._tape.arrived[row]["prompt"] + self._got[row] - 1
                is_decode = row not in self._reading and new == 1 and had == last
                known["prompt tokens"] += 0 if is_decode else new
                table = self._tape.seats[record["replica"]].scheduler
                may_hit = table.caches_prefixes and had % table.hit_tokens == 0
                self._unsure += bool(is_decode and may_hit)
        elif event == "transfer":
            kind, parts = record["kind"], len(record["parts"])
            self._flows[record["transfer"]] = kind, parts
            known[f"flows of {kind}"] += parts
            known[f"bytes of {kind}"] += record.get("overlapped_bytes", 0)
        elif event == "transfer_over" and record["transfer"] in self._flows:
            kind, parts = self._flows.pop(record["transfer"])
            known[f"flows of {kind}"] -= parts
            known[f"bytes of {kind}"] += record["moved_bytes"]


def _read(row: Row, span_ns: int, told: Counter[str]) -> list[str]:
    """Enter a row into what has been told so far; the names of all that it tells."""

    def count(column: str) -> int:
        return round(int(row[column]) * span_ns / 1e9)

    told["completed"] += int(row["completed"])
    told["preemptions"] += int(row["preemptions"])
    told["output tokens"] += count("decode_tokens_per_s")
    told["prompt tokens"] += count("prefill_tokens_per_s")
    names = ["completed", "preemptions", "output tokens", "prompt tokens"]
    for kind in _KINDS:
        told[f"flows of {kind}"] = int(row[f"flows_{kind}"])
        told[f"bytes of {kind}"] += count(f"{kind}_bytes_per_s")
        names += [f"flows of {kind}", f"bytes of {kind}"]
    return names


def judge_waits(tape: Tape, rows: Sequence[Row], summary: DocumentView) -> None:
    """Means of all that completed, and of the last quarter."""
    waits = [
        int(row["queue_ns"]) + int(row["migration_ns"] or 0)
        for row in rows
        if row["status"] == "completed"
    ]
    if not waits:
        return
    last = waits[-max(1, len(waits) // 4) :]
    for name, its in (("mean_wait_ms", waits), ("mean_wait_last_quarter_ms", last)):
        due = sum(its) / len(its) / 1e6
        tape.count("waits")
        if abs(summary["load"][name] - due) > _NEAR_MS + 1e-9 * due:
            tape.say(f"T4: {name} is {summary['load'][name]}, the rows say {due}")
