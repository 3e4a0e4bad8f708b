"""The answer as a page: recorded against emulated, what else was tried, the decisions by name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from emu.apps.whatif.answer import Answer, cells_of, decision_cells
from emu.apps.whatif.regret import Regret
from emu.report.atomic import write_text
from emu.report.latency_charts import LATENCY_NAMES, cdf_chart, cdf_points
from emu.report.page.chart import Chart
from emu.report.page.pages import page

DECISIONS_MAX: Final = 200


def _told(regret: Regret) -> str:
    return (
        f"Mean regret of a decision ({regret.metric}): {regret.mean_ms:.2f} ms, 95 % interval "
        f"{regret.low_ms:.2f} to {regret.high_ms:.2f} ms, from {len(regret.decisions)} of "
        f"{regret.count} decisions; {100 * regret.regretted:.0f} % had more than 1 % to save."
    )


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    regret = answer.regret
    decisions = () if regret is None else regret.decisions
    worst = [decision_cells(one) for one in decisions if one.regret_ms > 0]
    text = page(
        "whatif.html",
        title=f"emu: what if, {Path(answer.log).name}",
        charts=charts_of(answer),
        facts=[
            f"{answer.requests:,} requests",
            f"format {answer.format}",
            "on the replicas of the log" if answer.is_pinned else "routed as configured",
            *(f"{count} {reason} left out" for reason, count in answer.skipped.items()),
        ],
        distances=[
            (one.name, one.recorded_ms, one.emulated_ms, f"{one.percent:+.2f} %")
            for one in answer.distances
        ],
        paired=[
            (one.metric, one.count, f"{one.mean:.2f}", f"{one.median:.2f}", f"{one.p99:.2f}")
            for one in answer.paired
        ],
        alternatives=[cells_of(other) for other in answer.alternatives],
        summary="" if regret is None else _told(regret),
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
        chart = cdf_chart(metric, curves) if curves else None
        if chart is not None:
            charts.append(chart)
    return charts
