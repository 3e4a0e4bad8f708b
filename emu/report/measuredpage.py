"""A run against a measurement as a page: the tables, and both distributions in one picture each.

write_measured(Path("compare.html"), Path("runs/a"), Path("requests.jsonl"))
"""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np

from emu.report.atomic import write_text
from emu.report.distributions import LATENCY_NAMES, PALETTE, Chart, cdf_points, log_axis, short
from emu.report.html import html_table, latency_page
from emu.report.measured import MeasuredComparison, compare_with, notes, run_values
from emu.report.measurement import Measurement, read_measurement
from emu.report.rundata import RunData, read_run
from emu.report.table import number


def write_measured(path: Path, directory: Path, measured: Path) -> MeasuredComparison:
    """Read both, compare them, write the page; the comparison."""
    run, measurement = read_run(directory), read_measurement(measured)
    comparison = compare_with(run, measurement)
    charts = cdf_charts(run, measurement)
    lines = [f"run: {directory}", f"measurement: {measured}", *notes(comparison)]
    said = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    text = f'<div id="summary">{_tables(comparison)}{said}</div>'
    write_text(path, latency_page("emu: run against measurement", text, charts))
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
    for metric, (label, _, meaning) in LATENCY_NAMES.items():
        curves = [
            (name, values[~np.isnan(values)])
            for name, values in (("measured", theirs.get(label)), ("run", mine.get(label)))
            if values is not None
        ]
        if len(curves) < 2 or not all(len(values) for _, values in curves):
            continue
        data = []
        for color, (name, values) in zip(PALETTE, curves, strict=False):
            points, parts = cdf_points(values)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": short(points),
                    "y": short(parts * 100),
                    "line": {"color": color, "width": 2},
                    "hovertemplate": "%{y:.1f} % at most %{x:.4g} ms",
                }
            )
        low = min(float(values.min()) for _, values in curves)
        high = max(float(values.max()) for _, values in curves)
        axis = log_axis(low, high) if 0 < 20 * low < high else {"type": "linear"}
        layout = {
            "xaxis": {"title": {"text": "ms"}, **axis},
            "yaxis": {"title": {"text": "%"}, "range": [0, 100.5]},
            "showlegend": True,
        }
        charts.append(
            Chart(f"cdf-{metric}", "latency", f"{label}: {meaning}", "", data, layout, 320)
        )
    return charts


def _tables(comparison: MeasuredComparison) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "measured", "run", "difference"))
    rows = ""
    for row in comparison.rows:
        percent = "-" if row.percent is None else f"{row.percent:+.2f} %"
        rows += (
            f'<tr><th scope="row">{row.metric} {row.statistic}</th><td>{number(row.measured)}</td>'
            f"<td>{number(row.run)}</td><td>{percent}</td></tr>"
        )
    text = html_table("Milliseconds; difference = (run - measured) / measured", head, rows)
    if comparison.paired:
        head = "".join(
            f'<th scope="col">{name}</th>' for name in ("", "pairs", "mean", "median", "p90")
        )
        rows = "".join(
            f'<tr><th scope="row">{pair.metric}</th><td>{pair.pairs}</td><td>{pair.mean:.2f}</td>'
            f"<td>{pair.median:.2f}</td><td>{pair.p90:.2f}</td></tr>"
            for pair in comparison.paired
        )
        text += html_table("Request by request: absolute error, per cent", head, rows)
    return text
