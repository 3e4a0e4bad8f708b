"""Pages for a browser without a network: `report.html` of a run, and a comparison of runs.

    path = write_report(directory)      # from the files of the directory alone

The page holds the tables as HTML (readable without scripts) and the charts' data as JSON. It says
nothing that changes from one run of the same config and seed to the next: no date, no output
directory, no wall time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.report.atomic import partial_name, write_text
from emu.report.drawn import NAME as DRAWS
from emu.report.drawn import interval_text, read_draws, share_text, shown
from emu.report.latency_charts import STATS
from emu.report.page.pages import page
from emu.report.run_charts import replica_rows, run_charts, slowest_rows
from emu.report.rundata import RunData, read_run
from emu.report.summary import STATISTICS, Summary
from emu.report.table import ends, latency_cells, number, remarks, wait_growth
from emu.report.what_ran import facts, flat_settings, origin, run_title

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
    changes = [row for row in run.transitions if row.old]
    plans = [mark for mark in run.marks if mark.kind == "plan"]
    by_replica = replica_rows(run)
    return page(
        "run.html",
        title=run_title(run),
        charts=run_charts(run),
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
        sections=_SECTIONS.items(),
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
