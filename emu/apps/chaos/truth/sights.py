"""What planners see late, and which pod of a pool goes.

Restates docs/autoscale.md: metrics that take so long are those of the newest sample that is old
enough, where samples are taken when the planner looks, and no closer than a 64th of the delay; the
pod autoscaler shuts the replicas with the fewest requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape
from emu.config.schema import HpaTable

_BLIND: Final = ("metrics_delayed", "metrics_frozen", "metrics_lost", "planner_restart")
_STEPS: Final = 64


def judge_sights(tape: Tape) -> None:
    """All looks of the one planner of a run."""
    table = tape.config.autoscale
    if table is None or table.is_static or tape.config.models:
        return
    if any(fault["kind"] in _BLIND for fault in tape.faults):
        return
    looks = tape.by_event["look"]
    if table.metrics_delay_ms:
        _late(tape, looks, round(table.metrics_delay_ms * 1e6))
    elif isinstance(table, HpaTable):
        _shut(tape, looks)


def _late(tape: Tape, looks: Sequence[Record], delay_ns: int) -> None:
    """What is seen of the requests in the system was so at a sample that is old enough."""
    changes = [(record["at_ns"], 1) for record in tape.by_event["arrived"]]
    changes += [(record["at_ns"], -1) for record in tape.by_event["ended"]]
    changes.sort()
    times_ns, counts = [at_ns for at_ns, _ in changes], [0]
    for _, change in changes:
        counts.append(counts[-1] + change)
    seen_ns = [look["at_ns"] for look in looks]
    for look in looks:
        newest = bisect_right(seen_ns, look["at_ns"] - delay_ns) - 1
        since_ns = seen_ns[max(0, newest - 1)] - delay_ns // _STEPS - 1
        until_ns = max(seen_ns[0], look["at_ns"] - delay_ns)
        first, last = bisect_right(times_ns, since_ns - 1), bisect_right(times_ns, until_ns)
        were = counts[first : last + 1]
        tape.count("late_metrics")
        if not min(were) <= look["outstanding"] <= max(were):
            tape.say(
                f"T6: a planner whose metrics are {delay_ns} ns late sees {look['outstanding']} "
                f"requests at {look['at_ns']} ns, were {were}"
            )


def _shut(tape: Tape, looks: Sequence[Record]) -> None:
    """No pod shuts that has more requests than one that stays."""
    there: dict[int, set[int]] = defaultdict(set)
    moved_ns: dict[int, int] = {}
    for record in tape.of("queued", "ended", "lost", "routed", "migrated", "look"):
        if record["event"] != "look":
            for row in record.get("rows", (record.get("row"),)):
                for replica, rows in there.items():
                    if row in rows:
                        rows.remove(row)
                        moved_ns[replica] = record["at_ns"]
                if record["event"] in ("queued", "migrated"):
                    replica = record.get("destination", record.get("replica"))
                    there[replica].add(row)
                    moved_ns[replica] = record["at_ns"]
            continue
        shut = [int(action.split()[1]) for action in record["actions"] if action.startswith("shut")]
        stay = [view[0] for view in record["replicas"] if view[1] == "colocated"]
        stay = [replica for replica in stay if replica not in shut]
        sure = [one for one in stay if moved_ns.get(one) != record["at_ns"]]
        for one in shut:
            tape.count("emptiest_shuts")
            fewer = [other for other in sure if len(there[other]) < len(there[one])]
            if fewer and moved_ns.get(one) != record["at_ns"]:
                tape.say(
                    f"T6: replica {one} shuts at {record['at_ns']} ns with {len(there[one])} "
                    f"requests, and replica {fewer[0]} has {len(there[fewer[0]])}"
                )


def judge_placements(tape: Tape, summary: Record) -> None:
    """Experts are placed anew by the first wave after each interval."""
    seats = [seat for seat in tape.seats if seat.placement_ns]
    told = summary.get("experts", {})
    for name in sorted({seat.group for seat in seats}):
        its = {seat.replica: seat.placement_ns for seat in seats if seat.group == name}
        every_ns = min(its.values())
        starts = {r["at_ns"] for r in tape.by_event["began"] if r["replica"] in its}
        due, before_ns = 0, 0
        for at_ns in sorted(starts):
            due += before_ns // every_ns < at_ns // every_ns
            before_ns = at_ns
        figures = told.get(name)
        if figures is None:
            continue
        tape.count("placements")
        if figures["placements"] != due:
            tape.say(f"T4: group {name} places experts {figures['placements']} times, should {due}")
