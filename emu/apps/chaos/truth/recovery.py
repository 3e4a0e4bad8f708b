"""Recovery and clients (docs/faults.md): when dead replicas are back, loads end, clients ask again.

In an overload each request comes as often as the fault says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Final

from emu.apps.chaos.truth.tape import FOREVER_NS, Span, Tape, to_ns

LOADING: Final = ("loading_prefill", "loading_decode", "loading_colocated", "new_prefill")
_COPIES: Final = 1 << 40
"""Numbers of requests that an overload adds begin here."""


def judge_returns(tape: Tape) -> None:
    """A dead replica is back exactly when its fault or `[recovery]` says so."""
    table = tape.config.recovery
    lasting = {
        to_ns(duration_s)
        for fault in tape.faults
        if fault["kind"].endswith(("crash", "restart"))
        and (duration_s := fault.get("duration_s")) is not None
    }
    ends = {
        record["at_ns"]
        for record in tape.by_event["fault_over"]
        if record["kind"] in ("gpu_crash", "node_crash")
    }
    waits = lasting | ({to_ns(table.restart_s)} if table.replace else set())
    group_of = {seat.replica: seat.group for seat in tape.seats if seat.experts is not None}
    for replica, changes in tape.states.items():
        group = group_of.get(replica)
        if group is not None:  # it starts again as a whole: with its last member, or at once
            fellows = [one for one, name in group_of.items() if name == group and one != replica]
            ends |= {at for one in fellows for at in _returns(tape, one)}
            waits |= {to_ns(table.restart_s)}
        for (since_ns, state), (until_ns, after) in pairwise(changes):
            if state != "failed":
                continue
            tape.count("return")
            if after != "inactive":
                tape.say(f"T6: replica {replica} is {after} after it failed")
            elif until_ns - since_ns not in waits and until_ns not in ends:
                took_ns = until_ns - since_ns
                tape.say(f"T6: replica {replica} is back after {took_ns} ns, not {waits}")
        since_ns, state = changes[-1]
        if state == "failed" and table.replace and not ends and not lasting:
            late_ns = since_ns + to_ns(table.restart_s)
            downed = any(f["kind"] in ("gpu_crash", "node_crash") for f in tape.faults)
            tape.count("return")
            if late_ns < tape.end_ns and not downed:
                tape.say(f"T6: replica {replica} was to be back at {late_ns} ns")


def _returns(tape: Tape, replica: int) -> list[int]:
    """When it ceased to be down."""
    changes = pairwise(tape.states.get(replica, ()))
    return [until_ns for (_, state), (until_ns, _) in changes if state == "failed"]


def judge_loads(tape: Tape) -> None:
    """No load outlives its deadline; a copy of the machine's own begins after a cold start."""
    table, faults = tape.config.recovery, tape.faults
    deadline_s = table.load_deadline_s or (120.0 if faults else 0.0)
    deadline_ns = to_ns(deadline_s)
    autoscale = tape.config.autoscale
    cold_ns = 0 if autoscale is None else to_ns(max(0.0, autoscale.cold_start_s))
    pins = autoscale is not None and autoscale.pin_gib_per_s > 0  # before a read from disk
    begins: dict[int, list[int]] = defaultdict(list)
    for record in tape.by_event["transfer"]:
        if record["kind"] == "weights" and record.get("source") == -1:
            begins[record["destination"]].append(record["at_ns"])
    for replica, changes in tape.states.items():
        for place, (since_ns, state) in enumerate(changes):
            if state not in LOADING or (place and changes[place - 1][1] in LOADING):
                continue
            until_ns = changes[place + 1][0] if place + 1 < len(changes) else tape.end_ns
            tape.count("load_time")
            if deadline_ns and until_ns - since_ns > deadline_ns and autoscale is not None:
                tape.say(f"T6: replica {replica} loads from {since_ns} to {until_ns} ns")
            own = [at for at in begins[replica] if since_ns <= at < until_ns]
            tape.count("load_time")
            late_ns = own[0] - since_ns - cold_ns if own and autoscale is not None else 0
            if late_ns < 0 or (late_ns and not pins):
                tape.say(
                    f"T6: the load of replica {replica} at {since_ns} ns begins at {own[0]} ns"
                )


def judge_clients(tape: Tape) -> None:
    """A client that was refused asks again after a pause that doubles each time."""
    table = tape.config.recovery
    arrivals: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, record in tape.arrived.items():
        arrivals[record["request"]].append((record["at_ns"], row))
    tries: dict[int, int] = defaultdict(int)
    # Starts after a loss count as tries, too, but not in the history.
    lost = {tape.arrived[record["row"]]["request"] for record in tape.by_event["lost"]}
    for record in tape.by_event["ended"]:
        request = tape.arrived[record["row"]]["request"]
        if record["status"] != "rejected" or request in lost:
            continue
        tries[request] += 1
        done = tries[request]
        if done > table.client_retries or len(arrivals[request]) < 1:
            tape.count("retries")
            if len(arrivals[request]) > table.client_retries + 1:
                tape.say(f"T6: request {request} is sent {len(arrivals[request])} times")
            continue
        due_ns = record["at_ns"] + round(table.client_backoff_ms * 2 ** (done - 1) * 1e6)
        later = [at for at, _ in arrivals[request] if at > record["at_ns"]]
        tape.count("retries")
        if due_ns < tape.end_ns and due_ns not in later:
            tape.say(f"T6: the client of request {request} was to ask again at {due_ns} ns")


def judge_overloads(tape: Tape) -> None:
    """With each request that arrives in an overload come its copies, and at no other time."""
    spans: list[tuple[Span, int]] = []
    for fault in tape.faults:
        if fault["kind"] == "overload":
            since_ns = to_ns(fault["at_s"])
            lasts = fault.get("duration_s")
            until_ns = FOREVER_NS if lasts is None else since_ns + to_ns(lasts)
            spans.append((Span(since_ns, until_ns), max(1, round(fault["factor"])) - 1))
    if not spans:
        return
    never = {r["row"] for r in tape.by_event["ended"] if r.get("reason") == "session_ended"}
    first: dict[int, int] = {}
    for record in tape.by_event["arrived"]:
        if record["row"] in never:
            continue  # a turn before it did not complete: it is not sent
        first.setdefault(record["request"], record["at_ns"])
    asked = Counter(at_ns for request, at_ns in first.items() if request < _COPIES)
    added = Counter(at_ns for request, at_ns in first.items() if request >= _COPIES)
    edges = {at_ns for span, _ in spans for at_ns in (span.since_ns, span.until_ns)}
    edges.add(tape.end_ns)  # the run ends with its last request, if that is refused at once
    for at_ns in (asked | added).keys() - edges:
        due = asked[at_ns] * sum(copies for span, copies in spans if span.holds(at_ns))
        tape.count("overload")
        if added[at_ns] != due:
            tape.say(f"T1: {added[at_ns]} copies arrive at {at_ns} ns, {due} should")
