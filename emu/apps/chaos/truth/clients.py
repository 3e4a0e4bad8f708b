"""What callers asked for, read from the lines of the workload, against what they got.

Restates docs/workloads.md apart from the readers: which lines are asked and when (`start_s`,
`limit`, `time_scale`, `rate_per_s`, `upscale`), how long prompts and outputs are, when a client
gives up, and when the next turn of a session is asked. What callers got are the rows of
requests.csv; when a request was taken back the history says. In a closed loop (`concurrency`,
`max_in_flight`) so many lines are on their way at most. Overloads and fleets of models keep their
lengths, not their times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth.tape import Record, Tape, to_ns
from emu.apps.chaos.truth.windows import Windows

Row = Mapping[str, str]
_MOVED: Final = ("concurrency", "max_in_flight")
"""Keys of `[workload]` after which a line does not arrive when it says."""


class Ask(msgspec.Struct, frozen=True):
    """One request, as its caller meant it."""

    prompt_tokens: int
    output_tokens: int
    tenant: str
    priority: int
    """As its line says; 0 = none."""
    at_ns: int | None
    """When it arrives; None = after turns before it, or not known."""
    waits: tuple[tuple[int, int], ...] = ()
    """Of each turn that it waits for: its request, and the pause from its end."""
    patience_ns: int = -1
    """How long its client waits; -1 = for ever."""
    deadline_ns: int = -1
    """When it is to be done, after its arrival; -1 = at any time."""
    has_images: bool = False
    line: int = 0
    """Of the workload: a session is one."""


def asked(tape: Tape, lines: Sequence[Record]) -> list[Ask]:
    """Every request of the lines, by number: the turns of a session follow each other."""
    workload = tape.config.workload
    start_ns = to_ns(workload.start_s)
    is_moved = clients_of(tape) > 0
    kept = [line for line in lines if line["arrival_time_ns"] >= start_ns]
    found: list[Ask] = []
    arrivals_ns = _arrivals_ns(tape, kept, start_ns)
    for number, (line, at_ns) in enumerate(zip(kept, arrivals_ns, strict=False)):
        turns, first = line.get("sub_requests", [line]), len(found)
        for index, turn in enumerate(turns):
            after = turn.get("after")
            if after is None:
                after = [index - 1] if index else []
            found.append(
                Ask(
                    prompt_tokens=_clipped(turn["input_toks"], workload.max_prompt_tokens),
                    output_tokens=_clipped(turn["output_toks"], workload.max_output_tokens),
                    tenant=line.get("tenant", ""),
                    priority=line.get("priority", 0),
                    at_ns=None if is_moved or after else at_ns,
                    waits=tuple(
                        (first + before, turns[before].get("tool_duration_ns", 0))
                        for before in after
                    ),
                    patience_ns=turn.get("cancel_after_ns", -1),
                    deadline_ns=turn.get("deadline_ns", -1),
                    has_images="images" in turn,
                    line=number,
                )
            )
    return found


def _arrivals_ns(tape: Tape, kept: Sequence[Record], start_ns: int) -> list[int]:
    """When lines arrive: so many at each time of the file, at the mean rate if one is asked for."""
    keys = msgspec.structs.asdict(tape.config.workload)
    each = keys.get("upscale") or 1
    count = min(len(kept), keys["limit"] or len(kept))
    times_ns = [kept[number // each]["arrival_time_ns"] - start_ns for number in range(count)]
    scale = tape.config.workload.time_scale
    if rate_per_s := keys.get("rate_per_s"):
        scale = (count - 1) / ((max(times_ns) - min(times_ns)) / 1e9) / rate_per_s
    return [round(at_ns * scale) for at_ns in times_ns]


def clients_of(tape: Tape) -> int:
    """Of a closed loop, or lines that may be on their way at once; 0 = any number."""
    keys = msgspec.structs.asdict(tape.config.workload)
    return max(keys.get(key) or 0 for key in _MOVED)


def _clipped(tokens: int, most: int) -> int:
    return min(tokens, most) if most else tokens


class Whereabouts:
    """When the replicas that a request was on were in an iteration."""

    def __init__(self, tape: Tape, windows: Windows) -> None:
        self._seats, self._windows = tape.seats, windows
        self._of_row: dict[int, set[int]] = defaultdict(set)
        self._spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
        formed: dict[tuple[int, int], Record] = {}
        for record in tape.of("queued", "batch", "ran", "migrated"):
            event = record["event"]
            if event == "queued":
                self._of_row[record["row"]].add(record["replica"])
            elif event == "migrated":
                for row in record["rows"]:
                    self._of_row[row].add(record["destination"])
            else:
                key = record["replica"], record["batch"]
                if event == "batch":
                    formed[key] = record
                elif key in formed:
                    batch = formed.pop(key)
                    self._spans[key[0]].append((batch["at_ns"], record["at_ns"]))
                    for row, _, _ in batch["members"]:
                        self._of_row[row].add(key[0])
        for (replica, _), batch in formed.items():  # cut short by a crash
            died_ns = min((at for at in tape.failures(replica) if at >= batch["at_ns"]), default=-1)
            self._spans[replica].append((batch["at_ns"], died_ns))
            for row, _, _ in batch["members"]:
                self._of_row[row].add(replica)
        self._lost = {record["row"] for record in tape.by_event["lost"]}

    def is_followed(self, row: int, at_ns: int, until_ns: int) -> bool:
        """Whether its replicas run one iteration after the other: no stages, groups, pauses."""
        return row not in self._lost and not any(
            self._seats[replica].stages > 1
            or self._seats[replica].group
            or self._windows.stood_ns(replica, at_ns, until_ns)
            for replica in self._of_row[row]
        )

    def is_busy(self, row: int, at_ns: int, until_ns: int) -> bool:
        """Whether one of its replicas was in an iteration then, and still at the later time."""
        return any(
            start_ns <= at_ns and until_ns <= end_ns
            for replica in self._of_row[row]
            for start_ns, end_ns in self._spans[replica]
        )


class Clients:
    """The rows of a run beside what was asked."""

    def __init__(self, tape: Tape, windows: Windows, lines: Sequence[Record]) -> None:
        self._tape = tape
        self._asked = asked(tape, lines)
        self._ended_ns = {record["row"]: record["at_ns"] for record in tape.by_event["ended"]}
        self._whereabouts = Whereabouts(tape, windows)
        kinds = {fault["kind"] for fault in tape.faults}
        self._is_repeated = "overload" in kinds
        """Arrivals come more often than the lines say."""
        self._leave_early = "client_leaves" in kinds

    def judge(self, rows: Sequence[Row]) -> None:
        """Every row against its line, and every line has a row."""
        by_request: dict[int, list[tuple[int, Row]]] = defaultdict(list)
        for place, row in enumerate(rows):
            by_request[int(row["request_id"])].append((place, row))
        for request, ask in enumerate(self._asked):
            tries = by_request.get(request, [])
            if not tries:
                self._tape.say(f"T7: request {request} of the workload has no row")
                continue
            for place, row in tries:
                self._judge_lengths(request, ask, row)
                self._judge_deadline(request, ask, place)
                self._judge_patience(request, ask, place, row)
            before = [(by_request[one][-1][1], ns) for one, ns in ask.waits if by_request[one]]
            self._judge_arrival(request, ask, tries[0][1], before)
        if clients_of(self._tape) and not self._is_repeated:
            self._judge_loop(clients_of(self._tape), by_request)
        if not self._is_repeated and len(by_request) > len(self._asked):
            extra = len(by_request) - len(self._asked)
            self._tape.say(f"T7: {extra} requests have rows, and no line asked for them")

    def _judge_loop(self, most: int, by_request: Mapping[int, Sequence[tuple[int, Row]]]) -> None:
        """No more lines are on their way than there are clients; each until all of it has ended."""
        spans: dict[int, list[int]] = {}
        for request, ask in enumerate(self._asked):
            for place, row in by_request.get(request, ()):
                span = spans.setdefault(ask.line, [int(row["arrival_ns"]), 0])
                span[1] = max(span[1], self._ended_ns[place])
        steps = [(since_ns, 1) for since_ns, _ in spans.values()]
        steps += [(until_ns, 0) for _, until_ns in spans.values()]
        now = 0
        for at_ns, is_start in sorted(steps):
            now += 1 if is_start else -1
            self._tape.count("closed_loop")
            if now > most:
                self._tape.say(f"T7: {now} lines are on their way at {at_ns} ns, {most} may be")
                return

    def _judge_lengths(self, request: int, ask: Ask, row: Row) -> None:
        said = {
            "output_toks": str(ask.output_tokens),
            "tenant": ask.tenant,
            "priority": str(ask.priority),
        }
        if not ask.has_images:
            said["prompt_toks"] = str(ask.prompt_tokens)
        if row["status"] == "completed":
            said["decode_toks"] = str(ask.output_tokens)
        for name, value in said.items():
            self._tape.count("asked")
            if row[name] != value:
                self._tape.say(f"T7: request {request} has {name} {row[name]}, asked was {value}")

    def _judge_deadline(self, request: int, ask: Ask, place: int) -> None:
        arrived = self._tape.arrived[place]
        due_ns = arrived["at_ns"] + ask.deadline_ns if ask.deadline_ns >= 0 else -1
        told_ns = arrived.get("deadline_ns", -1)
        self._tape.count("deadline")
        if told_ns != due_ns:
            self._tape.say(f"T7: request {request} is due at {told_ns} ns, asked was {due_ns}")

    def _judge_arrival(
        self, request: int, ask: Ask, row: Row, before: Sequence[tuple[Row, int]]
    ) -> None:
        """A line arrives at its time, a later turn a pause after its caller had those before."""
        due_ns = ask.at_ns
        rule = "arrival"
        if before:
            rule = "turn"
            if any(last["status"] != "completed" for last, _ in before):
                if row["reason"] != "session_ended":
                    self._tape.say(f"T7: request {request} is asked after a turn that had no end")
                return
            if row["reason"] == "session_ended":
                return  # another turn of the session did not complete
            due_ns = max(int(last["last_token_ns"]) + pause_ns for last, pause_ns in before)
        if due_ns is None or self._is_repeated:
            return
        self._tape.count(rule)
        if int(row["arrival_ns"]) != due_ns:
            self._tape.say(f"T7: request {request} arrives at {row['arrival_ns']} ns, not {due_ns}")

    def _judge_patience(self, request: int, ask: Ask, place: int, row: Row) -> None:
        """A client leaves when its patience is over, and not before.

        What it had asked for ends there, or with the iteration that its replica is in.
        """
        left = row["reason"] == "client_left"
        if ask.patience_ns < 0:
            if left and not self._leave_early:
                self._tape.say(f"T7: the client of request {request} leaves, and would wait")
            return
        over_ns = int(row["arrival_ns"]) + ask.patience_ns
        if self._leave_early or not (left or row["status"] == "completed"):
            return
        at_ns = self._ended_ns[place]
        if not self._whereabouts.is_followed(place, over_ns, at_ns):
            return
        self._tape.count("patience")
        late = at_ns > over_ns and not self._whereabouts.is_busy(place, over_ns, at_ns)
        if late or (left and at_ns < over_ns):
            self._tape.say(f"T7: request {request} ends at {at_ns}, its client left at {over_ns}")
