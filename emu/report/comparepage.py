"""The comparison as a page: the table, and the distributions of all runs in one picture each.

write_comparison(Path("compare.html"), [Path("runs/a"), Path("runs/b")], seed=0)
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from emu.report.atomic import write_text
from emu.report.compare import (
    SETTINGS_MAX,
    Comparison,
    compare_data,
    difference_text,
    run_names,
)
from emu.report.distributions import LATENCY_NAMES, PALETTE, Chart, latency_cdf, log_axis, short
from emu.report.html import html_table, latency_page
from emu.report.rundata import RunData, read_run
from emu.report.table import number


def write_comparison(path: Path, directories: Sequence[Path], seed: int = 0) -> Comparison:
    """Read the runs, compare them, write the page; the comparison."""
    runs = [read_run(directory) for directory in directories]
    comparison = compare_data(runs, seed)
    charts = overlaid_cdfs(runs)
    write_text(path, latency_page("emu: comparison", _table(comparison), charts))
    return comparison


def overlaid_cdfs(runs: Sequence[RunData]) -> list[Chart]:
    """One chart for each latency, one curve for each run."""
    names = run_names([run.directory for run in runs])
    charts = []
    for metric, (label, _, meaning) in LATENCY_NAMES.items():
        data = []
        lows, highs = [], []
        for index, run in enumerate(runs):
            values, parts = latency_cdf(run, metric)
            if not len(values):
                continue
            lows.append(float(values.min()))
            highs.append(float(values.max()))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": names[index],
                    "x": short(values),
                    "y": short(parts * 100),
                    "line": {"color": PALETTE[index % len(PALETTE)], "width": 2},
                    "hovertemplate": "%{y:.1f} % at most %{x:.4g} ms",
                }
            )
        if not data:
            continue
        is_log = min(lows) > 0 and max(highs) > 20 * min(lows)
        axis = log_axis(min(lows), max(highs)) if is_log else {"type": "linear"}
        layout = {
            "xaxis": {"title": {"text": "ms"}, **axis},
            "yaxis": {"title": {"text": "%"}, "range": [0, 100.5]},
            "showlegend": True,
        }
        title = f"{label}: {meaning}"
        charts.append(Chart(f"cdf-{metric}", "latency", title, "", data, layout, 320))
    return charts


def _table(comparison: Comparison) -> str:
    head = "<th></th><th></th>"
    for index, name in enumerate(comparison.names):
        head += f'<th scope="col">{html.escape(name)}</th>'
        if index:
            head += '<th scope="col">difference</th>'
    rows = ""
    for row in comparison.rows:
        cells = f"<td>{number(row.values[0])}</td>"
        for value, difference in zip(row.values[1:], row.differences, strict=True):
            text = difference_text(difference)
            cells += f"<td>{number(value)}</td>"
            cells += f"<td><b>{text}</b></td>" if difference.is_clear else f"<td>{text}</td>"
        rows += f'<tr><th scope="row">{html.escape(row.name)}</th><td>{row.unit}</td>{cells}</tr>'
    caption = "Differences against the first run; bold: the 95 % interval excludes zero"
    return f'<div id="summary">{html_table(caption, head, rows)}{_settings(comparison)}</div>'


def _settings(comparison: Comparison) -> str:
    """What the runs were asked to do differently."""
    if not comparison.settings:
        return ""
    head = "<th></th>" + "".join(
        f'<th scope="col">{html.escape(name)}</th>' for name in comparison.names
    )
    rows = "".join(
        f'<tr><th scope="row">{html.escape(key)}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for key, values in comparison.settings[:SETTINGS_MAX]
    )
    left = len(comparison.settings) - SETTINGS_MAX
    more = f" (and {left} more)" if left > 0 else ""
    return html_table(f"Settings that differ{more}", head, rows)
