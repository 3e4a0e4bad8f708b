"""A comparison of runs as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.report.atomic import write_text
from emu.report.compare import (
    SETTINGS_MAX,
    Comparison,
    Difference,
    Row,
    compare_data,
    difference_text,
    known_lines,
    run_names,
)
from emu.report.latency_charts import LATENCY_NAMES, cdf_chart, latency_cdf, limits_ms
from emu.report.page.chart import PALETTE, Axis, Chart, Series
from emu.report.page.pages import page
from emu.report.run_charts import series_lines
from emu.report.rundata import RunData, read_run
from emu.report.state_charts import gpus_over_time
from emu.report.table import number

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
    left = len(comparison.settings) - SETTINGS_MAX
    text = page(
        "compare.html",
        title=f"emu: {' against '.join(comparison.names)}",
        charts=[*overlaid_cdfs(runs), *timelines(runs)],
        facts=[
            "paired by request" if comparison.is_paired else "requests drawn from each run",
            *known_lines(comparison),
        ],
        legend=LEGEND,
        names=comparison.names,
        rows=[_table_row(row) for row in comparison.rows],
        settings_title=f"Settings that differ{f' (and {left} more)' if left > 0 else ''}",
        settings=[(key, *values) for key, values in comparison.settings[:SETTINGS_MAX]],
        sections=[("latency", "Latency"), ("over-time", "Over time")],
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
        chart = cdf_chart(metric, curves, limits.pop() if len(limits) == 1 else None)
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
