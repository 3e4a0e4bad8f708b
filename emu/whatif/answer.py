"""What was found, and how its rows read on the terminal and on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.report.atomic import write_text
from emu.report.chart import Chart
from emu.report.distributions import LATENCY_NAMES, cdf_chart, cdf_points
from emu.report.pages import page
from emu.report.table import number
from emu.whatif.regret import Decision, Regret
from emu.whatif.variants import Change, Distance, Latencies, Paired


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


# --------------------------------------------------------------------------------------------------
# The answer as a page: recorded against emulated, what else was tried, the decisions by name.

DECISIONS_MAX: Final = 200


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    regret = answer.regret
    facts = [f"{answer.requests:,} requests", f"format {answer.format}"]
    facts.append("on the replicas of the log" if answer.is_pinned else "routed as configured")
    facts += [f"{count} {reason} left out" for reason, count in answer.skipped.items()]
    worst, summary = [], ""
    if regret is not None:
        worst = [decision_cells(one) for one in regret.decisions if one.regret_ms > 0]
        summary = (
            f"Mean regret of a decision ({regret.metric}): {regret.mean_ms:.2f} ms, 95 % interval "
            f"{regret.low_ms:.2f} to {regret.high_ms:.2f} ms, from {len(regret.decisions)} of "
            f"{regret.count} decisions; {100 * regret.regretted:.0f} % had more than 1 % to save."
        )
    text = page(
        "whatif.html",
        title=f"emu: what if, {Path(answer.log).name}",
        charts=charts_of(answer),
        facts=facts,
        distances=[
            (one.name, one.recorded_ms, one.emulated_ms, f"{one.percent:+.2f} %")
            for one in answer.distances
        ],
        paired=[
            (one.metric, one.count, f"{one.mean:.2f}", f"{one.median:.2f}", f"{one.p99:.2f}")
            for one in answer.paired
        ],
        alternatives=[cells_of(other) for other in answer.alternatives],
        summary=summary,
        worst=worst[:DECISIONS_MAX],
        left=max(0, len(worst) - DECISIONS_MAX),
    )
    path = directory / "report.html"
    write_text(path, text)
    return path


def charts_of(answer: Answer) -> list[Chart]:
    """Distributions of log, replay and alternatives, one chart for each latency."""
    runs = [("recorded", answer.recorded), ("replay", answer.replayed)]
    runs += [(one.name, one.latencies) for one in answer.alternatives if not one.error]
    charts = []
    for metric, (label, _, _) in LATENCY_NAMES.items():
        if label not in ("TTFT", "TPOT", "E2E"):
            continue
        curves = []
        for name, latencies in runs[:10]:
            values = latencies.of(label)
            values = values[~np.isnan(values)]
            if len(values):
                curves.append((name, *cdf_points(values)))
        chart = cdf_chart(metric, curves, None, 320) if curves else None
        if chart is not None:
            charts.append(chart)
    return charts
