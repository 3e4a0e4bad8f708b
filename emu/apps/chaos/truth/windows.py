"""Windows: when each fault strikes, how long and how strongly it holds.

Restates docs/faults.md from the `[[faults]]` tables alone; what the records say of strikes and
ends is compared with it. Stragglers multiply, link faults multiply, delays of links add up.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Final

from emu.apps.chaos.truth.tape import FOREVER_NS, Record, Span, Tape, to_ns

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
_OF_PAIRS: Final = (
    *("transfer_refused", "transfer_broken", "transfer_hang", "completion_late"),
    *("completion_twice", "handshake_lost", "destination_refuses"),
)
"""Kinds that may name the replicas between which they strike."""
_PAIR: Final = re.compile(r"(-?\d+) -> (-?\d+)")


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
        self.has_swizzle = any(fault["kind"] == "swizzle" for fault in tape.faults)
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
            (fault["kind"], to_ns(fault["at_s"]))
            for fault in tape.faults
            if fault["kind"] in AT_ONCE
        )
        for (kind, at_ns), count in asked.items():
            seen = len(self._strikes[kind, at_ns]) + missed[kind, at_ns]
            tape.count("strike")
            if at_ns < tape.end_ns and seen < count:
                tape.say(f"T1: {kind} was to strike at {at_ns} ns, and did not")
        self._judge_ends()
        self._judge_pauses()
        self._judge_pairs()

    def _judge_pairs(self) -> None:
        """A fault of transfers strikes those between the replicas that it names, in its time."""
        for record in self._tape.by_event["fault"]:
            found = _PAIR.search(record["target"])
            if record["kind"] not in _OF_PAIRS or found is None:
                continue
            source, destination = map(int, found.groups())
            at_ns = record["at_ns"]
            self._tape.count("pair")
            if not any(
                fault["kind"] == record["kind"]
                and fault.get("source") in (None, source)
                and fault.get("destination") in (None, destination)
                and to_ns(fault["at_s"]) <= at_ns
                and (
                    fault.get("duration_s") is None
                    or at_ns <= to_ns(fault["at_s"]) + to_ns(fault["duration_s"])
                )
                for fault in self._tape.faults
            ):
                self._tape.say(
                    f"T1: {record['kind']} strikes {record['target']} at {at_ns} ns, none was asked"
                )

    def _judge_ends(self) -> None:
        tape = self._tape
        due: Counter[tuple[str, int]] = Counter()
        for fault in tape.faults:
            at_ns, kind = to_ns(fault["at_s"]), fault["kind"]
            duration_ns = to_ns(fault.get("duration_s") or 0)
            if not duration_ns:
                continue
            if kind in OPENED:
                due[kind, at_ns + duration_ns] += 1
            elif kind in ("link_down", "link_degrade"):
                for turn in range(fault["times"]):
                    due[kind, at_ns + (2 * turn + 1) * duration_ns] += 1
            elif kind in TOLD and self._has_struck(fault, at_ns):
                due[kind, at_ns + duration_ns] += 1
        over = Counter((record["kind"], record["at_ns"]) for record in tape.by_event["fault_over"])
        judged = TOLD | OPENED | {"link_down", "link_degrade"}
        for key in sorted({*due, *over}):
            kind, at_ns = key
            if kind not in judged or at_ns >= tape.end_ns:
                continue
            tape.count("fault_end")
            if over[key] != due[key]:
                missing = sum(  # with nothing to strike, by themselves or beside one that struck
                    not self._strikes[kind, to_ns(fault["at_s"])]
                    for fault in tape.faults
                    if fault["kind"] == kind
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
            tape.count("pause_end")
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

    def _read(self) -> None:
        taken: Counter[tuple[str, int, str]] = Counter()
        for fault in self._tape.faults:
            at_ns = to_ns(fault["at_s"])
            duration_s = fault.get("duration_s")
            until_ns = at_ns + to_ns(duration_s) if duration_s else FOREVER_NS
            span = Span(at_ns, until_ns)
            if fault["kind"] in ("straggler", "pause", "freeze"):
                struck = self._struck(fault, at_ns, taken)
                if struck < 0:
                    continue
                if fault["kind"] == "straggler":
                    self.slow[struck].append((span, fault["factor"]))
                else:
                    self._pauses.append((fault["kind"], struck, at_ns, until_ns))
                    deaths = [d for d in self._tape.failures(struck) if d >= at_ns]
                    span.until_ns = min([until_ns, *deaths])
                    self.still[struck].append(span)
            elif fault["kind"] in ("link_down", "link_degrade"):
                factor = fault["factor"] if fault["kind"] == "link_degrade" else 0.0
                turns = fault["times"] if duration_s else 1
                for turn in range(turns):
                    later_ns = 2 * turn * (until_ns - at_ns)
                    its = Span(at_ns + later_ns, until_ns + later_ns)
                    self.factors.append((its, self._links(fault), factor))
            elif fault["kind"] == "link_latency":
                extra_ns = max(1, round(fault["extra_ms"] * 1e6))
                self.delays.append((span, self._links(fault), extra_ns))
            elif fault["kind"] == "partition":
                self.cuts.append((span, (fault["source"], fault["destination"])))

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

    def _has_struck(self, fault: Record, at_ns: int) -> bool:
        """A fault of its kind struck then, and none of another replica, GPU or machine."""
        names = self._strikes[fault["kind"], at_ns]
        for key, word in (("replica", "replica"), ("gpu", "GPU"), ("node", "machine")):
            at = fault.get(key)
            if at is not None:
                others = re.compile(rf"{word} (?!{at}\b)")
                names = [name for name in names if not others.match(name)]
        return bool(names)

    def _struck(self, fault: Record, at_ns: int, taken: Counter[tuple[str, int, str]]) -> int:
        """The replica that this fault struck, and none before it at its time; -1 = none."""
        strikes = Counter(self._strikes[fault["kind"], at_ns])
        names = list(strikes) if fault.get("replica") is None else [f"replica {fault['replica']}"]
        if fault.get("gpu") is not None:
            owners = [r for r, seat in enumerate(self._tape.seats) if fault["gpu"] in seat.gpus]
            names = [f"replica {r}" for r in owners]
        for name in names:
            if taken[fault["kind"], at_ns, name] < strikes[name]:
                taken[fault["kind"], at_ns, name] += 1
                return int(name.split()[-1])
        return -1

    def _links(self, fault: Record) -> tuple[str, ...]:
        """Beginnings of the names of NIC and NVLink links of what the fault names."""
        if fault.get("node") is not None:
            first, gpus = 0, 0
            sizes = [n.gpus for n in self._tape.config.nodes for _ in range(n.count)]
            first, gpus = sum(sizes[: fault["node"]]), sizes[fault["node"]]
            struck: tuple[int, ...] = tuple(range(first, first + gpus))
        elif fault.get("gpu") is not None:
            struck = (fault["gpu"],)
        else:
            struck = self._tape.seats[fault["replica"]].gpus
        return tuple(f"gpu{gpu}.{kind}." for gpu in struck for kind in ("nic", "nvlink"))
