"""Helpers: replicas that ask for work get it in the order in which they asked.

Restates docs/explained/live-scaling.md: a batch that a replica hands over while its weights arrive
is formed at its helper at once. A helper asks when it has become one, and when it has run what it
was given. Judged where every replica has room for all requests of the run.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape

_STOPS: Final = ("pause", "freeze")


def judge_helpers(tape: Tape) -> None:
    """All batches that were handed over, one after the other."""
    tokens = sum(record["prompt"] + record["output"] for record in tape.by_event["arrived"])
    is_sure = all(seat.blocks * seat.page_tokens > 2 * tokens for seat in tape.seats)
    if is_sure and not any(fault["kind"] in _STOPS for fault in tape.faults):
        helpers = _Helpers(tape)
        tape.replay({"state": helpers.state, "batch": helpers.batch, "ran": helpers.ran})


class _Helpers:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._helping: set[int] = set()
        self._busy: set[int] = set()
        """Replicas that run what they had begun before, or what they were given."""
        self._asked_ns: dict[int, int] = {}

    def state(self, record: Record) -> None:
        """A replica is a helper from now on, or no more."""
        replica = record["replica"]
        self._asked_ns.pop(replica, None)
        self._helping.discard(replica)
        if record["to"] == "old_prefill":
            self._helping.add(replica)
            self._ask(record)

    def ran(self, record: Record) -> None:
        """A helper has run what it had, and asks."""
        self._busy.discard(record["replica"])
        self._ask(record)

    def _ask(self, record: Record) -> None:
        replica = record["replica"]
        if replica in self._helping and replica not in self._busy:
            self._asked_ns[replica] = record["at_ns"]

    def batch(self, record: Record) -> None:
        """A helper gets a batch; no other one has asked before it."""
        replica, at_ns = record["replica"], record["at_ns"]
        self._busy.add(replica)
        mine_ns = self._asked_ns.pop(replica, None)
        if mine_ns is None:
            return
        served = self._tape.seats[replica].served
        before = [
            other
            for other, since_ns in self._asked_ns.items()
            if since_ns < mine_ns and self._tape.seats[other].served == served
        ]
        self._tape.count("helpers")
        if before:
            self._tape.say(
                f"T6: replica {replica} gets a batch at {at_ns} ns, {before} have asked before it"
            )
