"""Where the weights of a new replica come from.

Restates docs/autoscale.md (host copies).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.recovery import LOADING
from emu.apps.chaos.truth.tape import Record, Tape, to_ns
from emu.config.schema import CarriedTable

_WITHOUT: Final = ("inactive", "failed")


def judge_host_copies(tape: Tape) -> None:
    """Weights come from a machine's memory while it has them, and from its disk after that."""
    table = tape.config.autoscale
    if table is None or table.loader != "cache" or table.faithful or tape.config.models:
        return
    stays = isinstance(table, CarriedTable) and table.multicast == "none"
    if not (table.loads_alone or stays):
        return
    lost = ("host_cache_lost", "host_cache_stale", "node_crash")
    if table.host_cache_gib or any(fault.kind in lost for fault in tape.config.faults):
        return
    ttl_ns = to_ns(table.host_cache_ttl_s)
    users: dict[int, set[int]] = defaultdict(set)
    touched: dict[int, int] = {}
    for seat in tape.seats:
        if seat.role != "inactive":
            users[seat.machine].add(seat.replica)
            touched[seat.machine] = 0
    ordered: dict[int, tuple[int, bool, bool]] = {}
    for record in tape.of("state", "transfer", "noted"):
        at_ns = record["at_ns"]
        if record["event"] == "state":
            seat = tape.seats[record["replica"]]
            if record["to"] in _WITHOUT:
                if seat.replica in users[seat.machine]:
                    users[seat.machine].discard(seat.replica)
                    touched[seat.machine] = at_ns
            elif record["from"] == "inactive" and record["to"] in LOADING:
                since_ns = touched.get(seat.machine, -1 - ttl_ns)
                holds = bool(users[seat.machine]) or at_ns - since_ns < ttl_ns
                is_edge = since_ns == at_ns
                if record["writer"] == "planner":
                    ordered[seat.replica] = (at_ns, holds, is_edge)
        elif record["event"] == "noted":
            if record["kind"] == "loaded":
                seat = tape.seats[int(record["target"].split()[-1])]
                users[seat.machine].add(seat.replica)
                touched[seat.machine] = at_ns
        elif record["kind"] == "weights" and record.get("source") == -1:
            _source(tape, record, ordered)


def _source(tape: Tape, record: Record, ordered: dict[int, tuple[int, bool, bool]]) -> None:
    found = ordered.pop(record["destination"], None)
    if found is None:
        return
    at_ns, holds, is_edge = found
    link = record["parts"][0][0][0]
    is_disk = ".ssd." in link
    tape.count("host_copy")
    if is_disk == holds and not is_edge:
        where = "the disk" if is_disk else "memory"
        tape.say(
            f"T6: replica {record['destination']} loads from {where} after {at_ns} ns, its "
            f"machine {'has' if holds else 'does not have'} the weights"
        )
