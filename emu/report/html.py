"""`report.html`: one page about a run, self-contained, for a browser without a network.

    path = write_report(directory)      # from the files of the directory alone

The page holds the tables as HTML (readable without scripts), the charts' data as JSON, plotly's
script from the installed package and the files of `page/`. It says nothing that changes from one
run of the same config and seed to the next: no date, no path, no wall time.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.errors import RunError
from emu.report.atomic import partial_name, write_text
from emu.report.charts import run_charts, slowest_rows
from emu.report.distributions import Chart
from emu.report.rundata import RunData, read_run
from emu.report.summary import STATISTICS, Summary
from emu.report.table import ends, latency_cells, number, remarks, wait_growth

_PAGE: Final = Path(__file__).parent / "page"
_METRIC_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_SECTIONS: Final = {
    "latency": "Latency",
    "over-time": "Latency over time",
    "replicas": "Replicas",
    "load": "Load",
    "resources": "Resources",
    "slowest": "Slowest requests",
}
_TRANSITIONS_MAX: Final = 200


def write_report(directory: Path) -> Path:
    """(Re)write the page of a run; the path of the page."""
    run = read_run(directory)
    name = "report.html"
    path = directory / (partial_name(name) if run.summary.partial else name)
    write_text(path, report_html(run))
    return path


def report_html(run: RunData) -> str:
    """The page as text."""
    charts = run_charts(run)
    main = [_header(run), _tiles(run.summary), _latency_table(run.summary)]
    main += [_remarks_table(run.summary), _energy_table(run.summary)]
    for section, title in _SECTIONS.items():
        mine = [chart for chart in charts if chart.section == section]
        if mine:
            main.append(charts_section(section, title, mine, _below(section, run)))
    main.append(_definitions(run.summary))
    present = [s for s in _SECTIONS if any(chart.section == s for chart in charts)]
    return fill(
        "report.html",
        {
            "TITLE": html.escape(_title(run)),
            "NAV": "".join(f'<a href="#{s}">{_SECTIONS[s]}</a>' for s in present),
            "MAIN": "\n".join(main),
            "DATA": json_in_script(payload(charts)),
        },
    )


def payload(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """What the page's script draws."""
    return [
        {"id": f"chart-{c.chart_id}", "data": c.data, "layout": c.layout, "height": c.height}
        for c in charts
    ]


def fill(template: str, parts: dict[str, str]) -> str:
    """A template of `page/` with its parts, the style, our script and plotly's."""
    parts = {
        **parts,
        "STYLE": (_PAGE / "report.css").read_text(encoding="utf-8"),
        "SCRIPT": (_PAGE / "report.js").read_text(encoding="utf-8"),
        "PLOTLY": plotly_js(),
    }
    pieces = (_PAGE / template).read_text(encoding="utf-8").split("@@")
    # Odd pieces are names of parts: a part's own text is never looked at for marks.
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def plotly_js() -> str:
    """plotly's script. Found without importing plotly, which takes longer than a short run."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise RunError("the report needs plotly's script; the plotly package is not installed")
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    # Inside a string or a comment, the only places where these can stand, a backslash is harmless.
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")


def json_in_script(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def latency_page(title: str, tables: str, charts: Sequence[Chart]) -> str:
    """A page of tables and one section of charts: what comparisons look like."""
    latency = charts_section("latency", "Latency", charts, "")
    return fill(
        "report.html",
        {
            "TITLE": title,
            "NAV": '<a href="#summary">Figures</a><a href="#latency">Latency</a>',
            "MAIN": f"<header><h1>{title}</h1></header>{tables}{latency}",
            "DATA": json_in_script(payload(charts)),
        },
    )


# --- pieces of the page --------------------------------------------------------------------------
def _title(run: RunData) -> str:
    model = run.config.get("model", {}).get("name") or "a run"
    return f"emu: {model}"


def _header(run: RunData) -> str:
    config = run.config
    facts = []
    for node in config.get("nodes", []):
        gpu = node.get("gpu")
        name = gpu.get("name", "GPU") if isinstance(gpu, dict) else gpu
        facts.append(f"{node.get('count', 1)} x {node.get('gpus', 1)} {name}")
    for group in config.get("replicas", []):
        shape = group.get("tensor_parallel", 1) * group.get("pipeline_parallel", 1)
        facts.append(f"{group.get('count', 1)} {group.get('role')} (x {shape} GPU)")
    if config:
        scheduler = config.get("scheduler", {}).get("policy")
        facts.append(f"scheduler {scheduler}")
        facts.append(f"latency {config.get('latency', {}).get('backend')}")
        if config.get("autoscale"):
            facts.append(f"autoscale {config['autoscale'].get('executor')}")
        facts.append(f"seed {config.get('seed')}")
    items = "".join(f"<li>{html.escape(str(fact))}</li>" for fact in facts)
    banner = ""
    if run.summary.partial:
        reason = html.escape(run.summary.partial_reason)
        banner = f'<p class="banner" role="alert">Partial results: {reason}</p>'
    pace = run.summary.pace
    if isinstance(pace, Mapping) and pace["verdict"] == "late":
        share = f"{100 * pace['late_share']:.1f} % of the answers were late"
        banner += (
            '<p class="banner" role="alert">The machine did not keep the pace: '
            f"{share}, first at {pace['first_late_s']:.1f} s, at worst by "
            f"{pace['worst_lateness_s']:.3f} s. What clients measured is not this run.</p>"
        )
    return f"<header><h1>{html.escape(_title(run))}</h1><ul>{items}</ul>{banner}</header>"


def _tiles(summary: Summary) -> str:
    slo, load = summary.slo, summary.load
    tiles = [
        ("Completed", f"{summary.completed:,}", ", ".join(ends(summary)[1:]) or "all", ""),
        (
            "Throughput",
            f"{number(summary.request_throughput)} req/s",
            f"{number(summary.output_throughput)} output tokens/s",
            "",
        ),
    ]
    for metric, name, limit, attained in (
        ("ttft", "TTFT", slo.ttft_ms, slo.ttft_attainment),
        ("tpot", "TPOT", slo.tpot_ms, slo.tpot_attainment),
        ("itl", "ITL", None, None),
        ("e2el", "E2E", slo.e2e_ms, slo.e2e_attainment),
    ):
        texts = dict(zip(STATISTICS, latency_cells(summary, metric), strict=True))
        below = f"p50 {texts['median']}"
        mood = ""
        if limit is not None and attained is not None:
            below += f"; {attained:.1%} within {limit:g} ms"
            mood = _mood(attained)
        tiles.append((f"{name} p99", f"{texts['p99']} ms", below, mood))
    if slo.joint_attainment is not None and summary.request_goodput is not None:
        tiles.append(
            (
                "Objectives met",
                f"{slo.joint_attainment:.1%}",
                f"goodput {number(summary.request_goodput)} req/s",
                _mood(slo.joint_attainment),
            )
        )
    moods = {"stable": "good", "backlogged": "fair", "overloaded": "poor", "unknown": "fair"}
    growth = wait_growth(summary) if summary.completed else "nothing completed"
    tiles.append(("Load", load.verdict, growth, moods[load.verdict]))
    if summary.gpu_seconds.total:
        idle = summary.gpu_seconds.idle / summary.gpu_seconds.total
        total = f"{number(summary.gpu_seconds.total)} s"
        tiles.append(("GPU time", total, f"{idle:.0%} idle", ""))
    if summary.cost is not None:
        tiles.append(("Cost", number(summary.cost), "of the GPU time", ""))
    if summary.kv_bytes_moved:
        moved = f"{summary.kv_bytes_moved / 1e9:,.2f} GB"
        tiles.append(("KV moved", moved, f"{summary.migrations:,} migrations", ""))
    cells = "".join(
        f'<div class="tile {mood}"><dt>{html.escape(name)}</dt>'
        f"<dd><b>{html.escape(value)}</b><span>{html.escape(below)}</span></dd></div>"
        for name, value, below, mood in tiles
    )
    return f'<dl class="tiles" id="summary">{cells}</dl>'


def _mood(attained: float) -> str:
    return "good" if attained >= 0.99 else "fair" if attained >= 0.9 else "poor"


def _latency_table(summary: Summary) -> str:
    head = "".join(f'<th scope="col">{"p50" if s == "median" else s}</th>' for s in STATISTICS)
    rows = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f"<td>{cell}</td>" for cell in latency_cells(summary, metric))
        + "</tr>"
        for metric, name in _METRIC_NAMES.items()
    )
    return html_table("Latency of completed requests, ms", f"<th></th>{head}", rows)


def _remarks_table(summary: Summary) -> str:
    """Loads, faults, requests that did not complete and why: what has no tile."""
    lines = remarks(summary)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(text)}</td></tr>'
        for name, text, _ in lines
    )
    return html_table("What else happened", "", rows) if lines else ""


def _energy_table(summary: Summary) -> str:
    if summary.energy_j is None:
        return ""
    total = sum(summary.energy_j.values())
    seconds = summary.simulated_s
    parts = {**summary.energy_j, "total": total}
    rows = "".join(
        f'<tr><th scope="row">{html.escape(part)}</th><td>{number(joule / 1e3)}</td>'
        f"<td>{number(joule / seconds if seconds else 0.0)}</td>"
        f"<td>{joule / total if total else 0:.1%}</td></tr>"
        for part, joule in parts.items()
    )
    head = "<th></th>" + "".join(
        f'<th scope="col">{name}</th>' for name in ("kJ", "mean W", "share")
    )
    return html_table("Energy by part of the machines", head, rows)


def html_table(caption: str, head: str, rows: str) -> str:
    """A table that scrolls inside its own box, never the page."""
    label = html.escape(caption, quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def charts_section(section: str, title: str, charts: Sequence[Chart], below: str) -> str:
    """A section of the page: a figure for each chart, then what stands below."""
    figures = "".join(
        f'<figure class="{"wide" if chart.is_wide else ""}"><figcaption>{html.escape(chart.title)}'
        f"{f' <span>{html.escape(chart.note)}</span>' if chart.note else ''}</figcaption>"
        f'<div class="chart" id="chart-{chart.chart_id}" tabindex="0" role="img" '
        f'aria-label="{html.escape(chart.title, quote=True)}" style="height:{chart.height}px">'
        "</div></figure>"
        for chart in charts
    )
    grid = f'<div class="grid">{figures}</div>'
    return f'<section id="{section}"><h2>{title}</h2>{grid}{below}</section>'


def _below(section: str, run: RunData) -> str:
    if section == "replicas":
        return _transition_table(run) + _plan_table(run)
    return _slowest_table(run) if section == "slowest" else ""


def _transition_table(run: RunData) -> str:
    return _fold(
        "Changes of state",
        ("s", "replica", "from", "to", "by", "cause"),
        [
            (f"{row.time_ns / 1e9:.6f}", row.replica, row.old, row.new, row.writer, row.cause)
            for row in run.transitions
            if row.old
        ],
    )


def _plan_table(run: RunData) -> str:
    """What the planner wanted, the numbers behind it, and what was done."""
    plans = [mark for mark in run.marks if mark.kind == "plan"]
    return _fold(
        "Decisions of the planner",
        ("s", "wanted, and the numbers behind it", "done"),
        [
            (f"{mark.time_ns / 1e9:.6f}", *mark.text.partition("; ")[::2])
            for mark in plans[:_TRANSITIONS_MAX]
        ],
        len(plans),
    )


def _fold(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], count: int = 0
) -> str:
    """A table behind a line that opens it; nothing without rows. `count`: of all rows."""
    if not rows:
        return ""
    count = max(count, len(rows))
    shown = rows[:_TRANSITIONS_MAX]
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in shown
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    said = f"{count:,}" if count == len(shown) else f"first {len(shown)} of {count:,}"
    body = html_table(title, head, cells)
    return f"<details><summary>{title} ({said})</summary>{body}</details>"


def _slowest_table(run: RunData) -> str:
    columns = {
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
        "e2e": "E2E, ms",
    }
    head = "".join(f'<th scope="col">{name}</th>' for name in columns.values())
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[key])}</td>" for key in columns) + "</tr>"
        for row in slowest_rows(run)
    )
    body = html_table("Slowest requests", head, rows)
    return f"<details><summary>As a table</summary>{body}</details>"


def _cell(value: float | int) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _definitions(summary: Summary) -> str:
    items = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
        for name, text in summary.definitions.items()
    )
    return f'<details id="definitions"><summary>Definitions</summary><dl>{items}</dl></details>'
