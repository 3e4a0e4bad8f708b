"""Waves: iterations of a data-parallel group begin together.

Restates docs/lab/schedulers.md and `[[replicas]] data_parallel_group`: a wave leaves when every
member that serves has a batch, or keeps pace without one; nothing else holds it up.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape

_IN_WAVES: Final = (
    *("colocated", "prefill", "decode", "mutating_to_decode"),
    *("shutting_colocated", "shutting_prefill", "shutting_decode"),
)
_STOPS: Final = (
    *("pause", "freeze", "replica_crash", "replica_restart"),
    *("gpu_crash", "node_crash"),
)


class Waves:
    """All groups of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._ready: dict[int, int] = defaultdict(int)
        """When each member formed its batch, or ended the one before."""
        self._turned: dict[int, int] = {}
        """When each member changed its state last."""
        self._is_single = all(seat.stages == 1 for seat in tape.seats)

    def judge(self) -> None:
        """One wave after the other."""
        tape = self._tape
        groups: dict[str, list[int]] = defaultdict(list)
        for seat in tape.seats:
            if seat.group:
                groups[seat.group].append(seat.replica)
        # A member that stands still, or waits for KV from a lower tier, begins by itself.
        stops = any(record["kind"] in _STOPS for record in tape.by_event["fault"])
        if not groups or stops or tape.config.network.tiers:
            return
        group_of = {replica: name for name, its in groups.items() for replica in its}
        states = {seat.replica: seat.role for seat in tape.seats}
        open_: dict[str, list[Record]] = defaultdict(list)
        for record in tape.of("state", "batch", "began", "ran"):
            replica, at_ns = record["replica"], record["at_ns"]
            name = group_of.get(replica)
            if name is None:
                continue
            event = record["event"]
            if event == "began":
                wave = open_[name]
                if wave and (wave[0]["at_ns"] != at_ns or replica in _members(wave)):
                    self._wave(wave, [r for r in groups[name] if states[r] in _IN_WAVES])
                    wave.clear()
                if not wave:
                    self._leaves(at_ns, [r for r in groups[name] if states[r] in _IN_WAVES])
                wave.append(record)
                continue
            if event == "state":
                if open_[name]:
                    self._wave(open_.pop(name), [r for r in groups[name] if states[r] in _IN_WAVES])
                states[replica] = record["to"]
                self._turned[replica] = at_ns
            self._ready[replica] = at_ns
        for name, wave in open_.items():
            if wave:
                self._wave(wave, [r for r in groups[name] if states[r] in _IN_WAVES])

    def _leaves(self, at_ns: int, serving: list[int]) -> None:
        """Nothing but its last member holds a wave up."""
        due_ns = max((self._ready[replica] for replica in serving), default=at_ns)
        self._tape.count("wave_start")
        if self._is_single and due_ns != at_ns:
            self._tape.say(f"T2: a wave leaves at {at_ns} ns, should at {due_ns} ns")

    def _wave(self, wave: list[Record], serving: list[int]) -> None:
        """All that serve are in it."""
        at_ns, there = wave[0]["at_ns"], _members(wave)
        missing = [r for r in serving if r not in there and self._turned.get(r) != at_ns]
        self._tape.count("wave_members")
        if missing:
            self._tape.say(f"T2: a wave of {sorted(there)} leaves at {at_ns} ns without {missing}")


def _members(wave: list[Record]) -> set[int]:
    return {record["replica"] for record in wave}
