"""How the cluster stood: each replica at the sampling instants, and what files list.

Restates docs/reference/outputs.md for `timeseries.csv`, `replicas.csv`, `transitions.csv` and
`marks.csv`. Requests that wait and run, and blocks in use, are counted here from what was queued,
formed, made and ended. What else happens at a sampling instant may be told before it or after: any
value that held within it is right. A replica is followed until something happens to it that these
events do not tell whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape
from emu.config.schema import (
    FcfsTable,
    LightLlmTable,
    OrcaTable,
    SarathiTable,
    VllmTable,
    VllmV0Table,
)

Row = Mapping[str, str]
_GAUGES: Final = ("running", "waiting", "used_blocks")
_WHOLE_PROMPT: Final = (SarathiTable, VllmV0Table, LightLlmTable)
"""Policies that take the blocks of a whole prompt when they admit it."""
_ALL: Final = (OrcaTable,)
"""Policies that take as many tokens for each request."""
_OUT: Final = ("failed", "inactive")


class Desk(msgspec.Struct):
    """What one replica has."""

    waiting: dict[int, None] = {}
    running: dict[int, int] = {}
    """Tokens that each row holds blocks for."""
    leaving: dict[int, int] = {}
    """Rows that ended with the last batch of an engine that works ahead."""


class Standing:
    """All replicas of a run, instant by instant."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._got: dict[int, int] = defaultdict(int)
        self._desks = {seat.replica: Desk() for seat in tape.seats if _is_followed(tape, seat)}
        self._states = {seat.replica: seat.role for seat in tape.seats}
        self._place: dict[int, int] = {}
        """The replica of each row that is followed."""
        self._handlers: dict[str, Callable[[Record], None]] = {
            "queued": self._queued,
            "batch": self._batch,
            "tokens": self._tokens,
            "ended": self._gone,
            "lost": self._gone,
            "routed": self._gone,
            "migrated": self._migrated,
            "state": self._state,
        }

    def judge(self, series: Sequence[Row], rows: Sequence[Row]) -> None:
        """`rows`: of replicas.csv, each where a replica differs from its last one."""
        records, at = self._tape.records, 0
        told: dict[int, Row] = {}
        later = iter(rows)
        row = next(later, None)
        for sample in series:
            at_ns = int(sample["time_ns"])
            while at < len(records) and records[at]["at_ns"] < at_ns:
                self._see(records[at])
                at += 1
            seen = [self._now()]
            while at < len(records) and records[at]["at_ns"] == at_ns:
                self._see(records[at])
                seen.append(self._now())
                at += 1
            while row is not None and int(row["time_ns"]) <= at_ns:
                told[int(row["replica"])] = row
                row = next(later, None)
            said = len(self._tape.problems)
            self._compare(at_ns, told, seen)
            self._add_up(sample, told)
            if len(self._tape.problems) > said:
                return  # later rows would say it again
        if row is not None:
            self._tape.say(f"T4: replicas.csv has a row at {row['time_ns']} ns, no sample has")

    def _see(self, record: Record) -> None:
        handler = self._handlers.get(record["event"])
        if handler is not None:
            handler(record)

    def _now(self) -> dict[int, tuple[str, dict[str, tuple[int, int]]]]:
        """The state of each replica, and the bounds of its gauges."""
        now = {}
        for replica, state in self._states.items():
            desk, bounds = self._desks.get(replica), dict[str, tuple[int, int]]()
            if desk is not None:
                running, leaving = len(desk.running), len(desk.leaving)
                bounds["running"] = running, running + leaving
                bounds["waiting"] = len(desk.waiting), len(desk.waiting)
                blocks = self._blocks(self._tape.seats[replica])
                if blocks is not None:
                    used = sum(map(blocks, desk.running.values()))
                    bounds["used_blocks"] = used, used + sum(map(blocks, desk.leaving.values()))
            now[replica] = state, bounds
        return now

    def _compare(
        self,
        at_ns: int,
        told: Mapping[int, Row],
        seen: Sequence[Mapping[int, tuple[str, Mapping[str, tuple[int, int]]]]],
    ) -> None:
        """Each replica's row says what held at some moment of the instant."""
        for replica, row in told.items():
            where = f"T4: replicas.csv says of replica {replica} at {at_ns} ns"
            self._tape.count("standing")
            if all(now[replica][0] != row["state"] for now in seen):
                self._tape.say(f"{where} that it is {row['state']}, not {seen[-1][replica][0]}")
            for name in _GAUGES:
                bounds = [now[replica][1][name] for now in seen if name in now[replica][1]]
                if len(bounds) < len(seen):
                    continue
                low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
                self._tape.count("standing")
                if not low <= int(row[name]) <= high:
                    self._tape.say(f"{where} {name} {row[name]}, should be {low} to {high}")

    def _add_up(self, sample: Row, told: Mapping[int, Row]) -> None:
        """The row of the cluster is the sum of those of its replicas."""
        rows = [row for row in told.values() if self._tape.seats[int(row["replica"])]]
        self._tape.count("standing")
        for name in ("running", "used_blocks", "total_blocks"):
            whole = sum(int(row[name]) for row in rows)
            if whole != int(sample[name]):
                at_ns = sample["time_ns"]
                self._tape.say(
                    f"T4: timeseries.csv has {name} {sample[name]} at {at_ns} ns, replicas {whole}"
                )
        for column, count in sample.items():
            if column.startswith("replicas_"):
                state = column.removeprefix("replicas_")
                its = sum(row["state"] == state for row in rows)
                if its != int(count) and len(rows) == len(self._tape.seats):
                    self._tape.say(f"T4: {count} replicas are {state}, {its} of them say so")

    def _blocks(self, seat: Seat) -> Callable[[int], int] | None:
        """Blocks of a row that holds so many tokens; None where this is not restated."""
        table = seat.scheduler
        if table.caches_prefixes or not seat.is_plain or seat.is_hybrid:
            return None
        if isinstance(table, _ALL):
            each = table.max_tokens // table.block_size
            return lambda tokens: each
        if isinstance(table, (VllmTable, FcfsTable, *_WHOLE_PROMPT)):
            size = table.block_size
            return lambda tokens: -(-tokens // size)
        return None

    # What happens.
    def _drop(self, replica: int) -> None:
        self._desks.pop(replica, None)

    def _leave(self, row: int) -> None:
        desk = self._desks.get(self._place.pop(row, -1))
        if desk is not None:
            desk.waiting.pop(row, None)
            desk.running.pop(row, None)

    def _queued(self, record: Record) -> None:
        row, replica = record["row"], record["replica"]
        self._leave(row)
        desk = self._desks.get(replica)
        if desk is not None:
            desk.waiting[row] = None
            self._place[row] = replica

    def _gone(self, record: Record) -> None:
        self._leave(record["row"])

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            self._leave(row)
        self._drop(record["source"])
        self._drop(record["destination"])

    def _state(self, record: Record) -> None:
        replica = record["replica"]
        self._states[replica] = record["to"]
        if record["to"] not in _OUT or record["from"] not in _OUT:
            self._drop(replica)

    def _tokens(self, record: Record) -> None:
        desk = self._desks.get(record["replica"])
        for row in self._tape.completed(record, self._got):
            if desk is not None and row in desk.running:
                held = desk.running.pop(row)
                if self._tape.seats[record["replica"]].is_ahead:
                    desk.leaving[row] = held

    def _batch(self, record: Record) -> None:
        replica = record["replica"]
        desk, seat = self._desks.get(replica), self._tape.seats[replica]
        if desk is None:
            return
        if "first_layer" in record or "recalls" in record:
            self._drop(replica)
            return
        desk.leaving.clear()
        for row in record.get("preempted", ()):
            desk.running.pop(row, None)
            desk.waiting[row] = None
        for row, before, new in record["members"]:
            arrived = self._tape.arrived[row]
            held = before + new
            if isinstance(seat.scheduler, _WHOLE_PROMPT):
                held = max(held, arrived["prompt"] + (0 if row in desk.running else self._got[row]))
                held = max(held, desk.running.get(row, 0))
            elif isinstance(seat.scheduler, FcfsTable):
                held = arrived["prompt"] + arrived["output"]
            desk.waiting.pop(row, None)
            desk.running[row] = held


def _is_followed(tape: Tape, seat: Seat) -> bool:
    """Replicas whose rows come, run and end there, whatever else the cluster does."""
    shrinks = any(fault["kind"] == "kv_shrink" for fault in tape.faults)
    moves = tape.config.migration.rebalance or tape.config.migration.drain
    return seat.role == "colocated" and not shrinks and not moves


def judge_lists(tape: Tape, transitions: Sequence[Row], marks: Sequence[Row]) -> None:
    """transitions.csv and marks.csv list what happened, in order."""
    tape.count("lists")
    changed = [
        (row["time_ns"], row["replica"], row["from"], row["to"], row["writer"])
        for row in transitions
        if row["from"]
    ]
    due = [
        (str(r["at_ns"]), str(r["replica"]), r["from"], r["to"], r["writer"])
        for r in tape.by_event["state"]
    ]
    _compare_lists(tape, "transitions.csv", changed, due)
    first = {int(row["replica"]): row["to"] for row in transitions if not row["from"]}
    for seat in tape.seats:
        if first.get(seat.replica) != seat.role:
            tape.say(
                f"T4: transitions.csv begins replica {seat.replica} as {first.get(seat.replica)}"
            )
    told = [(row["time_ns"], row["kind"], row["target"], row["text"]) for row in marks]
    kinds = {"fault": "fault", "fault_over": "fault over", "plan": "plan"}
    wanted: list[tuple[str, ...]] = []
    for record in tape.of("noted", "plan", "fault", "fault_over"):
        kind = kinds.get(record["event"]) or str(record["kind"])
        text = str(record.get("text", record.get("kind", "")))
        if record["event"] == "fault":
            text = f"{record['kind']} ({record['figures']})"
        wanted.append((str(record["at_ns"]), kind, str(record["target"]), text))
    told = [one for one in told if one[1] not in _ELSEWHERE]
    _compare_lists(tape, "marks.csv", told, wanted)


_ELSEWHERE: Final = ("relay", "host_cache")
"""Marks that no record tells."""


def _compare_lists(
    tape: Tape, name: str, told: Sequence[tuple[str, ...]], due: Sequence[tuple[str, ...]]
) -> None:
    for one, other in zip(told, due, strict=False):
        if one != other:
            tape.say(f"T4: {name} has {one}, the history {other}")
            return
    if len(told) != len(due):
        tape.say(f"T4: {name} has {len(told)} lines, the history {len(due)}")
