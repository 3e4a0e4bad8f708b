"""Pages for a browser without a network: `report.html` of a run, and a comparison of runs.

    path = write_report(directory)      # from the files of the directory alone

The page holds the tables as HTML (readable without scripts) and the charts' data as JSON. It says
nothing that changes from one run of the same config and seed to the next: no date, no output
directory, no wall time.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from emu.report.atomic import partial_name, write_text
from emu.report.chart import PALETTE, Axis, Chart, Series, payload
from emu.report.charts import (
    LATENCY_NAMES,
    STATS,
    cdf_chart,
    cdf_points,
    gpus_over_time,
    latency_cdf,
    limits_ms,
    replica_rows,
    run_charts,
    series_lines,
    slowest_rows,
)
from emu.report.compare import (
    SETTINGS_MAX,
    Comparison,
    Difference,
    MeasuredComparison,
    Measurement,
    Row,
    compare_data,
    compare_with,
    difference_text,
    notes,
    read_measurement,
    run_names,
    run_values,
)
from emu.report.drawn import NAME as DRAWS
from emu.report.drawn import interval_text, read_draws, share_text, shown
from emu.report.rundata import RunData, read_run
from emu.report.summary import STATISTICS, Summary
from emu.report.table import ends, latency_cells, number, remarks, wait_growth

# --- a run ----------------------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------
# The pages that emu writes: one template engine, one style, one script, one chart library.
#
#     text = page("run.html", title="...", charts=charts, ...)
#
# Templates are Jinja's and stand in `page/`; every value is escaped where it is put in. A page is
# one file that asks for nothing from outside: style, script and ECharts stand in it, and the data
# of its charts as JSON.

PAGES: Final = Path(__file__).parent / "page"


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = cell
    made.filters["breakable"] = breakable
    return made


def page(template: str, *, title: str, charts: Sequence[Chart], **parts: Any) -> str:
    """A template of `page/` with what it shows; `charts` are drawn where it places them."""
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            charts=charts,
            style=asset("page.css"),
            echarts=asset("echarts/echarts.min.js"),
            script=asset("charts.js"),
            data=json_in_script(payload(charts)),
            **parts,
        )
    )


def live_page(facts: object) -> str:
    """The page of a live server; what it shows comes over its event stream.

    `facts`: what does not change while the server runs.
    """
    return (
        _environment()
        .get_template("live.html")
        .render(
            style=asset("page.css") + asset("live.css"),
            echarts=asset("echarts/echarts.min.js"),
            script=asset("charts.js") + asset("live.js"),
            facts=json_in_script(facts),
        )
    )


def asset(name: str) -> Markup:
    """A file of `page/` as it is; none of them holds an end of its element."""
    return Markup((PAGES / name).read_text(encoding="utf-8"))


def json_in_script(value: object) -> Markup:
    """JSON that cannot end the script element it stands in."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))


def breakable(name: str) -> Markup:
    """A name that breaks between its parts (`p95_`, `ttft_`, `ms`), not in the middle of one."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[_.])", name))


def cell(value: object) -> str:
    """A value of a table: figures with four digits, words as they are."""
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)


# --- `report.html` --------------------------------------------------------------------------------

_METRIC_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_SECTIONS: Final = {
    "latency": "Latency",
    "over-time": "Latency over time",
    "replicas": "Replicas",
    "load": "Load",
    "resources": "Resources",
    "slowest": "Slowest requests",
}
_SLOWEST_COLUMNS: Final = {
    "request_id": "request",
    "arrival_s": "arrival, s",
    "prompt_toks": "prompt",
    "decode_toks": "output",
    "first": "first token at",
    "last": "last token at",
    "preemptions": "preemptions",
    "queue": "queue, ms",
    "prefill": "prefill, ms",
    "migration": "migration, ms",
    "decode": "decode, ms",
    "ttft": "TTFT, ms",
    "e2e": "E2E, ms",
}
_ROWS_MAX: Final = 200


class Tile(msgspec.Struct):
    """One figure at the top of the page; `stats` are its values by percentile, as JSON."""

    name: str
    value: str
    below: str
    mood: str = ""
    stats: str = ""
    stat_names: str = json.dumps({stat: stat for stat in STATS})


def write_report(directory: Path) -> Path:
    """(Re)write the page of a run; the path of the page."""
    run = read_run(directory)
    name = "report.html"
    path = directory / (partial_name(name) if run.summary.partial else name)
    write_text(path, report_html(run))
    return path


def report_html(run: RunData) -> str:
    """The page as text."""
    summary = run.summary
    charts = run_charts(run)
    present = {chart.section for chart in charts}
    changes = [row for row in run.transitions if row.old]
    plans = [mark for mark in run.marks if mark.kind == "plan"]
    by_replica = replica_rows(run)
    return page(
        "run.html",
        title=run_title(run),
        charts=charts,
        facts=facts(run),
        partial=summary.partial_reason if summary.partial else "",
        pace=_pace(summary),
        stats=list(STATS),
        tiles=_tiles(summary),
        latency_head=["", *("p50" if s == "median" else s for s in STATISTICS)],
        latency_rows=[
            [name, *latency_cells(summary, metric)] for metric, name in _METRIC_NAMES.items()
        ],
        drawn=_drawn_rows(run.directory),
        remarks=[(name, text) for name, text, _ in remarks(summary)],
        energy=_energy_rows(summary),
        sections=[(key, name) for key, name in _SECTIONS.items() if key in present],
        replica_head=list(by_replica[0]) if by_replica else [],
        replica_rows=[list(row.values()) for row in by_replica],
        transitions=[
            (f"{row.time_ns / 1e9:.6f}", row.replica, row.old, row.new, row.writer, row.cause)
            for row in changes[:_ROWS_MAX]
        ],
        transition_count=len(changes),
        plans=[
            (f"{mark.time_ns / 1e9:.6f}", *mark.text.partition("; ")[::2])
            for mark in plans[:_ROWS_MAX]
        ],
        plan_count=len(plans),
        slowest_head=list(_SLOWEST_COLUMNS.values()),
        slowest_ttft=_slowest_table(run, "ttft_ns"),
        slowest_e2e=_slowest_table(run, "latency_ns"),
        origin=list(origin(run).items()),
        config=list(flat_settings(run.config)),
        definitions=list(summary.definitions.items()),
    )


def _drawn_rows(directory: Path) -> list[list[str]]:
    """Figures over draws, where a run has them."""
    if not (directory / DRAWS).exists():
        return []
    drawn = read_draws(directory)
    rows = [
        [label, number(each.median), interval_text(each), share_text(each)]
        for _, label, each in shown(drawn)
    ]
    return [*rows, [f"{drawn.count} draws, engines: {'; '.join(drawn.engines)}", "", "", ""]]


# --- what was run --------------------------------------------------------------------------------
def run_title(run: RunData) -> str:
    """Configuration and model: what tells one tab of a browser from the next."""
    model = run.config.get("model", {}).get("name") or run.config.get("model", {}).get("hf_config")
    file = Path(str(run.origin.get("config_file") or "")).name
    return ": ".join(["emu", *([file] if file not in ("", "config") else []), model or "a run"])


def _pace(summary: Summary) -> str:
    """What a live server's machine did to its clients' figures; empty if nothing."""
    pace = summary.pace
    if not isinstance(pace, Mapping) or pace["verdict"] != "late":
        return ""
    share = f"{100 * pace['late_share']:.1f} % of the answers were late"
    return (
        f"The machine did not keep the pace: {share}, first at {pace['first_late_s']:.1f} s, at "
        f"worst by {pace['worst_lateness_s']:.3f} s. What clients measured is not this run."
    )


def facts(run: RunData) -> list[str]:
    """The cluster in a few words."""
    config = run.config
    if not config:
        return []
    found = []
    for node in config.get("nodes", []):
        gpu = node.get("gpu")
        name = gpu.get("name", "GPU") if isinstance(gpu, dict) else gpu
        found.append(f"{node.get('count', 1)} x {node.get('gpus', 1)} {name}")
    for group in config.get("replicas", []):
        shape = group.get("tensor_parallel", 1) * group.get("pipeline_parallel", 1)
        found.append(f"{group.get('count', 1)} {group.get('role')} (x {shape} GPU)")
    found.append(f"scheduler {config.get('scheduler', {}).get('policy')}")
    found.append(f"latency {config.get('latency', {}).get('backend')}")
    if config.get("autoscale"):
        found.append(f"autoscale {config['autoscale'].get('executor')}")
    return [*found, workload_text(config), f"seed {config.get('seed')}"]


def workload_text(config: dict[str, Any]) -> str:
    """The workload in a few words: its file, or what is drawn."""
    workload = config.get("workload", {})
    if workload.get("path"):
        limit = f", first {workload['limit']:,}" if workload.get("limit") else ""
        return f"workload {Path(workload['path']).name}{limit}"
    synthetic = workload.get("synthetic") or {}
    arrivals = synthetic.get("arrivals") or {}
    rate = arrivals.get("rate_per_s")
    text = f"workload {arrivals.get('process', 'synthetic')}"
    return f"{text}, {rate:g} requests/s" if isinstance(rate, (int, float)) else text


def origin(run: RunData) -> dict[str, str]:
    """What one needs to run it again; the output directory is left out."""
    found = run.origin
    versions = found.get("versions") or {}
    rows = {
        "configuration": str(found.get("config_file") or "-"),
        "overrides": " ".join(found.get("overrides") or []) or "none",
        "workload": workload_text(run.config).removeprefix("workload ") if run.config else "-",
        "seed": str(run.config.get("seed", "-")),
        "command": str(found.get("command") or "-"),
        "again": "emu rerun on the directory of this run",
    }
    if versions:
        revision = f" (revision {versions['revision']})" if versions.get("revision") else ""
        rows["emu"] = f"{versions.get('emu', '-')}{revision}"
    return rows


def flat_settings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of a configuration; what is not set is left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if path or key != "output":
                yield from flat_settings(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flat_settings(item, f"{path}.{index}")
    elif value not in (None, "", []):
        yield path, value if isinstance(value, str) else json.dumps(value)


# --- tiles and tables ----------------------------------------------------------------------------
def _tiles(summary: Summary) -> list[Tile]:
    slo, load = summary.slo, summary.load
    tiles = [
        Tile("Completed", f"{summary.completed:,}", ", ".join(ends(summary)[1:]) or "all"),
        Tile(
            "Throughput",
            f"{number(summary.request_throughput)} req/s",
            f"{number(summary.output_throughput)} output tokens/s",
        ),
        *_latency_tiles(summary),
    ]
    if slo.joint_attainment is not None and summary.request_goodput is not None:
        tiles.append(
            Tile(
                "Objectives met",
                f"{slo.joint_attainment:.1%}",
                f"goodput {number(summary.request_goodput)} req/s",
                _mood(slo.joint_attainment),
            )
        )
    moods = {"stable": "good", "backlogged": "fair", "overloaded": "poor", "unknown": "fair"}
    growth = wait_growth(summary) if summary.completed else "nothing completed"
    tiles.append(Tile("Load", load.verdict, growth, moods[load.verdict]))
    if summary.gpu_seconds.total:
        idle = summary.gpu_seconds.idle / summary.gpu_seconds.total
        total = f"{number(summary.gpu_seconds.total)} s"
        tiles.append(Tile("GPU time", total, f"{idle:.0%} idle"))
    if summary.cost is not None:
        tiles.append(Tile("Cost", number(summary.cost), "of the GPU time"))
    if summary.kv_bytes_moved:
        moved = f"{summary.kv_bytes_moved / 1e9:,.2f} GB"
        tiles.append(Tile("KV moved", moved, f"{summary.migrations:,} migrations"))
    return tiles


def _latency_tiles(summary: Summary) -> Iterator[Tile]:
    slo = summary.slo
    for metric, name, limit, attained in (
        ("ttft", "TTFT", slo.ttft_ms, slo.ttft_attainment),
        ("tpot", "TPOT", slo.tpot_ms, slo.tpot_attainment),
        ("itl", "ITL", None, None),
        ("e2el", "E2E", slo.e2e_ms, slo.e2e_attainment),
    ):
        texts = dict(zip(STATISTICS, latency_cells(summary, metric), strict=True))
        texts["p50"] = texts["median"]
        below = f"mean {texts['mean']} ms"
        if limit is not None and attained is not None:
            below += f"; {attained:.1%} within {limit:g} ms"
        mood = "" if attained is None or limit is None else _mood(attained)
        stats = json.dumps({stat: f"{texts[stat]} ms" for stat in STATS})
        yield Tile(name, f"{texts['p99']} ms", below, mood, stats)


def _mood(attained: float) -> str:
    return "good" if attained >= 0.99 else "fair" if attained >= 0.9 else "poor"


def _energy_rows(summary: Summary) -> list[tuple[str, str, str, str]]:
    if summary.energy_j is None:
        return []
    total = sum(summary.energy_j.values())
    seconds = summary.simulated_s
    return [
        (
            part,
            number(joule / 1e3),
            number(joule / seconds if seconds else 0.0),
            f"{joule / total if total else 0:.1%}",
        )
        for part, joule in {**summary.energy_j, "total": total}.items()
    ]


def _slowest_table(run: RunData, column: str) -> Sequence[Sequence[float | int]]:
    return [[row[key] for key in _SLOWEST_COLUMNS] for row in slowest_rows(run, column)]


# --- a comparison ---------------------------------------------------------------------------------
# write_comparison(Path("compare.html"), [Path("runs/a"), Path("runs/b")], seed=0)

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
