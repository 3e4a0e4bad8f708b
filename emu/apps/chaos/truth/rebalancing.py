"""Rebalancing: a move goes from the fuller replica to the emptier one, and the youngest goes.

Restates `[migration]` of docs/reference/config.md from the figures that each decision states.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape

_MOVES_SURE: Final = 2
"""A row may move so often whatever bounds that."""


class _Residents:
    """The rows that run on each replica, in order of admission, and what each had at its moves."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = defaultdict(int)
        self.running: dict[int, dict[int, None]] = defaultdict(dict)
        self.unordered: set[int] = set()
        """Replicas whose order batches do not tell: they changed their state with rows, or a row
        was in no batch, as one that stands still to move and comes back behind all if refused."""
        self._moved: dict[int, list[int]] = defaultdict(list)
        """Tokens of a row at each of its moves."""

    def see(self, record: Record) -> None:
        """Follow a record."""
        event = record["event"]
        if event == "tokens":
            for row in record["rows"]:
                self.tokens[row] += len(record["ends"])
        elif event == "batch":
            running = self.running[record["replica"]]
            for row in record.get("preempted", ()):
                running.pop(row, None)
            rows = dict.fromkeys(member[0] for member in record["members"])
            if running.keys() - rows.keys():
                self.unordered.add(record["replica"])
            running.update(rows)
        elif event == "state":
            if self.running.pop(record["replica"], None):
                self.unordered.add(record["replica"])
        else:
            for row in record.get("rows", (record.get("row"),)):
                if record.get("live"):
                    self._moved[row][-1:] = [self.tokens[row]]  # it ran while its KV was copied
                for running in self.running.values():
                    running.pop(row, None)

    def move(self, row: int) -> None:
        """A row begins to move."""
        self._moved[row].append(self.tokens[row])

    def may_move(self, row: int) -> bool:
        """It has a token, one since its last move, and has moved seldom."""
        moves = self._moved[row]
        return 0 < self.tokens[row] != (moves[-1] if moves else -1) and len(moves) < _MOVES_SURE


def judge_rebalancing(tape: Tape) -> None:
    """A move goes from the fuller to the emptier, by more than the gap; the youngest goes."""
    table = tape.config.migration
    residents = _Residents()
    for record in tape.of(
        "tokens", "choice", "batch", "state", "ended", "lost", "routed", "migrated"
    ):
        if record["event"] != "choice":
            residents.see(record)
            continue
        row = record["row"]
        (used, blocks), (other_used, other_blocks) = record["uses"]
        seat = tape.seats[record["destination"]]

        def taken(one: int, tokens: int, seat: Seat = seat) -> int:
            """Blocks that a row with so many tokens takes there."""
            return -(-(int(tape.arrived[one]["prompt"]) + tokens) // int(seat.scheduler.block_size))

        # The KV of the newest token is computed over there.
        least = taken(row, max(0, residents.tokens[row] - 1))
        where = f"row {row} from {record['source']} to {record['destination']}"
        tape.count("rebalancing")
        if seat.is_hybrid:
            least = 0  # groups of layers have blocks of their own
        if used / blocks - other_used / other_blocks <= table.rebalance_gap:
            tape.say(f"T6: {where} at {record['at_ns']} ns: the gap is {record['uses']}")
        elif (other_used + least) / other_blocks >= used / blocks:
            tape.say(f"T6: {where} at {record['at_ns']} ns only swaps {record['uses']}")
        order = list(residents.running[record["source"]])
        younger = order[order.index(row) + 1 :] if row in order else []
        is_known = not seat.is_hybrid and record["source"] not in residents.unordered
        for other in younger if is_known else ():
            tape.count("youngest_moves")
            most = taken(other, int(tape.arrived[other]["output"]) + 1)  # some reserve it all
            if residents.may_move(other) and (other_used + most) / other_blocks < used / blocks:
                tape.say(f"T6: {where} at {record['at_ns']} ns, and row {other} is younger")
        residents.move(row)
