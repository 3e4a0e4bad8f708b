"""Refusals: an offer that every destination refuses is made again after a pause that doubles.

The first pause is 20 ms (`emu/migration/outbound.py`). What is refused then may be another offer,
whose pauses begin anew, if a request has ended, was lost or left meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape

_PAUSE_NS: Final = 10_000_000
_DOUBLINGS_MAX: Final = 10


def judge_refusals(tape: Tape) -> None:
    """All offers that were refused at the same replica, one after the other."""
    if tape.config.migration.rebalance or tape.config.migration.drain:
        return  # what moves while it decodes is refused, too
    refusals = _Refusals(tape)
    tape.replay(
        {
            "fault": refusals.fault,
            "state": refusals.state,
            "taken": refusals.taken,
            "lost": refusals.begin_anew,
            "ended": refusals.begin_anew,
        }
    )


class _Refusals:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._last_ns: dict[int, int] = {}
        self._times: dict[int, int] = defaultdict(int)
        """Refusals in a row of each replica's offers, and when the last one was."""

    def fault(self, record: Record) -> None:
        """A destination refuses; several may at once."""
        if record["kind"] != "destination_refuses":
            return
        source, at_ns = int(record["target"].partition(" -> ")[0]), record["at_ns"]
        last_ns = self._last_ns.get(source)
        if last_ns == at_ns:
            return
        if last_ns is not None:
            due_ns = last_ns + (_PAUSE_NS << min(max(1, self._times[source]), _DOUBLINGS_MAX))
            self._tape.count("refusals")
            if at_ns < due_ns:
                self._tape.say(
                    f"T3: replica {source} offers again at {at_ns} ns what was refused at "
                    f"{last_ns} ns, should not before {due_ns} ns"
                )
        self._last_ns[source] = at_ns
        self._times[source] += 1

    def taken(self, record: Record) -> None:
        """An offer was taken: at this instant none was refused."""
        self._last_ns.pop(record["source"], None)
        self._times.pop(record["source"], None)

    def state(self, record: Record) -> None:
        """Another life has nothing to offer."""
        self._last_ns.pop(record["replica"], None)
        self._times.pop(record["replica"], None)

    def begin_anew(self, record: Record) -> None:
        """What is offered next may be another one."""
        for source in self._times:
            self._times[source] = 0
