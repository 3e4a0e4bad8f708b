"""The comparison as a page: the table, the distributions of all runs in one picture each, and
their timelines side by side.

write_comparison(Path("compare.html"), [Path("runs/a"), Path("runs/b")], seed=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.report.atomic import write_text
from emu.report.chart import PALETTE, Axis, Chart, Series
from emu.report.charts import (
    LATENCY_NAMES,
    cdf_chart,
    cdf_points,
    latency_cdf,
    limits_ms,
    series_lines,
)
from emu.report.compare import (
    SETTINGS_MAX,
    Comparison,
    Difference,
    Row,
    compare_data,
    difference_text,
    run_names,
)
from emu.report.html import page
from emu.report.measured import (
    MeasuredComparison,
    Measurement,
    compare_with,
    notes,
    read_measurement,
    run_values,
)
from emu.report.rundata import RunData, read_run
from emu.report.table import number
from emu.report.timeline import gpus_over_time

LEGEND: Final = "tick: better, cross: worse, dot: different; unmarked: zero lies in the interval"
_LESS_IS_BETTER: Final = ("TTFT", "TPOT", "ITL", "E2E", "duration", "GPU time", "cost", "energy")
_MORE_IS_BETTER: Final = ("completed", "requests", "output tokens", "objectives met", "goodput")


class Cell(msgspec.Struct):
    """A value (`mark` is None) or a difference with what it means."""

    text: str
    interval: str = ""
    mark: str | None = None


class TableRow(msgspec.Struct):
    """One figure of all runs."""

    name: str
    cells: list[Cell]


def write_comparison(path: Path, directories: Sequence[Path], seed: int = 0) -> Comparison:
    """Read the runs, compare them, write the page; the comparison."""
    runs = [read_run(directory) for directory in directories]
    comparison = compare_data(runs, seed)
    charts = [*overlaid_cdfs(runs), *timelines(runs)]
    left = len(comparison.settings) - SETTINGS_MAX
    present = {chart.section for chart in charts}
    sections = [("latency", "Latency"), ("over-time", "Over time")]
    text = page(
        "compare.html",
        title=f"emu: {' against '.join(comparison.names)}",
        charts=charts,
        facts=["paired by request" if comparison.is_paired else "requests drawn from each run"],
        legend=LEGEND,
        names=comparison.names,
        rows=[_table_row(row) for row in comparison.rows],
        settings_title=f"Settings that differ{f' (and {left} more)' if left > 0 else ''}",
        settings=[(key, *values) for key, values in comparison.settings[:SETTINGS_MAX]],
        sections=[(key, name) for key, name in sections if key in present],
    )
    write_text(path, text)
    return comparison


def overlaid_cdfs(runs: Sequence[RunData]) -> list[Chart]:
    """One chart for each latency, one curve for each run; an objective that all runs share."""
    names = run_names([run.directory for run in runs])
    charts = []
    for metric in LATENCY_NAMES:
        curves = [(name, *latency_cdf(run, metric)) for name, run in zip(names, runs, strict=True)]
        limits = {limits_ms(run).get(metric) for run in runs}
        chart = cdf_chart(metric, curves, limits.pop() if len(limits) == 1 else None, 320)
        if chart is not None:
            charts.append(chart)
    return charts


def timelines(runs: Sequence[RunData]) -> list[Chart]:
    """GPUs by role of each run, one below the other on the same time axis; then waiting requests
    and running sequences of all runs together."""
    names = run_names([run.directory for run in runs])
    end_s = max(run.end_s for run in runs)
    axis = Axis(title="s", unit="s", low=0, high=round(end_s, 6))
    charts = []
    for index, (name, run) in enumerate(zip(names, runs, strict=True)):
        for chart in gpus_over_time(run):
            chart.chart_id = f"gpus-{index}"
            chart.section, chart.title, chart.x = "over-time", f"{name}: {chart.title}", axis
            charts.append(chart)
    for column, title in (("waiting", "Requests waiting"), ("running", "Sequences running")):
        curves = [
            _renamed(curve, name, PALETTE[index % len(PALETTE)])
            for index, (name, run) in enumerate(zip(names, runs, strict=True))
            for curve in (series_lines(run.series, {column: name}) if run.series else [])
        ]
        if any(any(curve.y) for curve in curves):
            charts.append(
                Chart(
                    chart_id=f"over-{column}",
                    section="over-time",
                    title=title,
                    x=axis,
                    y=Axis(title=title.split()[0].lower(), low=0),
                    series=curves,
                    time=True,
                )
            )
    return charts


def _renamed(curve: Series, name: str, color: str) -> Series:
    return msgspec.structs.replace(curve, name=name, color=color)


def _table_row(row: Row) -> TableRow:
    unit = f", {row.unit}" if row.unit else ""
    cells = [Cell(number(row.values[0]))]
    for value, difference in zip(row.values[1:], row.differences, strict=True):
        text = difference_text(difference, has_interval=False)
        interval = difference_text(difference).removeprefix(text).strip()
        cells += [Cell(number(value)), Cell(text, interval, _mark(row.name, difference))]
    return TableRow(f"{row.name}{unit}", cells)


def _mark(name: str, difference: Difference) -> str:
    """Whether a difference is better, worse or other; "unclear" where zero lies in its interval,
    and plain where there is no interval."""
    if difference.low is None:
        return "plain"
    if not difference.is_clear or difference.percent is None:
        return "unclear"
    if name.startswith(_LESS_IS_BETTER):
        return "better" if difference.percent < 0 else "worse"
    if name.startswith(_MORE_IS_BETTER):
        return "better" if difference.percent > 0 else "worse"
    return "other"


# --------------------------------------------------------------------------------------------------
# A run against a measurement as a page: the tables, and both distributions in one picture each.
#
# write_measured(Path("compare.html"), Path("runs/a"), Path("requests.jsonl"))


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
        chart = cdf_chart(metric, curves, None, 320) if len(curves) == 2 else None
        if chart is not None:
            charts.append(chart)
    return charts
