"""A run against a measurement as a page: the tables, and both distributions in one picture each.

write_measured(Path("compare.html"), Path("runs/a"), Path("requests.jsonl"))
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from emu.report.atomic import write_text
from emu.report.latency_charts import LATENCY_NAMES, cdf_chart, cdf_points
from emu.report.measured import MeasuredComparison, compare_with, notes, run_values
from emu.report.measurement import Measurement, read_measurement
from emu.report.page.chart import Chart
from emu.report.page.pages import page
from emu.report.rundata import RunData, read_run


def write_measured(path: Path, directory: Path, measured: Path) -> MeasuredComparison:
    """Read both, compare them, write the page; the comparison."""
    run, measurement = read_run(directory), read_measurement(measured)
    comparison = compare_with(run, measurement)
    text = page(
        "measured.html",
        title="emu: run against measurement",
        charts=cdf_charts(run, measurement),
        rows=[
            (
                f"{row.metric} {row.statistic}",
                row.measured,
                row.run,
                None if row.percent is None else f"{row.percent:+.2f} %",
            )
            for row in comparison.rows
        ],
        paired=[
            (pair.metric, pair.pairs, f"{pair.mean:.2f}", f"{pair.median:.2f}", f"{pair.p90:.2f}")
            for pair in comparison.paired
        ],
        lines=[f"run: {directory}", f"measurement: {measured}", *notes(comparison)],
    )
    write_text(path, text)
    return comparison


def cdf_charts(run: RunData, measurement: Measurement) -> list[Chart]:
    """One chart for each latency that was measured request by request."""
    mine = run_values(run, measurement)
    theirs = {
        "TTFT": measurement.ttft_ms,
        "TPOT": measurement.tpot_ms,
        "E2E": measurement.e2e_ms,
    }
    charts = []
    for metric, (label, _, _) in LATENCY_NAMES.items():
        curves = [
            (name, *cdf_points(values[~np.isnan(values)]))
            for name, values in (("measured", theirs.get(label)), ("run", mine.get(label)))
            if values is not None and not np.isnan(values).all()
        ]
        chart = cdf_chart(metric, curves) if len(curves) == 2 else None
        if chart is not None:
            charts.append(chart)
    return charts
