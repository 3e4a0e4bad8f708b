"""What was found, and how its rows read on the terminal and on the page."""

from __future__ import annotations

import msgspec

from emu.apps.whatif.changes import Change
from emu.apps.whatif.latencies import (
    Distance,
    Latencies,
    Paired,
)
from emu.apps.whatif.regret import Decision, Regret
from emu.report.table import number


class Alternative(msgspec.Struct):
    """What else was tried."""

    name: str
    error: str
    changes: list[Change]
    completed: int
    gpu_seconds: float
    cost: float | None
    """In the unit of `nodes.hourly_price`."""
    latencies: Latencies


class Answer(msgspec.Struct):
    """All that was found."""

    log: str
    format: str
    requests: int
    skipped: dict[str, int]
    is_pinned: bool
    """The log tells which server served each request, and the replay sends it there."""
    distances: list[Distance]
    paired: list[Paired]
    alternatives: list[Alternative]
    regret: Regret | None
    recorded: Latencies
    replayed: Latencies
    gpu_seconds: float


def cells_of(other: Alternative) -> list[str]:
    """A row of the table of alternatives."""
    by_metric = {change.metric: change for change in other.changes}
    if other.error or "E2E" not in by_metric:
        return [other.name, other.error or "no request completed", "", "", "", ""]
    texts = [
        change_text(by_metric[metric]) if metric in by_metric else "-" for metric in ("TTFT", "E2E")
    ]
    e2e = by_metric["E2E"]
    shares = [f"{100 * e2e.better:.0f} %", f"{100 * e2e.worse:.0f} %"]
    return [other.name, *texts, *shares, number(other.gpu_seconds)]


def change_text(change: Change) -> str:
    """A mean with its interval."""
    return f"{change.mean_ms:+.1f} [{change.low_ms:+.1f}, {change.high_ms:+.1f}]"


def decision_cells(one: Decision) -> list[str]:
    """A row of the table of decisions."""
    return [
        str(one.request),
        f"{one.arrival_s:.3f}",
        str(one.chosen),
        str(one.best),
        f"{one.took_ms:.1f}",
        f"{one.best_ms:.1f}",
        f"{one.regret_ms:.1f}",
    ]
