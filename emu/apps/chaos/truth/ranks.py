"""Groups that share experts: what they do while a rank is gone.

Restates docs/lab/architectures.md ("A rank is lost"): nothing runs without an expert, losses are
detected, agreed on and made good in the configured times, and requests of survivors stay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape, to_ns

_UP: Final = ("colocated", "prefill", "decode")
"""States of a member that serves; groups are not scaled."""
_AT_A_STAND: Final = ("stalled", "fenced", "reloading", "joining")


class Ranks:
    """All groups of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._groups: dict[str, _Group] = {}
        self._of: dict[int, _Group] = {}
        members: dict[str, list[Seat]] = defaultdict(list)
        for seat in tape.seats:
            if seat.group and seat.experts is not None:
                members[seat.group].append(seat)
        for name, seats in members.items():
            group = self._groups[name] = _Group(tape, seats)
            self._of |= {seat.replica: group for seat in seats}
        self._place: dict[int, int] = {}
        """Row -> the replica that it is on."""

    def judge(self) -> None:
        """In the order of the run."""
        if self._groups:
            self._tape.replay(
                {
                    "state": self._state,
                    "noted": self._noted,
                    "fault": self._fault,
                    "began": self._began,
                    "queued": self._queued,
                    "lost": self._lost,
                }
            )

    def _state(self, record: Record) -> None:
        group = self._of.get(record["replica"])
        if group is not None:
            group.states[record["replica"]] = record["to"]

    def _noted(self, record: Record) -> None:
        group = self._groups.get(record["target"])
        if record["kind"] == "expert group" and group is not None:
            group.turn(record["at_ns"], record["text"])

    def _fault(self, record: Record) -> None:
        for group in self._groups.values():
            group.strikes.append(record["at_ns"])

    def _began(self, record: Record) -> None:
        group = self._of.get(record["replica"])
        if group is not None:
            group.began(record["at_ns"], record["replica"])

    def _queued(self, record: Record) -> None:
        self._place[record["row"]] = record["replica"]

    def _lost(self, record: Record) -> None:
        place = self._place.get(record["row"], -1)
        group = self._of.get(place)
        if group is None or record["reason"] != "replica_lost":
            return
        self._tape.count("rank_requests")
        if group.states[place] in _UP:
            self._tape.say(f"T7: row {record['row']} is lost on replica {place}, which serves")


class _Group:
    """One group, as its notes and states of its members say."""

    def __init__(self, tape: Tape, seats: list[Seat]) -> None:
        self._tape = tape
        self._seats = seats
        self.states = {seat.replica: seat.role for seat in seats}
        self.strikes: list[int] = []
        self._keys = tape.config.recovery
        self._state, self._since_ns = "serving", 0
        self._lost: frozenset[int] = frozenset()

    def began(self, at_ns: int, replica: int) -> None:
        """An iteration begins: the group does not wait, and no expert is missing."""
        tape = self._tape
        tape.count("rank_serves")
        if self._state in _AT_A_STAND:
            tape.say(f"T7: replica {replica} begins at {at_ns} ns, its group is {self._state}")
        spared = self._lost if self._state == "degraded" else frozenset()
        missed = [r for r, state in self.states.items() if state not in _UP and r not in spared]
        if missed:
            tape.say(f"T7: replica {replica} begins at {at_ns} ns without experts of {missed}")
        if replica in spared:
            tape.say(f"T7: replica {replica} begins at {at_ns} ns, which its group has lost")

    def turn(self, at_ns: int, text: str) -> None:
        """The group is in another state."""
        before, self._state = self._state, text.partition(",")[0]
        names = text.partition(", without ")[2]
        self._lost = frozenset(int(name) for name in names.split(", ") if name)
        took_ns, self._since_ns = at_ns - self._since_ns, at_ns
        if self._state == "fenced":
            self._detected(at_ns)
        elif before == "fenced" and self._state in ("reloading", "failed"):
            self._agreed(at_ns, took_ns)
        elif before == "reloading" and self._state in ("degraded", "joining"):
            self._reloaded(at_ns, took_ns)

    def _detected(self, at_ns: int) -> None:
        """So long after a loss, or at once where a member was given up."""
        self._tape.count("rank_times")
        deadline_ns = to_ns(self._keys.progress_deadline_ms / 1e3)
        known = {s + wait for s in self.strikes for wait in (0, deadline_ns)}
        known |= {strike + to_ns(self._keys.ep_detect_s) for strike in self.strikes}
        if at_ns not in known:
            self._tape.say(f"T7: a loss is detected at {at_ns} ns, should be at one of {known}")

    def _agreed(self, at_ns: int, took_ns: int) -> None:
        """Survivors agree for so long; they go on if they can."""
        self._tape.count("rank_times")
        if took_ns != to_ns(self._keys.ep_agree_s):
            self._tape.say(f"T7: survivors agree at {at_ns} ns, after {took_ns} ns")
        self._tape.count("rank_room")
        can = self._has_room() and (not self._missing() or self._keys.expert_backup != "none")
        if can != (self._state == "reloading"):
            lost = sorted(self._lost)
            self._tape.say(f"T7: without {lost} the group is {self._state} at {at_ns} ns")

    def _reloaded(self, at_ns: int, took_ns: int) -> None:
        """Each survivor reads its part of what has no copy."""
        seat = self._seats[0]
        assert seat.experts is not None
        self._tape.count("rank_times")
        if not seat.experts.expert_bytes:
            return
        survivors = seat.experts.ranks - len(self._gone())
        rate = dict(seat.experts.bytes_per_s).get(self._keys.expert_backup, math.inf)
        due_s = self._missing() * seat.experts.expert_bytes / survivors / rate
        if abs(took_ns - max(1, due_s * 1e9)) > 1:
            self._tape.say(f"T7: experts are read until {at_ns} ns, for {took_ns} ns, not {due_s}")

    def _gone(self) -> frozenset[int]:
        """Ranks of the members that are lost."""
        experts = self._seats[0].experts
        assert experts is not None
        each = experts.ranks // len(self._seats)
        return frozenset(
            place * each + rank
            for place, seat in enumerate(self._seats)
            if seat.replica in self._lost
            for rank in range(each)
        )

    def _has_room(self) -> bool:
        experts = self._seats[0].experts
        assert experts is not None
        left = experts.ranks - len(self._gone())
        return left * experts.slots >= experts.ranks * experts.slots - experts.redundant

    def _missing(self) -> float:
        """Experts of a layer that no survivor has, the mean of the layers."""
        experts, gone = self._seats[0].experts, self._gone()
        assert experts is not None
        each = []
        for ranks in experts.placed:
            there = {one for rank, own in enumerate(ranks) if rank not in gone for one in own}
            each.append(len({one for own in ranks for one in own} - there))
        return sum(each) / len(each) if each else 0.0
