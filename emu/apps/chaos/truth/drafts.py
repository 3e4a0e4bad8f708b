"""Drafts: as many are accepted as the configuration says, and the summary counts them.

Restates docs/lab/speculation.md for chains of drafts in vLLM's scheduler. A verification gives its
sequence one token and one for each leading draft that is accepted, as far as its output goes. One
draw is chance; over a run the sum of each rate is within six standard deviations of what the
rates give.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from emu.apps.chaos.truth.tape import Record, Tape, keys_of, to_ns
from emu.config.schema import VllmTable
from emu.documents import DocumentView

_SIGMAS = 6.0


class Drafts:
    """All verifications of a run."""

    def __init__(self, tape: Tape, lines: Sequence[Record]) -> None:
        self._tape = tape
        self._own = _own_rates(tape, lines)
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """By where the rate comes from: drafts accepted, expected, and their variance."""
        self._got: dict[int, int] = defaultdict(int)
        self._open: dict[int, dict[int, int]] = defaultdict(dict)
        """Drafts of each row in the batch that a replica runs."""
        self._least = self._most = self._drafts = self._verified = 0
        self._is_whole = True
        """No batch was lost, and none formed anew."""

    def judge(self, summary: DocumentView) -> None:
        """Replay all verifications."""
        tape = self._tape
        tables = [seat.scheduler for seat in tape.seats]
        given = [keys_of(table).get("speculative_config") for table in tables]
        plain = all(isinstance(table, VllmTable) for table in tables)
        stages = any(seat.stages > 1 or seat.role != "colocated" for seat in tape.seats)
        if not plain or stages or any(table is None or table.eagle_topk > 1 for table in given):
            return
        tape.replay(
            {
                "batch": self._batch,
                "tokens": self._tokens,
                "state": self._lost,
                "lost": self._lost,
                "migrated": self._lost,
                "ended": self._ended,
            }
        )
        for name, (accepted, expected, variance) in sorted(self._sums.items()):
            tape.count("accepted_drafts")
            if abs(accepted - expected) > _SIGMAS * math.sqrt(variance) + 1e-9:
                tape.say(
                    f"T2: {accepted:.0f} drafts of {name} are accepted, expected {expected:.1f} "
                    f"with a deviation of {math.sqrt(variance):.1f}"
                )
        if self._is_whole and "speculation" in summary:
            self._counts(summary["speculation"])

    def _counts(self, told: DocumentView) -> None:
        """The summary counts what was verified and accepted."""
        self._tape.count("draft_counts")
        counts = told["num_drafts"], told["num_draft_tokens"]
        accepted = told["num_accepted_tokens"]
        if counts != (self._verified, self._drafts) or not self._least <= accepted <= self._most:
            self._tape.say(
                f"T4: the summary counts {counts[0]} verifications of {counts[1]} drafts, "
                f"{accepted} accepted; were {self._verified} of {self._drafts}, "
                f"{self._least} to {self._most}"
            )

    def _lost(self, record: Record) -> None:
        self._is_whole = False
        if "replica" in record:
            self._open.pop(record["replica"], None)

    def _ended(self, record: Record) -> None:
        if record["status"] != "completed":
            self._is_whole = False
            for rows in self._open.values():
                rows.pop(record["row"], None)

    def _batch(self, record: Record) -> None:
        rows = self._open[record["replica"]] = {}
        for row, before, new in record["members"]:
            is_decode = before >= self._tape.arrived[row]["prompt"] and self._got[row] > 0
            if is_decode and before == self._tape.arrived[row]["prompt"] + self._got[row] - 1:
                rows[row] = new - 1

    def _tokens(self, record: Record) -> None:
        counts: Counter[int] = Counter(record["rows"])
        rows = self._open.pop(record["replica"], {})
        for row, count in counts.items():
            drafts = rows.get(row, 0)
            left = self._tape.arrived[row]["output"] - self._got[row]
            self._got[row] += count * len(record["ends"])
            if not drafts:
                continue
            self._verified += 1
            self._drafts += drafts
            self._least += count - 1
            self._most += count - 1 if count < left else drafts
            self._sum(row, drafts, left - 1, count - 1)

    def _sum(self, row: int, drafts: int, most: int, accepted: int) -> None:
        """One verification of so many drafts, of which the output has room for `most`."""
        named = self._rates(row, drafts)
        if named is None or most <= 0:
            return
        name, rates = named
        chance, mean, square = 1.0, 0.0, 0.0
        for at, rate in enumerate(rates[: min(drafts, most)]):
            chance *= rate
            mean += chance  # the chance that at least so many are accepted
            square += chance * (2 * at + 1)
        one = self._sums[name]
        one[0] += accepted
        one[1] += mean
        one[2] += square - mean * mean

    def _rates(self, row: int, drafts: int) -> tuple[str, list[float]] | None:
        """Chance of each draft after those before it; None where it is not restated."""
        arrived = self._tape.arrived[row]
        table = keys_of(self._tape.seats[0].scheduler)["speculative_config"]
        own = self._own.get(arrived["request"], -1.0)
        if own >= 0:
            return f"lines with {own}", [own] * drafts
        tenants = {entry.tenant: entry.acceptance_rate for entry in table.tenants}
        tenant = arrived.get("tenant", "")
        if tenant in tenants:
            return f"tenant {tenant!r}", [tenants[tenant]] * drafts
        if table.acceptance_spread:
            return None
        if table.synthetic_acceptance_rates:
            whole = [1.0, *table.synthetic_acceptance_rates]
            pairs = pairwise(whole)
            return "all others", [now / before if before else 0.0 for before, now in pairs]
        if table.synthetic_acceptance_length:
            mean = table.synthetic_acceptance_length - 1.0
            return "all others", [min(1.0, max(0.0, mean - at)) for at in range(drafts)]
        if table.acceptance_rate >= 0:
            return "all others", [table.acceptance_rate] * drafts
        return None


def _own_rates(tape: Tape, lines: Sequence[Record]) -> dict[int, float]:
    """The rate of each request whose line gives one."""
    workload = keys_of(tape.config.workload)
    start_ns = to_ns(workload["start_s"])
    kept = [line for line in lines if line["arrival_time_ns"] >= start_ns]
    found: dict[int, float] = {}
    number = 0
    for line in kept[: workload["limit"] or None]:
        for turn in line.get("sub_requests", [line]):
            found[number] = turn.get("acceptance_rate", line.get("acceptance_rate", -1.0))
            number += 1
    return found
