"""The charts of a run as plotly figures in plain dicts, aggregated so that a page stays small.

    charts = run_charts(read_run(directory))        # list[Chart], those that the files allow

Every chart has a fixed upper size whatever the number of requests: distributions become 300
quantiles, pictures over time at most 120 x 40 cells, time series at most 800 points. Colours and
fonts that depend on light or dark come from the page's script.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from emu.report.distributions import (
    PALETTE,
    TIME_CELLS,
    Chart,
    Floats,
    distribution_charts,
    heat_charts,
    short,
)
from emu.report.rundata import RunData
from emu.report.timeline import OTHER_COLOUR, ROLE_COLOURS, state_timeline
from emu.units import NS_PER_MS, NS_PER_S

_POINTS_MAX: Final = 800
_REPLICA_ROWS_MAX: Final = 200
_SLOWEST: Final = 25

_SERIES: Final[tuple[tuple[str, str, str, dict[str, str], str], ...]] = (
    ("queue", "Requests waiting", "", {"waiting": "waiting"}, "requests"),
    (
        "queue-tokens",
        "Prompt tokens waiting",
        "",
        {"waiting_prefill_tokens": "waiting"},
        "tokens",
    ),
    (
        "running",
        "Sequences running and migrating",
        "",
        {"running": "running", "migrating": "migrating"},
        "sequences",
    ),
    (
        "tokens",
        "Tokens per second",
        "recomputed prompt tokens included",
        {"prefill_tokens_per_s": "prompt", "decode_tokens_per_s": "output"},
        "tokens/s",
    ),
    ("blocks", "KV blocks", "", {"used_blocks": "used", "total_blocks": "total"}, "blocks"),
    ("preemptions", "Preemptions per interval", "", {"preemptions": "n"}, "preemptions"),
)
"""Chart id, title, note, column -> label, unit."""


def run_charts(run: RunData) -> list[Chart]:
    """All charts of a report, in reading order."""
    if not run.summary.simulated_s:
        return []  # everything ended as it came
    charts = [*distribution_charts(run), *heat_charts(run)]
    timeline = state_timeline(run)
    if timeline is not None:
        charts.append(Chart("states", "replicas", *timeline))
    return [
        *charts,
        *_series_charts(run),
        *_kv_by_replica(run),
        *_gpu_time(run),
        *_prefix_hits(run),
        *_slowest(run),
    ]


# --- time series ---------------------------------------------------------------------------------
def _series_charts(run: RunData) -> list[Chart]:
    if not run.series:
        return []
    kinds = [name.removeprefix("flows_") for name in run.series if name.startswith("flows_")]
    specs = (
        *_SERIES,
        ("flows", "Network flows under way", "", {f"flows_{k}": k for k in kinds}, "flows"),
        (
            "flow-bytes",
            "Network traffic",
            "",
            {f"{kind}_bytes_per_s": kind for kind in kinds},
            "GB/s",
        ),
    )
    charts = []
    for name, title, note, columns, unit in specs:
        data = _lines(run.series, columns)
        # Curves and charts of nothing but zeros take room and say nothing.
        data = [trace for trace in data if any(trace["y"])]
        if not data:
            continue
        layout = {
            "xaxis": {"title": {"text": "s"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "showlegend": len(data) > 1,
            "hovermode": "x unified",
        }
        charts.append(Chart(name, "load", title, note, data, layout))
    return charts


def _lines(series: dict[str, Floats], columns: dict[str, str]) -> list[dict[str, Any]]:
    time = short(_thinned(series["time_ns"] / NS_PER_S), 8)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": label,
            "x": time,
            "y": short(_thinned(series[column]) / (1e9 if column.endswith("_bytes_per_s") else 1)),
            "line": {
                "color": PALETTE[index % len(PALETTE)],
                "width": 1.5,
                # A rate is that of the interval before its instant, a state lasts until the next.
                "shape": "vh" if column.endswith("_per_s") else "hv",
            },
        }
        for index, (column, label) in enumerate(columns.items())
        if column in series
    ]


def _thinned(values: Floats) -> Floats:
    """At most 800 points: means of equal stretches."""
    stride = -(-len(values) // _POINTS_MAX)
    if stride <= 1:
        return values
    starts = np.arange(0, len(values), stride)
    totals = np.add.reduceat(values, starts)
    counts = np.minimum(stride, len(values) - starts)
    means: Floats = totals / counts
    return means


# --- replicas, GPUs, caches ----------------------------------------------------------------------
def _kv_by_replica(run: RunData) -> list[Chart]:
    rows = run.replicas
    if rows is None or not rows.used_blocks.any():
        return []
    end_s = max(run.summary.simulated_s, float(rows.time_ns.max()) / NS_PER_S, 1e-3)
    replicas = np.unique(rows.replica)
    shown = replicas[:_REPLICA_ROWS_MAX]
    starts_s = np.arange(TIME_CELLS) * end_s / TIME_CELLS
    has_totals = bool(rows.total_blocks.any())
    grid = []
    for replica in shown.tolist():
        mine = rows.replica == replica
        times_s = rows.time_ns[mine] / NS_PER_S
        used = rows.used_blocks[mine].astype(np.float64)
        if has_totals:
            used = 100 * used / np.maximum(rows.total_blocks[mine], 1)
        # The last row at or before the middle of a cell still holds there.
        at = np.searchsorted(times_s, starts_s + end_s / TIME_CELLS / 2, side="right") - 1
        grid.append([None if i < 0 else float(f"{used[i]:.4g}") for i in at.tolist()])
    unit = "%" if has_totals else "blocks"
    trace = {
        "type": "heatmap",
        "x": short(starts_s, 7),
        "y": [int(replica) for replica in shown],
        "z": grid,
        "zmin": 0,
        **({"zmax": 100} if has_totals else {}),
        "colorbar": {"thickness": 8, "outlinewidth": 0},
        "hovertemplate": "replica %{y}, %{x:.5g} s: %{z:.4g} " + unit + "<extra></extra>",
    }
    note = f"{'% of ' if has_totals else ''}KV blocks in use, sampled"
    if len(replicas) > len(shown):
        note += f"; first {len(shown)} of {len(replicas)} replicas"
    layout = {
        "xaxis": {"title": {"text": "s"}},
        "yaxis": {
            "title": {"text": "replica"},
            "autorange": "reversed",
            "dtick": 1 if len(shown) <= 24 else None,
        },
    }
    height = min(620, 160 + 14 * len(shown))
    return [
        Chart("kv-replicas", "replicas", "KV cache by replica", note, [trace], layout, height, True)
    ]


def _gpu_time(run: RunData) -> list[Chart]:
    roles = {role: s for role, s in run.summary.gpu_seconds.by_role.items() if s}
    if not roles:
        return []
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(roles),
        "x": list(roles.values()),
        "marker": {"color": [ROLE_COLOURS.get(role, OTHER_COLOUR) for role in roles]},
        "hovertemplate": "%{y}: %{x:.5g} s<extra></extra>",
    }
    idle = run.summary.gpu_seconds.idle
    note = f"total {run.summary.gpu_seconds.total:,.1f} s; {idle:,.1f} s serving without a batch"
    layout = {"xaxis": {"title": {"text": "GPU seconds"}}, "yaxis": {"autorange": "reversed"}}
    return [Chart("gpu-time", "resources", "GPU time by role", note, [trace], layout)]


def _prefix_hits(run: RunData) -> list[Chart]:
    hits = run.summary.prefix_hit_tokens
    if not hits.get("total"):
        return []
    names = {"npu": "GPU memory", "storage": "tiers behind it"}
    # Engines that do not split hits by tier report the total only.
    split = {names[tier]: hits.get(tier, 0) for tier in names}
    rest = hits["total"] - sum(split.values())
    bars = {name: tokens for name, tokens in {**split, "not split": rest}.items() if tokens > 0}
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(bars),
        "x": list(bars.values()),
        "marker": {"color": PALETTE[2]},
        "hovertemplate": "%{y}: %{x:,} tokens<extra></extra>",
    }
    note = f"{run.summary.prefix_hit_rate:.1%} of prompt tokens"
    layout = {"xaxis": {"title": {"text": "tokens"}}, "yaxis": {"autorange": "reversed"}}
    return [Chart("prefix-hits", "resources", "Prefix hits by tier", note, [trace], layout)]


# --- slowest requests ----------------------------------------------------------------------------
def slowest_rows(run: RunData) -> list[dict[str, float | int]]:
    """The requests with the longest E2E, with the stages of their way in ms."""
    columns = {name: run.completed(name) for name in run.requests}
    e2e = columns["latency_ns"]
    order = np.lexsort((columns["request_id"], -e2e))[:_SLOWEST]
    rows = []
    for index in order.tolist():
        row = {name: int(column[index]) for name, column in columns.items()}
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
                "e2e": row["latency_ns"] / NS_PER_MS,
            }
        )
    return rows


def _slowest(run: RunData) -> list[Chart]:
    rows = slowest_rows(run)
    if not rows:
        return []
    names = [str(row["request_id"]) for row in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": stage,
            "y": names,
            "x": short([row[stage] for row in rows]),
            "marker": {"color": ROLE_COLOURS[stage]},
            "hovertemplate": f"request %{{y}}, {stage}: %{{x:.4g}} ms<extra></extra>",
        }
        for stage in ("queue", "prefill", "migration", "decode")
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "ms"}},
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "title": {"text": "request", "standoff": 14},
        },
        "showlegend": True,
    }
    height = 120 + 18 * len(rows)
    return [Chart("slowest", "slowest", "Slowest requests", "by stage", data, layout, height, True)]
