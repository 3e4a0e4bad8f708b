"""Handover: which decode replica gets the KV of prompts that have ended.

Restates `router.decode_policy` of docs/reference/config.md: of the open replicas with room the
one with the lowest id (`first_free`), or with the fewest blocks in use (`least_used`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape
from emu.config.schema import SarathiTable, VllmTable, VllmV0Table

_GROWS: Final = (VllmTable, SarathiTable, VllmV0Table)
"""Policies that reserve what there is; the others reserve what there may be."""


class Handover:
    """All destinations that were taken in a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._got: dict[int, int] = defaultdict(int)

    def judge(self) -> None:
        """One after the other."""
        tape = self._tape
        policy = tape.config.router.decode_policy
        if policy == "auto":
            policy = "least_used" if tape.config.autoscale is None else "first_free"
        # Destinations that failed are tried last, those that refuse are passed over.
        failed = any(
            record["how"] not in ("arrived", "stopped") for record in tape.by_event["transfer_over"]
        )
        refused = any(fault.kind == "destination_refuses" for fault in tape.config.faults)
        other = any(seat.is_hybrid or not isinstance(seat.scheduler, _GROWS) for seat in tape.seats)
        if policy not in ("first_free", "least_used") or failed or refused or other:
            return
        for record in tape.of("tokens", "taken"):
            if record["event"] == "taken":
                self._taken(record, policy)
                continue
            for row in record["rows"]:
                self._got[row] += len(record["ends"])

    def _taken(self, record: Record, policy: str) -> None:
        tape, destination = self._tape, record["destination"]
        if "pinned" in record:
            return  # an outside router has named it
        roomy: list[tuple[int, int]] = []
        for replica, used, blocks in record["uses"]:
            block = tape.seats[replica].scheduler.block_size
            reached = [
                tape.arrived[row]["prompt"] + max(1, self._got[row]) for row in record["rows"]
            ]
            if sum(-(-tokens // block) for tokens in reached) <= blocks - used:
                roomy.append((0 if policy == "first_free" else used, replica))
        due = min(roomy, default=(0, -1))[1]
        tape.count("handover")
        if destination != due:
            tape.say(
                f"T5: rows {record['rows']} go from replica {record['source']} to {destination} at "
                f"{record['at_ns']} ns, should to {due} ({policy}): {record['uses']}"
            )
