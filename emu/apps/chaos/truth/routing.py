"""Routing: in turn, or to the replica with the least to do.

Restates `[router]` of docs/reference/config.md for the policies that need no random numbers. The
loads are counted here, from what was queued, began, was preempted, ended and moved; what caches
hold says `remembered`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from emu.apps.chaos.truth.beside import Beside
from emu.apps.chaos.truth.tape import Record, Tape, keys_of
from emu.config.schema import (
    LeastOutstandingTable,
    LoadTable,
    LoraAffinityTable,
    PrefixAwareTable,
    RoundRobinTable,
    RouterTable,
)

_TAKES: Final = ("colocated", "prefill")
_WEIGHTS: Final = {LoadTable: (4, 1), LeastOutstandingTable: (1, 1)}
"""Of a request that waits, and of one that runs."""
Matched = Mapping[tuple[int, int], Mapping[int, int]]
"""By row and instant: tokens of its prompt that each replica had."""


class Routing:
    """All choices of the routers of one run."""

    def __init__(self, tape: Tape, matched: Matched, beside: Beside) -> None:
        self._tape = tape
        self._matched = matched
        self._beside = beside
        self._adapters: dict[int, frozenset[str]] = defaultdict(frozenset)
        """On the GPU of each replica."""
        self._states = {seat.replica: seat.role for seat in tape.seats}
        self._waiting: dict[int, set[int]] = defaultdict(set)
        self._running: dict[int, set[int]] = defaultdict(set)
        self._last: dict[str, int] = {}
        """The replica that came last in its turn, by model."""
        self._queued_rows: set[int] = set()
        self._turned_ns = -1
        """When a replica changed its state last."""
        self._delay_ns = round(tape.config.router.signal_delay_ms * 1e6)
        self._known: dict[int, list[tuple[int, int, int]]] = defaultdict(lambda: [(-1, 0, 0)])
        """By replica, since when so many requests waited and ran, where signals are late."""

    def judge(self) -> None:
        """Replay where requests were."""
        router = self._tape.config.router
        if type(router) not in (RoundRobinTable, PrefixAwareTable, LoraAffinityTable, *_WEIGHTS):
            return
        if self._delay_ns and (type(router) not in _WEIGHTS or self._tape.by_event["state"]):
            return
        handlers = {
            "state": self._state,
            "ended": self._ended,
            "lost": self._lost,
            "routed": self._lost,
            "migrated": self._migrated,
            "batch": self._batch,
            "tokens": self._tokens,
            "queued": self._queued,
        }
        for record in self._tape.records:
            handler = handlers.get(record["event"])
            if handler is not None:
                handler(record)
                if self._delay_ns:
                    self._note(record["at_ns"])

    def _note(self, at_ns: int) -> None:
        """What a late signal will say of this moment."""
        for seat in self._tape.seats:
            known, replica = self._known[seat.replica], seat.replica
            now = len(self._waiting[replica]), len(self._running[replica])
            if known[-1][1:] != now:
                known.append((at_ns, *now))

    def _load(self, replica: int, at_ns: int) -> tuple[int, int]:
        """Requests that wait and run there, as the router knows it."""
        if not self._delay_ns:
            return len(self._waiting[replica]), len(self._running[replica])
        known, until_ns = self._known[replica], at_ns - self._delay_ns
        at = bisect_right(known, until_ns, key=lambda one: one[0]) - 1
        return known[max(0, at)][1:]

    def _state(self, record: Record) -> None:
        replica = record["replica"]
        self._states[replica] = record["to"]
        self._turned_ns = record["at_ns"]
        if record["to"] in ("failed", "inactive"):
            self._waiting[replica].clear()
            self._running[replica].clear()
            self._adapters.pop(replica, None)

    def _ended(self, record: Record) -> None:
        if record["row"] not in self._queued_rows:
            self._last.clear()  # a replica that refuses a request has had its turn
        self._leave(record["row"])

    def _lost(self, record: Record) -> None:
        self._leave(record["row"])

    def _migrated(self, record: Record) -> None:
        for row in record["rows"]:
            self._leave(row)
            self._running[record["destination"]].add(row)

    def _leave(self, row: int) -> None:
        for its in (self._waiting, self._running):
            for rows in its.values():
                rows.discard(row)

    def _batch(self, record: Record) -> None:
        replica = record["replica"]
        for row, _, _ in record["members"]:
            self._waiting[replica].discard(row)
            self._running[replica].add(row)
        for row in record.get("preempted", ()):
            self._running[replica].discard(row)
            self._waiting[replica].add(row)
        self._adapters[replica] = self._beside.adapters_after(replica, record["batch"])

    def _tokens(self, record: Record) -> None:
        replica = record["replica"]
        if "prefill" in self._states[replica]:
            for row in record["rows"]:  # its prompt is done, and its KV waits to leave
                self._running[replica].discard(row)

    def _queued(self, record: Record) -> None:
        replica, row = record["replica"], record["row"]
        served = self._tape.seats[replica].served
        open_ = [
            seat.replica
            for seat in self._tape.seats
            if seat.served == served and self._states[seat.replica] in _TAKES
        ]
        policy = type(self._tape.config.router)
        where = f"row {row} goes to replica {replica} at {record['at_ns']} ns"
        if self._turned_ns == record["at_ns"] or replica not in open_:
            pass  # what took prompts at that moment is not told
        elif policy is RoundRobinTable and len(open_) > 1:
            last = self._last.get(served, -1)
            due = min((other for other in open_ if other > last), default=open_[0])
            self._tape.count("turns")
            if replica != due and served in self._last:
                self._tape.say(f"T5: {where}, it is the turn of {due}")
        elif policy in _WEIGHTS:
            self._least(policy, record, open_, where)
        elif policy is PrefixAwareTable:
            self._longest(record, open_, where)
        elif policy is LoraAffinityTable:
            self._nearest(record, open_, where)
        if len(open_) > 1:
            self._last[served] = replica
        self._leave(row)
        self._queued_rows.add(row)
        self._waiting[replica].add(row)

    def _least(
        self, policy: type[RouterTable], record: Record, open_: list[int], where: str
    ) -> None:
        each, runs = _WEIGHTS[policy]
        loads = {}
        for other in open_:
            waiting, running = self._load(other, record["at_ns"])
            loads[other] = each * waiting + runs * running
        best = min(open_, key=lambda other: (loads[other], other))
        if self._delay_ns:
            self._tape.count("late_signals")
        else:
            self._tape.count("least_loaded")
        if record["replica"] != best:
            self._tape.say(f"T5: {where}, {best} has the least to do: {loads}")

    def _longest(self, record: Record, open_: list[int], where: str) -> None:
        """Part of the prompt that is there, less the part of the largest load."""
        matched = self._matched.get((record["row"], record["at_ns"]))
        if matched is None:
            return
        loads = {r: 4 * len(self._waiting[r]) + len(self._running[r]) for r in open_}
        prompt, scale = self._tape.arrived[record["row"]]["prompt"], 1 + max(loads.values())
        score = {r: matched[r] / prompt - loads[r] / scale for r in open_}
        best = max(open_, key=lambda other: (score[other], -loads[other], -other))
        self._tape.count("longest_prefix")
        if record["replica"] != best:
            self._tape.say(f"T5: {where}, {best} is best: {matched} of {prompt}, loads {loads}")

    def _nearest(self, record: Record, open_: list[int], where: str) -> None:
        """The least loaded of the replicas with the adapter and a place gets it, else of all."""
        adapter = self._beside.adapter_of(self._tape.arrived[record["row"]]["request"])
        if adapter is None:
            return
        loads = {r: 4 * len(self._waiting[r]) + len(self._running[r]) for r in open_}
        fits = {
            r: bool(adapter)
            and adapter in self._adapters[r]
            and len(self._waiting[r]) + len(self._running[r])
            < (keys_of(self._tape.seats[r].scheduler).get("max_num_seqs") or 0)
            for r in open_
        }
        best = min(open_, key=lambda other: (not fits[other], loads[other], other))
        self._tape.count("nearest_adapter")
        if record["replica"] != best:
            self._tape.say(f"T5: {where}, {best} is best: {fits}, loads {loads}")
