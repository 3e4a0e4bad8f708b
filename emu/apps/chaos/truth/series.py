"""Figures over time, and how long requests waited.

Restates docs/reference/outputs.md (timeseries.csv: rows count what has happened since the row
before) and docs/metrics.md (wait: until first scheduled, plus between replicas; the last quarter of
those that completed, in order of arrival).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from emu.apps.chaos.truth.tape import Tape
from emu.documents import DocumentView

Row = Mapping[str, str]
_NEAR_MS: Final = 2e-6


def judge_series(tape: Tape, rows: Sequence[Row]) -> None:
    """Completions and preemptions up to each row; tokens per second, over the span of the row."""
    ends = sorted(r["at_ns"] for r in tape.by_event["ended"] if r["status"] == "completed")
    done = before_ns = tokens = 0
    for row in rows:
        at_ns = int(row["time_ns"])
        done += int(row["completed"])
        tape.count("series")
        if not bisect_left(ends, at_ns) <= done <= bisect_right(ends, at_ns):
            tape.say(f"T4: {done} requests completed by {at_ns} ns, says timeseries.csv")
        tokens += int(row["decode_tokens_per_s"]) * (at_ns - before_ns)
        before_ns = at_ns
    if not rows:
        return
    made = sum(len(r["rows"]) * len(r["ends"]) for r in tape.by_event["tokens"])
    slack = 1 + before_ns / 2e9  # rates are whole numbers
    tape.count("series")
    if tokens / 1e9 > made + slack:
        tape.say(f"T4: timeseries.csv has {tokens / 1e9:.1f} output tokens, the history {made}")


def judge_waits(tape: Tape, rows: Sequence[Row], summary: DocumentView) -> None:
    """Means of all that completed, and of the last quarter."""
    waits = [
        int(row["queue_ns"]) + int(row["migration_ns"] or 0)
        for row in rows
        if row["status"] == "completed"
    ]
    if not waits:
        return
    last = waits[-max(1, len(waits) // 4) :]
    for name, its in (("mean_wait_ms", waits), ("mean_wait_last_quarter_ms", last)):
        due = sum(its) / len(its) / 1e6
        tape.count("waits")
        if abs(summary["load"][name] - due) > _NEAR_MS + 1e-9 * due:
            tape.say(f"T4: {name} is {summary['load'][name]}, the rows say {due}")
