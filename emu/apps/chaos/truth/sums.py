"""Figures of the summary that add up what rows say, and the verdict on load.

Restates docs/metrics.md: counts are sums of the rows; waiting grows by the least-squares slope over
arrivals; the verdict follows from it. Of single rows: time in batches, from the history; sessions,
from the lines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from emu.apps.chaos.truth.tape import Record, Tape, keys_of, to_ns
from emu.config.schema import VllmTable
from emu.documents import DocumentView

Row = Mapping[str, str]
_NEAR: Final = 2e-6
_SUMS: Final = {
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed_toks",
    "migrations": "migrations",
}
_GROWS: Final = 0.02
_LONG: Final = 0.1
_MANY_REJECTED: Final = 0.05
_OTHERWISE: Final = ("lost", "layer", "migrated", "state", "began", "fault")
"""Where these happen, time in batches ends early, or waits are taken off."""


def judge_sums(tape: Tape, rows: Sequence[Row], summary: DocumentView) -> None:
    """Counts, rates and the verdict."""
    tape.count("sums")
    due: dict[str, object] = {
        name: sum(int(row[column] or 0) for row in rows) for name, column in _SUMS.items()
    }
    due["partial"], due["partial_reason"] = False, ""
    told: dict[str, object] = {name: summary[name] for name in due}
    due |= _load(rows)
    due["request_rate"] = due["arrival_rate_per_s"]
    told |= {"request_rate": summary["request_rate"], **summary["load"]}
    slo = tape.config.slo
    asked = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms}
    due |= {f"slo.{name}": value or None for name, value in asked.items()}
    due["slo.requests_counted"] = sum(row["status"] != "cancelled" for row in rows)
    told |= {f"slo.{name}": value for name, value in summary["slo"].items()}
    for name, value in due.items():
        is_near = told[name] == value
        if isinstance(value, float):
            is_near = abs(float(str(told[name])) - value) <= _NEAR + 1e-6 * abs(value)
        if not is_near:
            tape.say(f"T4: {name} is {told[name]}, the rows say {value}")


def _load(rows: Sequence[Row]) -> dict[str, float | str]:
    """The verdict on load and the figures behind it."""
    arrivals = [int(row["arrival_ns"]) for row in rows]
    lasts = [int(row["last_token_ns"]) for row in rows if int(row["last_token_ns"] or -1) >= 0]
    done = [row for row in rows if row["status"] == "completed"]
    last_ns = max(lasts, default=-1)
    due: dict[str, float | str] = {
        "arrival_rate_per_s": _rate(len(rows) - 1, max(arrivals) - min(arrivals)),
        "completion_rate_per_s": _rate(len(done), last_ns - min(arrivals)),
        "drain_s": max(0, last_ns - max(arrivals)) / 1e9,
        "verdict": "unknown",
    }
    if not done:
        return due
    came = [int(row["arrival_ns"]) for row in done]
    waits = [int(row["queue_ns"]) + int(row["migration_ns"] or 0) for row in done]
    wait_ns = sum(waits) / len(waits)
    last = waits[-max(1, len(waits) // 4) :]
    late_ns = sum(last) / len(last)
    service_ns = sum(int(row["latency_ns"]) for row in done) / len(done) - wait_ns
    slope, error = _growth(came, waits)
    due |= {
        "mean_service_ms": service_ns / 1e6,
        "wait_growth_s_per_s": slope,
        "wait_growth_error_s_per_s": error,
    }
    rejected = sum(row["status"] == "rejected" for row in rows) / len(rows)
    is_late = late_ns > _LONG * service_ns
    if slope - 2 * error > _GROWS and is_late:
        due["verdict"] = "overloaded"
    elif wait_ns <= _LONG * service_ns and not is_late:
        due["verdict"] = "stable"
    else:
        due["verdict"] = "overloaded" if rejected > _MANY_REJECTED else "backlogged"
    if abs(slope - 2 * error - _GROWS) < 1e-9:
        del due["verdict"]
    return due


def _growth(xs: Sequence[int], ys: Sequence[int]) -> tuple[float, float]:
    """Slope of a line through points, and its standard error."""
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    if count < 3 or not spread:
        return 0.0, 0.0
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    left = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(left / (count - 2) / spread)


def _rate(count: int, span_ns: int) -> float:
    return max(count, 0) * 1e9 / span_ns if span_ns > 0 else 0.0


def judge_sessions(tape: Tape, lines: Sequence[Record], rows: Sequence[Row]) -> None:
    """Rows name the session of their line, and which of its turns they are."""
    workload = keys_of(tape.config.workload)
    if (workload.get("upscale") or 1) != 1 or any(f["kind"] == "overload" for f in tape.faults):
        return
    kept = [line for line in lines if line["arrival_time_ns"] >= to_ns(workload["start_s"])]
    names: list[tuple[str, str]] = []
    for line in kept[: workload["limit"] or None]:
        turns, session = line.get("sub_requests"), str(line.get("session_id", ""))
        names += [("", "")] if turns is None else [(session, str(at)) for at in range(len(turns))]
    for place, row in enumerate(rows):
        number = int(row["request_id"])
        told = row["session_id"], row["sub_request_index"]
        tape.count("sessions")
        if number < len(names) and told != names[number]:
            tape.say(f"T7: row {place} is {told} of a session, its line {names[number]}")


def judge_execution(tape: Tape, rows: Sequence[Row]) -> None:
    """A request has been in batches for as long as they took, from their forming to their end.

    Other schedulers than vLLM's may leave out of a step what runs, and count the wait for the next.
    """
    has_stages = any(seat.stages > 1 for seat in tape.seats)
    if has_stages or any(tape.by_event[event] for event in _OTHERWISE):
        return
    is_exact = all(isinstance(s.scheduler, VllmTable) and s.is_plain for s in tape.seats)
    took: dict[int, int] = defaultdict(int)
    members: dict[tuple[int, int], Record] = {}
    for record in tape.of("batch", "ran"):
        key = record["replica"], record["batch"]
        if record["event"] == "batch":
            members[key] = record
        elif key in members:
            for row, _, _ in members.pop(key)["members"]:
                took[row] += record["at_ns"] - record["start_ns"]
    for place, row in enumerate(rows):
        if row["status"] == "completed":
            tape.count("execution")
            told, due_ns = int(row["execution_ns"]), took[place]
            if told < due_ns or (told != due_ns and is_exact):
                tape.say(f"T4: row {place}: execution_ns is {told}, its batches took {took[place]}")
