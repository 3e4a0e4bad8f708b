"""The front end: when the engine has a request, and when its client has a token.

Restates docs/lab/roofline.md ("front end"): one API server a replica, in turn; each takes requests
in order of arrival, its CPU for the intake, then the tokenizer's wait and the encoding, in which no
request overtakes another. The output events of a step are handled one after another on one CPU;
those of the next step wait until they are done, and a token stands in the middle of its step's.
With `stream_interval` a step has that part of its events, but for first tokens. An event that is
not a first token may cost more for each token that its request has.
"""

from __future__ import annotations

from collections import defaultdict

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape


class Front:
    """All front ends of a run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._free_ns: dict[int, int] = defaultdict(int)
        """When the CPU of each replica's output is free."""
        self._round_ns: dict[int, int] = defaultdict(int)
        """Events of the last step with decodes, by replica."""
        self._late_ns: dict[int, tuple[int, int]] = {}
        """By row, how late its first token and its last one are with its client."""
        self._made: dict[int, int] = defaultdict(int)
        """Tokens of each row."""
        self._odd: set[int] = set()
        """Replicas and rows whose steps are not followed."""
        self._queued: dict[int, int] = {}
        self._lost: set[int] = set()

    def judge(self) -> None:
        """Intake, then output."""
        tape = self._tape
        if any(not seat.is_plain for seat in tape.seats) or tape.config.models:
            return
        takers = [seat for seat in tape.seats if seat.role in ("colocated", "prefill")]
        for record in tape.by_event["queued"]:
            self._queued.setdefault(record["row"], record["at_ns"])
        if takers and all(seat.front for seat in takers) and not tape.by_event["state"]:
            self._intake(takers)
        is_split = any(seat.role != "colocated" for seat in tape.seats)
        is_odd = is_split or tape.config.autoscale is not None or tape.config.migration.rebalance
        fronts = [seat.front for seat in tape.seats if seat.front is not None]
        # A row that starts anew has a first token again, or none: it is not told.
        is_odd |= bool(tape.by_event["lost"]) and any(
            one.group_tokens > 1 or one.id_ns for one in fronts
        )
        if not is_odd and len(fronts) == len(tape.seats):
            tape.replay({"tokens": self._tokens, "ended": self._ended, "lost": self._lose})

    def _intake(self, takers: list[Seat]) -> None:
        """In turn, first come, first served."""
        free = [0] * len(takers)
        before_ns = turn = 0
        dropped = {r["row"] for r in self._tape.by_event["ended"] if r["reason"] == "session_ended"}
        for record in self._tape.by_event["arrived"]:
            row = record["row"]
            if row in dropped:
                continue  # it is never asked
            front = takers[turn].front
            assert front is not None
            free[turn] = max(free[turn], record["at_ns"]) + front.intake_ns
            due_ns = free[turn] + front.wait_ns + record["prompt"] * front.token_ns
            before_ns = due_ns = max(before_ns, due_ns)
            turn = (turn + 1) % len(takers)
            at_ns = self._queued.get(row)
            if at_ns is None:
                continue  # refused, or its client had left
            self._tape.count("intake")
            if at_ns != due_ns:
                self._tape.say(f"T2: row {row} is with its engine at {at_ns} ns, not {due_ns}")

    def _tokens(self, record: Record) -> None:
        """The events of one step."""
        replica, rows = record["replica"], record["rows"]
        front = self._tape.seats[replica].front
        assert front is not None
        end_ns, firsts = record["at_ns"], len(set(rows) - self._late_ns.keys())
        group_ns = front.event_ns // front.group_tokens
        work_ns = firsts * front.event_ns + (len(rows) - firsts) * group_ns
        for row in rows:
            self._made[row] += 1
        copied = sum(self._made[row] for row in rows if self._made[row] > 1)
        work_ns += copied * front.id_ns // front.group_tokens
        start_ns = max(self._free_ns[replica], end_ns)
        self._free_ns[replica] = start_ns + work_ns
        rest_ns = work_ns // 2 + front.output_ns
        late_ns = start_ns - end_ns + rest_ns
        soon_ns = late_ns
        if front.rounds:
            soon_ns = min(start_ns - end_ns, front.rounds * self._round_ns[replica]) + rest_ns
        if len(rows) > firsts:
            self._round_ns[replica] = work_ns
        for row in rows:
            known = self._late_ns.get(row)
            self._late_ns[row] = (soon_ns, soon_ns) if known is None else (known[0], late_ns)

    def _lose(self, record: Record) -> None:
        self._lost.add(record["row"])

    def _ended(self, record: Record) -> None:
        row = record["row"]
        if record["status"] != "completed" or row in self._lost or row not in self._late_ns:
            return
        due = self._late_ns[row]
        self._tape.count("output_events")
        if (record["first_out"], record["last_out"]) != due:
            told = record["first_out"], record["last_out"]
            self._tape.say(
                f"T2: tokens of row {row} are with its client {told} ns later, not {due}"
            )
