"""An independent judge: reads the history of a run, knows nothing of the emulator.

Checks I2 (one terminal event, nothing after it), I3 (tokens), I5 (tokens come from where the KV
is), I7 (states follow each other), I9 (time), I14 (what planners decide: `plan_watch`) and I17 (the
written results agree with the history).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.chaos.plan_watch import PlanWatch
from emu.apps.chaos.truth.figures import quantile
from emu.config.schema import AutoscaleTable
from emu.documents import DocumentView

MAX_PROBLEMS: Final = 20
_ASCENDING: Final = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
_ROUNDING_MS: Final = 2e-6
"""Results have six decimals of a millisecond."""


class Life(msgspec.Struct):
    """What the history says of one request (one row)."""

    row: int
    arrived_ns: int
    output: int
    """Output tokens that it is to get."""
    ends: list[int] = msgspec.field(default_factory=list)
    """When each token came."""
    places: list[int] = msgspec.field(default_factory=list)
    """Replicas that may produce its next token; empty = any."""
    status: str = ""
    reason: str = ""
    ended_ns: int = -1
    first_out_ns: int = 0
    """How much later than the engine its client had the first token."""
    last_out_ns: int = 0


class Judge:
    """Replays a history."""

    def __init__(
        self, scaling: Mapping[str, AutoscaleTable] | None = None, step_tokens: int = 1
    ) -> None:
        """`scaling`: the bounds that plans must keep, by planner ("": the only one). `step_tokens`:
        most tokens of a request that one step may bring (drafts), in one record."""
        self._step_tokens = step_tokens
        self._plans = {name: PlanWatch(table) for name, table in (scaling or {}).items()}
        self.lives: dict[int, Life] = {}
        self.problems: list[str] = []
        self.states: dict[int, str] = {}
        self.paused: dict[str, int] = {}
        """Replicas that stand still, and since when."""
        self._now_ns = 0

    def say(self, problem: str) -> None:
        """Something is wrong (the first ones are enough)."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def read(self, records: Iterable[DocumentView]) -> None:
        """All records, in the order in which they were written."""
        handlers = {
            "arrived": self._arrived,
            "tokens": self._tokens,
            "migrated": self._migrated,
            "lost": self._lost,
            "routed": self._lost,
            "state": self._state,
            "fault": self._fault,
            "fault_over": self._fault_over,
            "plan": self._plan,
            "ended": self._ended,
        }
        for record in records:
            at_ns = record["at_ns"]
            if record["event"] != "tokens":  # those may be told at the end of a leap
                if at_ns < self._now_ns:
                    self.say(f"I9: time goes back at {at_ns} ns: {dict(record)}")
                self._now_ns = at_ns
            handler = handlers.get(record["event"])
            if handler is not None:
                handler(at_ns, record)

    def _arrived(self, at_ns: int, record: DocumentView) -> None:
        row = record["row"]
        if row in self.lives:
            self.say(f"I1: row {row} arrives twice")
        self.lives[row] = Life(row, at_ns, record["output"])

    def _life(self, row: int, what: str) -> Life | None:
        life = self.lives.get(row)
        if life is None:
            self.say(f"I1: {what} of row {row}, which never arrived")
        elif life.status:
            self.say(f"I2: {what} of row {row} after its end ({life.status})")
        else:
            return life
        return None

    def _tokens(self, at_ns: int, record: DocumentView) -> None:
        replica, ends = record["replica"], record["ends"]
        if self.states.get(replica) in ("failed", "inactive"):
            self.say(f"I5: replica {replica} is {self.states[replica]} and produces tokens")
        since_ns = self.paused.get(f"replica {replica}", ends[-1])
        if ends[-1] > since_ns:
            self.say(f"I5: replica {replica} stands still since {since_ns} and produces tokens")
        counts: dict[int, int] = {}
        for row in record["rows"]:
            life = self._life(row, "a token")
            if life is None:
                continue
            last_ns = life.ends[-1] if life.ends else life.arrived_ns
            counts[row] = count = counts.get(row, 0) + 1
            if count > self._step_tokens:
                self.say(f"I3: row {row}: {count} tokens at {ends[0]} ns")
            if ends[0] < last_ns or (life.ends and ends[0] == last_ns and count == 1):
                self.say(f"I9: row {row}: token at {ends[0]} ns after one at {last_ns} ns")
            if life.places and replica not in life.places:
                self.say(f"I5: row {row}: token from {replica}, its KV is at {life.places}")
            life.ends += ends
            life.places = [replica]

    def _migrated(self, at_ns: int, record: DocumentView) -> None:
        for row in record["rows"]:
            life = self.lives.get(row)
            if life is not None and not life.status and life.places:
                life.places = [*life.places, record["destination"]]

    def _lost(self, at_ns: int, record: DocumentView) -> None:
        life = self._life(record["row"], "a loss")
        if life is not None:
            life.places = []

    def _state(self, at_ns: int, record: DocumentView) -> None:
        replica = record["replica"]
        before = self.states.get(replica)
        if before is not None and before != record["from"]:
            self.say(f"I7: replica {replica} was {before}, leaves {record['from']}")
        self.states[replica] = record["to"]
        if record["to"] == "failed":
            self.paused.pop(f"replica {replica}", None)
            for life in self.lives.values():
                if replica in life.places and not life.status:
                    life.places = [place for place in life.places if place != replica]

    def _fault(self, at_ns: int, record: DocumentView) -> None:
        if record["kind"] in ("pause", "freeze"):
            self.paused[record["target"]] = at_ns
        for plans in self._plans.values():
            plans.fault(record["kind"], is_over=False)

    def _fault_over(self, at_ns: int, record: DocumentView) -> None:
        if record["kind"] in ("pause", "freeze"):
            self.paused.pop(record["target"], None)
        for plans in self._plans.values():
            plans.fault(record["kind"], is_over=True)

    def _plan(self, at_ns: int, record: DocumentView) -> None:
        plans = self._plans.get(record["target"])
        if plans is not None:
            for problem in plans.judge(at_ns, record["text"], self.states):
                self.say(problem)

    def _ended(self, at_ns: int, record: DocumentView) -> None:
        life = self._life(record["row"], "an end")
        if life is None:
            return
        life.status, life.reason, life.ended_ns = record["status"], record["reason"], at_ns
        life.first_out_ns, life.last_out_ns = record["first_out"], record["last_out"]
        tokens = len(life.ends)
        if life.status == "completed" and tokens != life.output:
            self.say(f"I3: row {life.row} completed with {tokens} of {life.output} tokens")
        if tokens > life.output:
            self.say(f"I3: row {life.row} got {tokens} tokens of {life.output}")
        if life.ends and life.ends[-1] > at_ns:
            self.say(f"I9: row {life.row} ends at {at_ns} ns before its last token")

    def end(self) -> None:
        """The history is over: everything that arrived must have ended."""
        for life in self.lives.values():
            if not life.status:
                self.say(f"I2: row {life.row} never ended")

    def compare(self, requests_csv: Path) -> None:
        """I17: the results say the same."""
        with requests_csv.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if len(rows) != len(self.lives):
            self.say(f"I17: {len(self.lives)} requests arrived, requests.csv has {len(rows)}")
            return
        for index, row in enumerate(rows):
            life = self.lives.get(index)
            if life is None:
                self.say(f"I17: row {index} never arrived")
                continue
            tokens = len(life.ends)
            said = {
                "arrival_ns": life.arrived_ns,
                "decode_toks": tokens,
                "status": life.status,
                "reason": life.reason,
            }
            if tokens:
                first_ns = life.ends[0] + life.first_out_ns
                last_ns = life.ends[-1] + life.last_out_ns
                gaps = [b - a for a, b in zip(life.ends, life.ends[1:], strict=False)]
                said |= {
                    "first_token_ns": first_ns,
                    "last_token_ns": last_ns,
                    "ttft_ns": first_ns - life.arrived_ns,
                    "latency_ns": last_ns - life.arrived_ns,
                    "tpot_ns": (last_ns - first_ns) // (tokens - 1) if tokens > 1 else 0,
                    "max_gap_ns": max(gaps, default=0),
                }
            for name, value in said.items():
                if row[name] != str(value):
                    self.say(f"I17: row {index}: {name} is {row[name]}, the history says {value}")

    def compare_summary(self, summary: DocumentView) -> None:
        """I17: the figures are in order, and those of requests follow from the history."""
        done = [life for life in self.lives.values() if life.status == "completed"]
        for status in ("completed", "failed", "rejected", "cancelled"):
            count = sum(life.status == status for life in self.lives.values())
            if summary[status] != count:
                self.say(f"I17: {summary[status]} {status}, the history says {count}")
        for metric in ("ttft", "tpot", "itl", "e2el"):
            said = [summary[f"{part}_{metric}_ms"] for part in _ASCENDING]
            if sorted(said) != said or summary[f"mean_{metric}_ms"] > said[-1]:
                self.say(f"I17: {metric} is not in order: {said}")
        of_requests = {
            "ttft": [life.ends[0] + life.first_out_ns - life.arrived_ns for life in done],
            "e2el": [life.ends[-1] + life.last_out_ns - life.arrived_ns for life in done],
        }
        for metric, values_ns in of_requests.items():
            for part, share in _ASCENDING.items():
                is_ms, told_ms = summary[f"{part}_{metric}_ms"], quantile(values_ns, share) / 1e6
                if abs(is_ms - told_ms) > _ROUNDING_MS:
                    self.say(f"I17: {part} {metric} is {is_ms} ms, the history says {told_ms}")
        for part in ("mean", *_ASCENDING):
            if summary[f"{part}_ttft_ms"] > summary[f"{part}_e2el_ms"]:
                self.say(f"I17: {part} TTFT is above the latency")
