"""Admission: who is refused because too many requests are in the system.

Restates `router.max_outstanding` of docs/reference/config.md: beyond so many requests in the system
a new one is refused, and only then.
"""

from __future__ import annotations

from emu.apps.chaos.truth.tape import Record, Tape


class Doors:
    """All arrivals of a run, where admission follows them at once."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._inside = 0
        self._refused = {
            record["row"]: record["reason"]
            for record in tape.by_event["ended"]
            if record["status"] == "rejected"
        }
        self._dropped = {
            record["row"]
            for record in tape.by_event["ended"]
            if record["reason"] == "session_ended"
        }

    def judge(self) -> None:
        """Count who is inside at each arrival."""
        config = self._tape.config
        is_late = any(
            seat.latency.backend != "linear" or not seat.is_plain for seat in self._tape.seats
        )  # a front end, or what features put before admission
        if config.models or is_late:
            return
        self._tape.replay({"arrived": self._arrived, "ended": self._ended})

    def _ended(self, record: Record) -> None:
        self._inside -= 1

    def _arrived(self, record: Record) -> None:
        self._inside += 1
        row, limit = record["row"], self._tape.config.router.max_outstanding
        reason = self._refused.get(row, "")
        if row in self._dropped or reason not in ("", "overloaded"):
            return
        is_over = bool(limit) and self._inside > limit
        self._tape.count("overloaded")
        if is_over is not (reason == "overloaded"):
            self._tape.say(
                f"T5: row {row} is {'refused' if reason else 'let in'} at {record['at_ns']} ns "
                f"with {self._inside} requests in the system, the limit is {limit}"
            )
