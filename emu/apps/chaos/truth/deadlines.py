"""Deadlines: leases of KV, drains, and the trouble that a fault leaves behind.

Restates docs/faults.md (`[recovery]`): KV waits for its transfer no longer than its lease, a
replica that shuts down forms no batch after its grace, and once everything has healed and every
deadline has passed nothing is lost any more.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.tape import FOREVER_NS, Record, Tape, to_ns

_DRAINS: Final = ("shutting_prefill", "shutting_decode", "shutting_colocated")
_OWN: Final = ("lease_expired", "drain_expired")
"""Losses that `[recovery]` asks for, whatever the faults."""
_SLACK_NS: Final = 1_000_000_000


class Deadlines:
    """Leases, drains and the end of all trouble in one run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._kinds = {fault["kind"] for fault in tape.faults}

    def judge(self) -> None:
        """One after the other."""
        self._leases()
        self._drains()
        self._calm()

    def _leases(self) -> None:
        """KV is lost when its lease is over, and not before; what leaves has left by then."""
        tape = self._tape
        lease_ns = to_ns(tape.config.recovery.lease_ms / 1e3)
        if "lease_expired" in self._kinds:
            return
        last: dict[int, int] = {}
        queued: dict[int, int] = {}
        # A half waits from the moment at which the batch was handed over.
        halves = {
            member[0]
            for record in tape.by_event["batch"]
            if "first_layer" in record
            for member in record["members"]
        }
        for record in tape.of("tokens", "lost", "transfer", "migrated"):
            if record["event"] == "tokens":
                last |= dict.fromkeys(record["rows"], record["ends"][-1])
            elif record["event"] == "lost" and record["reason"] == "lease_expired":
                row, waited_ns = record["row"], record["at_ns"] - last[record["row"]]
                tape.count("lease")
                if not lease_ns or (waited_ns < lease_ns and row not in halves):
                    tape.say(f"T6: row {row} loses its lease after {waited_ns} ns")
        if not lease_ns or halves or self._kinds or tape.config.autoscale is not None:
            return
        begun: dict[tuple[int, int], list[int]] = defaultdict(list)
        for record in tape.of("tokens", "transfer", "migrated"):
            if record["event"] == "tokens":
                queued |= dict.fromkeys(record["rows"], record["ends"][-1])
            elif record["event"] == "transfer" and "source" in record and record["kind"] == "kv":
                begun[record["source"], record["destination"]].append(record["at_ns"])
            elif record["event"] == "migrated" and "kv_bytes" in record:
                since_ns = min(queued[row] for row in record["rows"])
                times = begun[record["source"], record["destination"]]
                tape.count("lease")
                if times and times[-1] - since_ns > lease_ns:
                    tape.say(f"T6: rows {record['rows']} leave after their lease")

    def _drains(self) -> None:
        """After its grace a replica that shuts down begins nothing more."""
        tape = self._tape
        grace_ns = to_ns(tape.config.recovery.drain_grace_s)
        if not grace_ns:
            return
        drains: dict[int, int] = {}
        for record in tape.of("state", "batch"):
            replica = record["replica"]
            if record["event"] == "state":
                drains.pop(replica, None)
                if record["to"] in _DRAINS:
                    drains[replica] = record["at_ns"]
                continue
            since_ns = drains.get(replica, FOREVER_NS)
            tape.count("drain_grace")
            if record["at_ns"] > since_ns + grace_ns:
                late_ns = record["at_ns"] - since_ns
                tape.say(f"T6: replica {replica} drains for {late_ns} ns, and forms a batch")

    def _calm(self) -> None:
        """After the last fault is over, and all deadlines with it, nothing is lost."""
        tape, table = self._tape, self._tape.config.recovery
        ends: list[int] = []
        for fault in tape.faults:
            lasts_s = fault.get("duration_s")
            is_lasting = lasts_s is None and fault["kind"] not in _AT_ONCE
            if is_lasting or fault.get("stage") is not None:
                return
            turns = 2 * fault.get("times", 1) if fault["kind"] == "link_down" else 1
            at_s = fault["at_s"] + (lasts_s or 0.0) * turns + (fault.get("after_s") or 0.0)
            ends.append(to_ns(at_s))
        if not ends or tape.config.autoscale is not None:
            return
        waits_s = table.restart_s + (table.load_deadline_s or 120.0) + table.drain_grace_s
        waits_ms = table.transfer_timeout_ms + table.lease_ms + table.progress_deadline_ms
        calm_ns = max(ends) + to_ns(waits_s + waits_ms / 1e3) + _SLACK_NS
        own: tuple[str, ...] = _OWN
        if not table.replace and any(seat.experts is not None for seat in tape.seats):
            # A member that was given up is never back, and the others wait for its experts: what
            # they hold is lost when nothing else happens.
            own = (*own, "replica_lost")
        for record in tape.by_event["lost"]:
            self._tape.count("calm")
            if record["at_ns"] > calm_ns and record["reason"] not in own:
                self._tell(record, calm_ns)

    def _tell(self, record: Record, calm_ns: int) -> None:
        self._tape.say(
            f"T6: row {record['row']} is lost ({record['reason']}) at {record['at_ns']} ns, all "
            f"is well since {calm_ns} ns"
        )


_AT_ONCE: Final = (
    *("host_cache_lost", "cxl_lost", "lease_expired", "client_leaves", "drain_expired"),
    *("replica_crash", "gpu_crash", "node_crash", "planner_restart", "swizzle"),
)
"""Kinds that need no duration: what they struck is lost at once."""
