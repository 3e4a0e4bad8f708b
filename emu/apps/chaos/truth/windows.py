"""Faults and what may last only so long: when each begins, how strongly it holds, when it ends."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, Final

from emu.apps.chaos.truth import FOREVER_NS, Record, Span, Tape, to_ns

# --- windows: when each fault strikes, how long and how strongly it holds -------------------------
# Restates docs/faults.md from the `[[faults]]` tables alone; what the records say of strikes and
# ends is compared with it. Stragglers multiply, link faults multiply, delays of links add up.

AT_ONCE: Final = frozenset(
    {
        "straggler",
        "freeze",
        "pause",
        "link_down",
        "link_degrade",
        "link_latency",
        "partition",
        "metrics_delayed",
        "metrics_frozen",
        "metrics_lost",
        "host_cache_lost",
        "cxl_lost",
        "node_crash",
        "gpu_crash",
        "planner_restart",
    }
)
"""Kinds that strike, or find nothing to strike, at the very time that was asked for."""
TOLD: Final = frozenset(
    {
        "straggler",
        "link_latency",
        "partition",
        "metrics_delayed",
        "metrics_frozen",
        "metrics_lost",
        "gpu_crash",
        "node_crash",
    }
)
"""Kinds whose end follows their strike after exactly their duration."""
OPENED: Final = frozenset(
    {
        "transfer_refused",
        "transfer_broken",
        "transfer_hang",
        "completion_late",
        "completion_twice",
        "handshake_lost",
        "destination_refuses",
        "load_stuck",
    }
)
"""Kinds that are in force from the time that was asked for, whether they strike or not."""


class Windows:
    """All faults of a run, as the configuration asks for them."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.slow: dict[int, list[tuple[Span, float]]] = defaultdict(list)
        """Stragglers of each replica, and latencies that commands turn."""
        self.still: dict[int, list[Span]] = defaultdict(list)
        """When each replica stands still."""
        self.factors: list[tuple[Span, tuple[str, ...], float]] = []
        """Links that carry a part of their rate, by the beginnings of their names."""
        self.delays: list[tuple[Span, tuple[str, ...], int]] = []
        self.cuts: list[tuple[Span, tuple[int, int]]] = []
        self._pauses: list[tuple[str, int, int, int]] = []
        """(kind, replica, from, to) of each pause, as it was asked for."""
        self.has_swizzle = any(fault.kind == "swizzle" for fault in tape.config.faults)
        self._strikes: dict[tuple[str, int], list[str]] = defaultdict(list)
        for record in tape.by_event["fault"]:
            self._strikes[record["kind"], record["at_ns"]].append(record["target"])
        self._read()

    def judge(self) -> None:
        """Every fault struck when it had to, and was over when it had to be."""
        tape = self._tape
        missed = Counter(
            (record["target"], record["at_ns"])
            for record in tape.by_event["noted"]
            if record["kind"] == "fault missed"
        )
        asked = Counter(
            (fault.kind, to_ns(fault.at_s)) for fault in tape.config.faults if fault.kind in AT_ONCE
        )
        for (kind, at_ns), count in asked.items():
            seen = len(self._strikes[kind, at_ns]) + missed[kind, at_ns]
            if at_ns < tape.end_ns and seen < count:
                tape.say(f"T1: {kind} was to strike at {at_ns} ns, and did not")
        self._judge_ends()
        self._judge_pauses()

    def _judge_ends(self) -> None:
        tape = self._tape
        due: Counter[tuple[str, int]] = Counter()
        fault: Any
        for fault in tape.config.faults:
            at_ns, kind = to_ns(fault.at_s), fault.kind
            duration_ns = to_ns(getattr(fault, "duration_s", None) or 0)
            if not duration_ns:
                continue
            if kind in OPENED:
                due[kind, at_ns + duration_ns] += 1
            elif kind in ("link_down", "link_degrade"):
                for turn in range(fault.times):
                    due[kind, at_ns + (2 * turn + 1) * duration_ns] += 1
            elif kind in TOLD and self._has_struck(fault, at_ns):
                due[kind, at_ns + duration_ns] += 1
        over = Counter((record["kind"], record["at_ns"]) for record in tape.by_event["fault_over"])
        judged = TOLD | OPENED | {"link_down", "link_degrade"}
        for key in sorted({*due, *over}):
            kind, at_ns = key
            if kind in judged and at_ns < tape.end_ns and over[key] != due[key]:
                missing = sum(  # with nothing to strike, by themselves or beside one that struck
                    not self._strikes[kind, to_ns(fault.at_s)]
                    for fault in tape.config.faults
                    if fault.kind == kind
                ) + sum(
                    record["kind"] == "fault missed" and record["target"] == kind
                    for record in tape.by_event["noted"]
                )
                if not due[key] - missing <= over[key] <= due[key]:
                    tape.say(f"T1: {over[key]} {kind} end at {at_ns} ns, {due[key]} should")

    def _judge_pauses(self) -> None:
        """A replica that stands still goes on after exactly the duration, unless it has died."""
        tape = self._tape
        over = {
            (record["kind"], record["target"], record["at_ns"])
            for record in tape.by_event["fault_over"]
        }
        for kind, replica, at_ns, until_ns in self._pauses:
            target = f"replica {replica}"
            given_up_ns = at_ns + to_ns(tape.config.recovery.progress_deadline_ms / 1e3)
            last_ns = min(until_ns, given_up_ns)
            deaths = [d for d in tape.failures(replica) if d >= at_ns]
            if min(deaths, default=FOREVER_NS) <= last_ns or last_ns >= tape.end_ns:
                continue
            if until_ns > given_up_ns:
                tape.say(f"T1: {target} stood still for its deadline, and was not given up")
            elif (kind, target, until_ns) not in over and until_ns < given_up_ns:
                tape.say(f"T1: {target} stood still beyond {until_ns} ns")

    def factor(self, replica: int, at_ns: int) -> float:
        """How many times longer iterations of a replica take that begin now."""
        product = 1.0
        for span, factor in self.slow.get(replica, ()):
            if span.holds(at_ns):
                product *= factor
        return product

    def is_edge(self, replica: int, at_ns: int) -> bool:
        """A straggler begins or ends at this very instant: either factor may count."""
        return any(
            at_ns in (span.since_ns, span.until_ns) for span, _ in self.slow.get(replica, ())
        )

    def stood_ns(self, replica: int, start_ns: int, end_ns: int) -> int:
        """How long a replica stood still between two instants."""
        return sum(span.overlap_ns(start_ns, end_ns) for span in self.still.get(replica, ()))

    # --- reading the tables -------------------------------------------------------------------
    def _read(self) -> None:
        taken: Counter[tuple[str, int, str]] = Counter()
        fault: Any
        for fault in self._tape.config.faults:
            at_ns = to_ns(fault.at_s)
            duration_s = getattr(fault, "duration_s", None)
            until_ns = at_ns + to_ns(duration_s) if duration_s else FOREVER_NS
            span = Span(at_ns, until_ns)
            if fault.kind in ("straggler", "pause", "freeze"):
                struck = self._struck(fault, at_ns, taken)
                if struck < 0:
                    continue
                if fault.kind == "straggler":
                    self.slow[struck].append((span, fault.factor))
                else:
                    self._pauses.append((fault.kind, struck, at_ns, until_ns))
                    deaths = [d for d in self._tape.failures(struck) if d >= at_ns]
                    span.until_ns = min([until_ns, *deaths])
                    self.still[struck].append(span)
            elif fault.kind in ("link_down", "link_degrade"):
                factor = fault.factor if fault.kind == "link_degrade" else 0.0
                turns = fault.times if duration_s else 1
                for turn in range(turns):
                    later_ns = 2 * turn * (until_ns - at_ns)
                    its = Span(at_ns + later_ns, until_ns + later_ns)
                    self.factors.append((its, self._links(fault), factor))
            elif fault.kind == "link_latency":
                extra_ns = max(1, round(fault.extra_ms * 1e6))
                self.delays.append((span, self._links(fault), extra_ns))
            elif fault.kind == "partition":
                self.cuts.append((span, (fault.source, fault.destination)))

        self._read_commands()

    def _read_commands(self) -> None:
        """A latency that a command turns holds until the next such command."""
        turned: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for command in self._tape.config.commands:
            if command.factor is not None:
                turned[command.replica].append((to_ns(command.at_s), command.factor))
        for replica, its in turned.items():
            its.sort(key=lambda turn: turn[0])
            ends = [at_ns for at_ns, _ in its[1:]]
            for (at_ns, factor), until_ns in zip(its, [*ends, FOREVER_NS], strict=True):
                self.slow[replica].append((Span(at_ns, until_ns), factor))

    def _has_struck(self, fault: Any, at_ns: int) -> bool:
        """A fault of its kind struck then, and none of another replica, GPU or machine."""
        names = self._strikes[fault.kind, at_ns]
        for key, word in (("replica", "replica"), ("gpu", "GPU"), ("node", "machine")):
            at = getattr(fault, key, None)
            if at is not None:
                others = re.compile(rf"{word} (?!{at}\b)")
                names = [name for name in names if not others.match(name)]
        return bool(names)

    def _struck(self, fault: Any, at_ns: int, taken: Counter[tuple[str, int, str]]) -> int:
        """The replica that this fault struck, and none before it at its time; -1 = none."""
        strikes = Counter(self._strikes[fault.kind, at_ns])
        names = list(strikes) if fault.replica is None else [f"replica {fault.replica}"]
        if getattr(fault, "gpu", None) is not None:
            owners = [r for r, seat in enumerate(self._tape.seats) if fault.gpu in seat.gpus]
            names = [f"replica {r}" for r in owners]
        for name in names:
            if taken[fault.kind, at_ns, name] < strikes[name]:
                taken[fault.kind, at_ns, name] += 1
                return int(name.split()[-1])
        return -1

    def _links(self, fault: Any) -> tuple[str, ...]:
        """Beginnings of the names of NIC and NVLink links of what the fault names."""
        if fault.node is not None:
            first, gpus = 0, 0
            sizes = [n.gpus for n in self._tape.config.nodes for _ in range(n.count)]
            first, gpus = sum(sizes[: fault.node]), sizes[fault.node]
            struck: tuple[int, ...] = tuple(range(first, first + gpus))
        elif fault.gpu is not None:
            struck = (fault.gpu,)
        else:
            struck = self._tape.seats[fault.replica].gpus
        return tuple(f"gpu{gpu}.{kind}." for gpu in struck for kind in ("nic", "nvlink"))


# --- deadlines: leases of KV, drains, and the trouble that a fault leaves behind ------------------
# Restates docs/faults.md (`[recovery]`): KV waits for its transfer no longer than its lease, a
# replica that shuts down forms no batch after its grace, and once everything has healed and every
# deadline has passed nothing is lost any more.

_DRAINS: Final = ("shutting_prefill", "shutting_decode", "shutting_colocated")
_OWN: Final = ("lease_expired", "drain_expired")
"""Losses that `[recovery]` asks for, whatever the faults."""
_SLACK_NS: Final = 1_000_000_000


class Deadlines:
    """Leases, drains and the end of all trouble in one run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._kinds = {fault.kind for fault in tape.config.faults}

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
                if not lease_ns or (waited_ns < lease_ns and row not in halves):
                    tape.say(f"T6: row {row} loses its lease after {waited_ns} ns")
        if not lease_ns or self._kinds or tape.config.autoscale is not None:
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
            if record["at_ns"] > since_ns + grace_ns:
                late_ns = record["at_ns"] - since_ns
                tape.say(f"T6: replica {replica} drains for {late_ns} ns, and forms a batch")

    def _calm(self) -> None:
        """After the last fault is over, and all deadlines with it, nothing is lost."""
        tape, table = self._tape, self._tape.config.recovery
        ends: list[int] = []
        fault: Any
        for fault in tape.config.faults:
            lasts_s = getattr(fault, "duration_s", None)
            is_lasting = lasts_s is None and fault.kind not in _AT_ONCE
            if is_lasting or getattr(fault, "stage", None) is not None:
                return
            turns = 2 * getattr(fault, "times", 1) if fault.kind == "link_down" else 1
            at_s = fault.at_s + (lasts_s or 0.0) * turns + (getattr(fault, "after_s", None) or 0.0)
            ends.append(to_ns(at_s))
        if not ends or tape.config.autoscale is not None:
            return
        waits_s = table.restart_s + (table.load_deadline_s or 120.0) + table.drain_grace_s
        waits_ms = table.transfer_timeout_ms + table.lease_ms + table.progress_deadline_ms
        calm_ns = max(ends) + to_ns(waits_s + waits_ms / 1e3) + _SLACK_NS
        for record in tape.by_event["lost"]:
            if record["at_ns"] > calm_ns and record["reason"] not in _OWN:
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
