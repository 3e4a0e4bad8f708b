"""The charts of a run, aggregated so that a page stays small.

    charts = run_charts(read_run(directory))        # list[Chart], those that the files allow

Every chart has a fixed upper size whatever the number of requests: distributions become 300
quantiles, pictures over time at most 120 x 40 cells, time series at most 800 points.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emu.report.latency_charts import TIME_CELLS, distribution_charts, heat_charts
from emu.report.page.chart import PALETTE, Axis, Chart, Floats, Heat, Series, short
from emu.report.rundata import RunData
from emu.report.state_charts import (
    OTHER_COLOUR,
    ROLE_COLOURS,
    gpus_over_time,
    role_of,
    run_segments,
    state_timeline,
)
from emu.units import NS_PER_MS, NS_PER_S

_POINTS_MAX: Final = 800
_REPLICA_ROWS_MAX: Final = 200
_SLOWEST: Final = 25
STAGES: Final = ("queue", "prefill", "migration", "decode")


class _Shown(NamedTuple):
    """A chart of columns of the time series."""

    chart_id: str
    title: str
    note: str
    columns: dict[str, str]
    """Column -> label."""
    unit: str


_SERIES: Final = (
    _Shown("queue", "Requests waiting", "", {"waiting": "waiting"}, "requests"),
    _Shown(
        "queue-tokens",
        "Prompt tokens waiting",
        "",
        {"waiting_prefill_tokens": "waiting"},
        "tokens",
    ),
    _Shown(
        "running",
        "Sequences running and migrating",
        "",
        {"running": "running", "migrating": "migrating"},
        "sequences",
    ),
    _Shown(
        "tokens",
        "Tokens per second",
        "recomputed prompt tokens included",
        {"prefill_tokens_per_s": "prompt", "decode_tokens_per_s": "output"},
        "tokens/s",
    ),
    _Shown("blocks", "KV blocks", "", {"used_blocks": "used", "total_blocks": "total"}, "blocks"),
    _Shown("preemptions", "Preemptions per interval", "", {"preemptions": "preemptions"}, ""),
)


def run_charts(run: RunData) -> list[Chart]:
    """All charts of a report, in reading order."""
    if not run.summary.simulated_s:
        return []  # everything ended as it came
    return [
        *distribution_charts(run),
        *heat_charts(run),
        *gpus_over_time(run),
        *state_timeline(run),
        *_kv_by_replica(run),
        *_series_charts(run),
        *_gpu_time(run),
        *_prefix_hits(run),
        *_slowest(run),
    ]


def _series_charts(run: RunData) -> list[Chart]:
    if not run.series:
        return []
    kinds = [name.removeprefix("flows_") for name in run.series if name.startswith("flows_")]
    specs = (
        *_SERIES,
        _Shown("flows", "Network flows under way", "", {f"flows_{k}": k for k in kinds}, "flows"),
        _Shown(
            "flow-bytes",
            "Network traffic",
            "",
            {f"{kind}_bytes_per_s": kind for kind in kinds},
            "GB/s",
        ),
    )
    charts = []
    for spec in specs:
        # Curves and charts of nothing but zeros take room and say nothing.
        curves = [curve for curve in series_lines(run.series, spec.columns) if any(curve.y)]
        if curves:
            charts.append(
                Chart(
                    chart_id=spec.chart_id,
                    section="load",
                    title=spec.title,
                    note=spec.note,
                    x=run.time_axis("s"),
                    y=Axis(title=spec.unit, unit=spec.unit, low=0),
                    series=curves,
                    time=True,
                )
            )
    return charts


def series_lines(series: dict[str, Floats], columns: dict[str, str]) -> list[Series]:
    """Columns of timeseries.csv (column -> name) as curves of at most 800 points."""
    time = short(_thinned(series["time_ns"] / NS_PER_S), 8)
    return [
        Series(
            name=label,
            x=time,
            y=short(_thinned(series[column]) / (1e9 if column.endswith("_bytes_per_s") else 1)),
            color=PALETTE[index % len(PALETTE)],
            # A rate is that of the interval before its instant, a state lasts until the next.
            shape="before" if column.endswith("_per_s") else "after",
        )
        for index, (column, label) in enumerate(columns.items())
        if column in series
    ]


def _thinned(values: Floats) -> Floats:
    """The values as at most 800 means of equal stretches."""
    stride = -(-len(values) // _POINTS_MAX)
    if stride <= 1:
        return values
    starts = np.arange(0, len(values), stride)
    totals = np.add.reduceat(values, starts)
    counts = np.minimum(stride, len(values) - starts)
    means: Floats = totals / counts
    return means


def _kv_by_replica(run: RunData) -> list[Chart]:
    """KV blocks in use, where a replica holds any: a cell of an inactive replica stays empty."""
    rows = run.replicas
    if rows is None or not rows.used_blocks.any():
        return []
    replicas = np.unique(rows.replica)
    shown = replicas[:_REPLICA_ROWS_MAX].tolist()
    edges_s = np.linspace(0, run.end_s, TIME_CELLS + 1)
    middles_s = (edges_s[1:] + edges_s[:-1]) / 2
    has_totals = bool(rows.total_blocks.any())
    is_off = _off(run, middles_s)
    cells: list[tuple[int, int, float]] = []
    for row, replica in enumerate(shown):
        mine = rows.replica == replica
        used = rows.used_blocks[mine].astype(np.float64)
        if has_totals:
            used = 100 * used / np.maximum(rows.total_blocks[mine], 1)
        # The last row at or before the middle of a cell still holds there.
        at = np.searchsorted(rows.time_ns[mine] / NS_PER_S, middles_s, side="right") - 1
        off = is_off.get(replica, np.zeros(TIME_CELLS, dtype=np.bool_))
        cells += [
            (cell, row, float(f"{used[i]:.4g}"))
            for cell, i in enumerate(at.tolist())
            if i >= 0 and not off[cell]
        ]
    unit = "%" if has_totals else "blocks"
    top = 100.0 if has_totals else max((value for _, _, value in cells), default=1.0)
    chart = Chart(
        chart_id="kv-replicas",
        section="replicas",
        title="KV cache by replica",
        note=f"{'% of ' if has_totals else ''}KV blocks in use, sampled; gray: inactive",
        x=run.time_axis("s"),
        y=Axis(title="replica", names=[str(replica) for replica in shown], inverse=True),
        heat=Heat(x=short(edges_s, 7), y=[], cells=cells, unit=unit, top=top),
        height=min(620, 130 + 14 * len(shown)),
        is_wide=True,
        time=True,
        back=True,
        row="replica",
    )
    if len(replicas) > len(shown):
        chart.note += f"; first {len(shown)} of {len(replicas)} replicas"
    return [chart]


def _off(run: RunData, instants_s: Floats) -> dict[int, NDArray[np.bool_]]:
    """For each replica with transitions: at which instants it holds no KV cache at all."""
    found: dict[int, NDArray[np.bool_]] = {}
    for part in run_segments(run):
        off = found.setdefault(part.replica, np.zeros(len(instants_s), dtype=np.bool_))
        if part.state in ("inactive", "failed"):
            first, last = np.searchsorted(
                instants_s, (part.start_ns / NS_PER_S, part.end_ns / NS_PER_S)
            )
            off[first:last] = True
    return found


def _gpu_time(run: RunData) -> list[Chart]:
    roles = {role: s for role, s in run.summary.gpu_seconds.by_role.items() if s}
    if not roles:
        return []
    idle = run.summary.gpu_seconds.idle
    chart = Chart(
        chart_id="gpu-time",
        section="resources",
        title="GPU time by role",
        note=f"total {run.summary.gpu_seconds.total:,.1f} s; {idle:,.1f} s serving without a batch",
        x=Axis(title="GPU seconds", unit="s", low=0),
        y=Axis(names=list(roles), inverse=True),
        series=[
            Series(
                name=role,
                x=[s if other == role else 0.0 for other in roles],
                y=[],
                color=ROLE_COLOURS.get(role, OTHER_COLOUR),
                shape="bar",
            )
            for role, s in roles.items()
        ],
    )
    return [chart]


def _prefix_hits(run: RunData) -> list[Chart]:
    hits = run.summary.prefix_hit_tokens
    if not hits.get("total"):
        return []
    names = {"npu": "GPU memory", "storage": "tiers behind it"}
    # Engines that do not split hits by tier report the total only.
    split = {names[tier]: hits.get(tier, 0) for tier in names}
    rest = hits["total"] - sum(split.values())
    bars = {name: tokens for name, tokens in {**split, "not split": rest}.items() if tokens > 0}
    chart = Chart(
        chart_id="prefix-hits",
        section="resources",
        title="Prefix hits by tier",
        note=f"{run.summary.prefix_hit_rate:.1%} of prompt tokens",
        x=Axis(title="tokens", unit="tokens", low=0),
        y=Axis(names=list(bars), inverse=True),
        series=[Series(x=[float(v) for v in bars.values()], y=[], color=PALETTE[2], shape="bar")],
    )
    return [chart]


def replica_rows(run: RunData) -> list[dict[str, float | int | str]]:
    """For each replica: its GPUs, time by role, requests and their latency."""
    seconds: dict[int, dict[str, float]] = {}
    for part in run_segments(run):
        mine = seconds.setdefault(part.replica, {})
        role = role_of(part.state)
        mine[role] = mine.get(role, 0.0) + (part.end_ns - part.start_ns) / NS_PER_S
    first, last = run.completed("instance_id"), run.completed("decode_instance_id")
    ttft_ms, tpot_ms = (run.completed(name) / NS_PER_MS for name in ("ttft_ns", "tpot_ns"))
    tokens = run.completed("decode_toks")
    names = sorted({*seconds, *np.unique(first[first >= 0]).tolist()})
    rows: list[dict[str, float | int | str]] = []
    for replica in names[:_REPLICA_ROWS_MAX]:
        begun, ended = first == replica, last == replica
        roles = {r: s for r, s in seconds.get(replica, {}).items() if s}
        rows.append(
            {
                "replica": replica,
                "GPUs": run.gpus_of(replica),
                "role and seconds": ", ".join(f"{r} {s:,.1f}" for r, s in roles.items()) or "-",
                "first tokens": int(begun.sum()),
                "TTFT p50, ms": _percentile(ttft_ms[begun], 50),
                "TTFT p99, ms": _percentile(ttft_ms[begun], 99),
                "last tokens": int(ended.sum()),
                "output tokens": int(tokens[ended].sum()),
                "TPOT p50, ms": _percentile(tpot_ms[ended], 50),
                "TPOT p99, ms": _percentile(tpot_ms[ended], 99),
            }
        )
    return rows


def _percentile(values: Floats, part: float) -> float | str:
    return float(np.percentile(values, part)) if len(values) else "-"


def slowest_rows(run: RunData, column: str = "latency_ns") -> list[dict[str, float | int]]:
    """The requests with the longest E2E (or `ttft_ns`), with the stages of their way in ms."""
    columns = {name: run.completed(name) for name in run.requests}
    order = np.lexsort((columns["request_id"], -columns[column]))[:_SLOWEST]
    rows = []
    for index in order.tolist():
        row = {name: int(values[index]) for name, values in columns.items()}
        queue = max(row["queue_ns"], 0)
        migration = max(row["migration_ns"], 0)
        rows.append(
            {
                **{k: row[k] for k in ("request_id", "prompt_toks", "decode_toks", "preemptions")},
                "arrival_s": row["arrival_ns"] / NS_PER_S,
                "first": row["instance_id"],
                "last": row["decode_instance_id"],
                "queue": queue / NS_PER_MS,
                "prefill": (row["ttft_ns"] - queue) / NS_PER_MS,
                "migration": migration / NS_PER_MS,
                "decode": (row["latency_ns"] - row["ttft_ns"] - migration) / NS_PER_MS,
                "ttft": row["ttft_ns"] / NS_PER_MS,
                "e2e": row["latency_ns"] / NS_PER_MS,
            }
        )
    return rows


def _slowest(run: RunData) -> list[Chart]:
    """The TTFT tail with what it waited for, and the longest requests by stage."""
    charts = []
    for name, title, column, stages in (
        ("slowest-ttft", "Slowest first tokens", "ttft_ns", STAGES[:2]),
        ("slowest", "Longest requests", "latency_ns", STAGES),
    ):
        rows = slowest_rows(run, column)
        if rows:
            charts.append(
                Chart(
                    chart_id=name,
                    section="slowest",
                    title=title,
                    note="by stage; queue is the time until first scheduled",
                    x=Axis(title="ms", unit="ms", low=0),
                    y=Axis(
                        title="request",
                        names=[str(row["request_id"]) for row in rows],
                        inverse=True,
                    ),
                    series=[
                        Series(
                            name=stage,
                            x=short([row[stage] for row in rows]),
                            y=[],
                            color=ROLE_COLOURS[stage],
                            shape="bar",
                        )
                        for stage in stages
                    ],
                    height=100 + 18 * len(rows),
                )
            )
    return charts
