"""The charts of a run, aggregated so that a page stays small.

    charts = run_charts(read_run(directory))        # list[Chart], those that the files allow

Every chart has a fixed upper size whatever the number of requests: distributions become 300
quantiles, pictures over time at most 120 x 40 cells, time series at most 800 points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.report.chart import (
    PALETTE,
    TEXT_COLOUR,
    Axis,
    Chart,
    Floats,
    Heat,
    Kind,
    Limit,
    Series,
    Spans,
    log_axis,
    short,
    spread_axis,
)
from emu.report.rundata import RunData, Transition
from emu.units import NS_PER_MS, NS_PER_S

# --- timelines: the state of every replica at every instant; GPUs by role against what arrives ----
STATE_COLOURS: Final = {
    "inactive": "#9aa0a6",
    "loading_prefill": "#f2c14e",
    "loading_decode": "#d9a441",
    "loading_colocated": "#e8b64c",
    "prefill": "#3b82f6",
    "new_prefill": "#60a5fa",
    "refractory_prefill": "#93c5fd",
    "old_prefill": "#1d4ed8",
    "decode": "#10b981",
    "mutating_to_decode": "#0f766e",
    "aus_prefill": "#6366f1",
    "aus_decode": "#34d399",
    "colocated": "#22a6b3",
    "shutting_prefill": "#a78bfa",
    "shutting_decode": "#c084fc",
    "shutting_null": "#d8b4fe",
    "shutting_colocated": "#b78af0",
    "failed": "#ef4444",
}
OTHER_COLOUR: Final = "#6b7280"
ROLE_COLOURS: Final = {  # what is not a state by itself
    **STATE_COLOURS,
    "loading": STATE_COLOURS["loading_prefill"],
    "draining": STATE_COLOURS["shutting_prefill"],
    "spare": STATE_COLOURS["shutting_null"],
    "queue": STATE_COLOURS["inactive"],
    "migration": "#f28e2b",
}
MARKS: Final = {
    "fault": ("cross", "#d62728"),
    "recovery": ("star", "#2ca02c"),
    "plan": ("down", "#7f3fbf"),
    "loaded": ("up", "#1f77b4"),
    "relay": ("diamond", "#e69f00"),
    "host_cache": ("square", "#8c564b"),
    "command": ("pin", "#17789c"),
}
"""Kind of event -> symbol and color; each kind has a row of its own above the replicas."""
_OTHER_MARK: Final = ("circle", "#6b7280")
_SEGMENTS_MAX: Final = 6_000
_MARKS_MAX: Final = 2_000
_STEPS_MAX: Final = 1_200
_RATE_CELLS: Final = 120
_SERVING: Final = ("prefill", "decode", "colocated")


class Segment(msgspec.Struct, frozen=True):
    """A replica in one state, from start to end."""

    replica: int
    state: str
    start_ns: int
    end_ns: int
    writer: str
    cause: str


def segments(transitions: Sequence[Transition], end_ns: int) -> list[Segment]:
    """What lies between the transitions of each replica, up to the end of the run."""
    by_replica: dict[int, list[Transition]] = {}
    for transition in transitions:
        by_replica.setdefault(transition.replica, []).append(transition)
    result = []
    for replica in sorted(by_replica):
        rows = by_replica[replica]
        first = rows[0]
        if first.old and first.time_ns > 0:
            result.append(Segment(replica, first.old, 0, first.time_ns, "", "before"))
        ends = [*(row.time_ns for row in rows[1:]), max(end_ns, rows[-1].time_ns)]
        for row, until_ns in zip(rows, ends, strict=True):
            result.append(Segment(replica, row.new, row.time_ns, until_ns, row.writer, row.cause))
    return result


def run_segments(run: RunData) -> list[Segment]:
    """All stretches of a run that last."""
    end_ns = round(run.summary.simulated_s * NS_PER_S)
    return [part for part in segments(run.transitions, end_ns) if part.end_ns > part.start_ns]


# --- states --------------------------------------------------------------------------------------
def state_timeline(run: RunData) -> list[Chart]:
    """What every replica was when, with the events above it; nothing without transitions."""
    if not run.transitions:
        return []
    parts = run_segments(run)
    note = "color: state; hover tells what changed it and why"
    if len(parts) > _SEGMENTS_MAX:
        note += f"; the {_SEGMENTS_MAX:,} longest of {len(parts):,} stretches are drawn"
        parts = sorted(parts, key=lambda part: (part.start_ns - part.end_ns, part.replica))
        parts = parts[:_SEGMENTS_MAX]
    replicas = sorted({transition.replica for transition in run.transitions})
    kinds = list(dict.fromkeys(mark.kind for mark in run.marks))
    names = [*kinds, *map(str, replicas)]
    row_of = {replica: len(kinds) + index for index, replica in enumerate(replicas)}
    chart = Chart(
        chart_id="states",
        section="replicas",
        title="State of every replica",
        note=note,
        x=run.time_axis("s"),
        y=Axis(title="replica", names=names, inverse=True),
        spans=_spans(parts, row_of),
        series=_marks(run, kinds),
        height=min(900, 150 + 18 * len(names)),
        is_wide=True,
        time=True,
        slider=True,
        row="replica",
    )
    return [chart]


def _spans(parts: Sequence[Segment], row_of: dict[int, int]) -> Spans:
    seen = {part.state for part in parts}
    states = [*(state for state in STATE_COLOURS if state in seen)]
    states += sorted(seen - set(STATE_COLOURS))
    texts: dict[str, int] = {}
    rows = []
    for part in parts:
        text = f"by {part.writer or '-'}: {part.cause or '-'}"
        place = texts.setdefault(text, len(texts))
        start, end = _seconds(part.start_ns), _seconds(part.end_ns)
        rows.append((start, end, row_of[part.replica], states.index(part.state), place))
    kinds = [Kind(name=state, color=STATE_COLOURS.get(state, OTHER_COLOUR)) for state in states]
    return Spans(kinds=kinds, rows=rows, texts=list(texts))


def _marks(run: RunData, kinds: Sequence[str]) -> list[Series]:
    """Faults and decisions above the replicas, a row and a symbol for each kind."""
    result = []
    for row, kind in enumerate(kinds):
        symbol, color = MARKS.get(kind, _OTHER_MARK)
        points = [mark for mark in run.marks[:_MARKS_MAX] if mark.kind == kind]
        result.append(
            Series(
                name=kind,
                x=[_seconds(mark.time_ns) for mark in points],
                y=[row] * len(points),
                color=color,
                shape="points",
                symbol=symbol,
                size=10,
                text=[
                    f"{kind} {mark.target}: {mark.text}" if mark.target else f"{kind}: {mark.text}"
                    for mark in points
                ],
            )
        )
    return [one for one in result if one.x]


# --- GPUs by role --------------------------------------------------------------------------------
def role_of(state: str) -> str:
    """What a replica in a state does for the cluster, in one word."""
    if state.startswith("loading"):
        return "loading"
    if state.startswith("shutting"):
        return "draining"
    for role in _SERVING:
        if role in state and state != "mutating_to_decode":
            return role
    return "decode" if state == "mutating_to_decode" else state


def gpu_steps(run: RunData) -> tuple[list[float], dict[str, Floats]]:
    """Instants in seconds at which the use of GPUs changes, and GPUs of each role from then on."""
    parts = run_segments(run)
    times = np.unique(np.array([part.start_ns for part in parts], dtype=np.int64))
    found: dict[str, Floats] = {}
    for part in parts:
        role = role_of(part.state)
        if role == "inactive":
            continue
        counts = found.setdefault(role, np.zeros(len(times) + 1))
        gpus = run.gpus_of(part.replica)
        counts[np.searchsorted(times, part.start_ns)] += gpus
        counts[np.searchsorted(times, part.end_ns)] -= gpus
    order = [role for role in ROLE_COLOURS if role in found] + sorted(
        set(found) - set(ROLE_COLOURS)
    )
    steps = {role: np.cumsum(found[role])[: len(times)] for role in order}
    return [_seconds(time) for time in times.tolist()], steps


def gpus_over_time(run: RunData) -> list[Chart]:
    """GPUs by role against the requests that arrive: the picture of autoscaling."""
    if not run.transitions:
        return []
    times, steps = gpu_steps(run)
    if not steps:
        return []
    stride = -(-len(times) // _STEPS_MAX)
    series = [
        Series(
            name=role,
            x=[*times[::stride], round(run.end_s, 6)],
            y=[*counts[::stride].tolist(), float(counts[-1])],
            color=ROLE_COLOURS.get(role, OTHER_COLOUR),
            shape="after",
            area=True,
        )
        for role, counts in steps.items()
    ]
    arrivals = run.requests["arrival_ns"] / NS_PER_S
    rate_axis = None
    if len(arrivals):
        counts, edges = np.histogram(arrivals, bins=_RATE_CELLS, range=(0, run.end_s))
        rates = counts / (run.end_s / _RATE_CELLS)
        series.append(
            Series(
                name="arrivals",
                x=short(edges[:-1]),
                y=short(rates),
                color=TEXT_COLOUR if rates.any() else OTHER_COLOUR,
                shape="after",
                width=2.0,
                right=True,
            )
        )
        rate_axis = Axis(title="requests/s", unit="requests/s", low=0)
    chart = Chart(
        chart_id="gpus",
        section="replicas",
        title="GPUs by role, and the requests that arrive",
        note="areas: GPUs in use; line: arrivals per second (right axis)",
        x=run.time_axis("s"),
        y=Axis(title="GPUs", unit="GPUs", low=0),
        y2=rate_axis,
        series=series,
        height=320,
        is_wide=True,
        time=True,
    )
    return [chart]


def _seconds(time_ns: int) -> float:
    return round(time_ns / NS_PER_S, 6)


# --- charts ---------------------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------
# Charts of latencies: distributions and pictures over time. Pure.
#
# Every chart has a fixed upper size whatever the number of requests: a distribution becomes 300
# quantiles, a picture over time at most 120 x 40 cells.

LATENCY_NAMES: Final = {
    "ttft": ("TTFT", "ttft_ns", "time to first token"),
    "tpot": ("TPOT", "tpot_ns", "time per output token"),
    "itl": ("ITL", "", "gap between tokens"),
    "e2e": ("E2E", "latency_ns", "arrival to last token"),
}
STATS: Final = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
TIME_CELLS: Final = 120
_QUANTILES: Final = 300
_VALUE_CELLS: Final = 40
_STAT_CELLS: Final = 60
_STAT_COLOR: Final = "#d55e00"


def cdf_points(values: Floats) -> tuple[Floats, Floats]:
    """Quantiles of a distribution, closer together towards the end."""
    body = np.linspace(0, 0.99, _QUANTILES - 60)
    tail = 1 - np.geomspace(0.01, 0.0001, 60)
    parts = np.concatenate([body, tail, [1.0]])
    return np.quantile(values, parts), parts


def gap_cdf(run: RunData) -> tuple[Floats, Floats]:
    """The same for inter-token gaps, from itl.json; ms."""
    if run.gaps is None or not run.gaps.values_ns:
        return np.zeros(0), np.zeros(0)
    ends = np.cumsum(np.array(run.gaps.counts, dtype=np.float64))
    parts = ends / ends[-1]
    values = np.array(run.gaps.values_ns, dtype=np.float64) / NS_PER_MS
    _, parts_wanted = cdf_points(np.zeros(1))
    picks = np.unique(np.minimum(np.searchsorted(parts, parts_wanted), len(values) - 1))
    return values[picks], parts[picks]


def latency_cdf(run: RunData, name: str) -> tuple[Floats, Floats]:
    """Values in ms and the part of requests (or gaps) at or below them."""
    if name == "itl":
        return gap_cdf(run)
    values = run.completed(LATENCY_NAMES[name][1]).astype(np.float64) / NS_PER_MS
    return cdf_points(values) if len(values) else (values, values)


def cdf_chart(
    name: str, curves: Sequence[tuple[str, Floats, Floats]], limit_ms: float | None, height: int
) -> Chart | None:
    """Distributions of one latency in one chart: (name, values in ms, parts); None without any."""
    known = [curve for curve in curves if len(curve[1])]
    if not known:
        return None
    label, _, meaning = LATENCY_NAMES[name]
    low = min(float(values.min()) for _, values, _ in known)
    high = max(float(values.max()) for _, values, _ in known)
    series = [
        Series(
            name=curve,
            x=short(values),
            y=short(parts * 100),
            color=PALETTE[index % len(PALETTE)],
            width=2.0,
        )
        for index, (curve, values, parts) in enumerate(known)
    ]
    return Chart(
        chart_id=f"cdf-{name}",
        section="latency",
        title=f"{label}: {meaning}",
        x=spread_axis(low, high, "ms", "ms"),
        y=Axis(
            title="% of " + ("gaps" if name == "itl" else "requests"), unit="%", low=0, high=100
        ),
        series=series,
        limits=[Limit(axis="x", value=limit_ms, text=f"objective {limit_ms:g}")]
        if limit_ms
        else [],
        height=height,
    )


def limits_ms(run: RunData) -> dict[str, float | None]:
    """Objectives by latency."""
    slo = run.summary.slo
    return {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2e": slo.e2e_ms}


def distribution_charts(run: RunData) -> list[Chart]:
    """One distribution for each latency."""
    limits = limits_ms(run)
    charts = [
        cdf_chart(name, [(label, *latency_cdf(run, name))], limits.get(name), 260)
        for name, (label, _, _) in LATENCY_NAMES.items()
    ]
    return [chart for chart in charts if chart is not None]


# --- latencies over time -------------------------------------------------------------------------
def heat_charts(run: RunData) -> list[Chart]:
    """Latencies over time: how many requests, and the chosen percentile as a line."""
    charts = []
    arrivals_s = run.completed("arrival_ns") / NS_PER_S
    limits = limits_ms(run)
    for name, (label, column, _) in LATENCY_NAMES.items():
        series: list[Series] = []
        if name == "itl":
            figure = _gap_heat(run)
        elif len(arrivals_s):
            values_ms = run.completed(column) / NS_PER_MS
            figure = _heat(arrivals_s, values_ms)
            series = [] if figure is None else _percentiles(arrivals_s, values_ms, run.end_s)
        else:
            figure = None
        if figure is None:
            continue
        x, y, z = figure
        places = np.argwhere(z > 0)
        cells = [(int(i), int(j), float(z[j, i])) for j, i in places.tolist()]
        unit = "gaps" if name == "itl" else "requests"
        limit = limits.get(name)
        charts.append(
            Chart(
                chart_id=f"heat-{name}",
                section="over-time",
                title=f"{label} over time",
                note=f"color: {unit} per cell" + ("; line: the chosen percentile" * bool(series)),
                x=run.time_axis("token at, s" if name == "itl" else "arrival, s"),
                y=log_axis(float(y[0]), float(y[-1]), "ms", "ms"),
                heat=Heat(x=short(x, 7), y=short(y), cells=cells, unit=unit, top=float(z.max())),
                series=series,
                limits=[Limit(axis="y", value=limit, text=f"objective {limit:g}")] if limit else [],
                time=True,
            )
        )
    return charts


def _percentiles(times_s: Floats, values_ms: Floats, end_s: float) -> list[Series]:
    """Each percentile of what arrived in each of 60 stretches of the run."""
    cells = np.minimum((times_s / end_s * _STAT_CELLS).astype(np.int64), _STAT_CELLS - 1)
    order = np.argsort(cells, kind="stable")
    cells, values = cells[order], values_ms[order]
    starts = np.flatnonzero(np.r_[True, np.diff(cells) > 0])
    groups = np.split(values, starts[1:])
    middles = (cells[starts] + 0.5) * end_s / _STAT_CELLS
    return [
        Series(
            name=stat,
            x=short(middles),
            y=short([max(float(np.percentile(group, part)), 1e-3) for group in groups]),
            color=_STAT_COLOR,
            width=2.0,
            stat=stat,
        )
        for stat, part in STATS.items()
    ]


def _heat(times_s: Floats, values_ms: Floats) -> tuple[Floats, Floats, NDArray[Any]] | None:
    """Edges of both axes and counts[value, time]; zeros join the lowest cell."""
    positive = values_ms[values_ms > 0]
    if not len(positive):
        return None
    low, high = float(positive.min()), float(positive.max())
    high = max(high, low * 1.05)
    y = np.geomspace(low * 0.999, high * 1.001, _VALUE_CELLS + 1)
    end = max(float(times_s.max()), 1e-3)
    x = np.linspace(min(0.0, float(times_s.min())), end * 1.000001, TIME_CELLS + 1)
    counts, _, _ = np.histogram2d(np.maximum(values_ms, low), times_s, bins=(y, x))
    return x, y, counts


def _gap_heat(run: RunData) -> tuple[Floats, Floats, NDArray[Any]] | None:
    gaps = run.gaps
    if gaps is None or not gaps.heat:
        return None
    cells = np.array(gaps.heat, dtype=np.int64)
    columns = int(cells[:, 0].max()) + 1
    fold = -(-columns // TIME_CELLS)
    low, high = int(cells[:, 1].min()), int(cells[:, 1].max())
    counts = np.zeros((high - low + 1, -(-columns // fold)), dtype=np.int64)
    np.add.at(counts, (cells[:, 1] - low, cells[:, 0] // fold), cells[:, 2])
    x = np.arange(counts.shape[1] + 1) * fold * gaps.heat_width_ns / NS_PER_S
    y = 2.0 ** (np.arange(low, high + 2) / gaps.heat_bins_per_octave) / NS_PER_MS
    return x, y, counts


# --- The charts of a run --------------------------------------------------------------------------

_POINTS_MAX: Final = 800
_REPLICA_ROWS_MAX: Final = 200
_SLOWEST: Final = 25
STAGES: Final = ("queue", "prefill", "migration", "decode")

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
    ("preemptions", "Preemptions per interval", "", {"preemptions": "preemptions"}, ""),
)
"""Chart id, title, note, column -> label, unit."""


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
        # Curves and charts of nothing but zeros take room and say nothing.
        curves = [curve for curve in series_lines(run.series, columns) if any(curve.y)]
        if curves:
            charts.append(
                Chart(
                    chart_id=name,
                    section="load",
                    title=title,
                    note=note,
                    x=run.time_axis("s"),
                    y=Axis(title=unit, unit=unit, low=0),
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


# --- replicas, GPUs, caches ----------------------------------------------------------------------
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
    note = f"{'% of ' if has_totals else ''}KV blocks in use, sampled; gray: inactive"
    if len(replicas) > len(shown):
        note += f"; first {len(shown)} of {len(replicas)} replicas"
    top = 100.0 if has_totals else max((value for _, _, value in cells), default=1.0)
    chart = Chart(
        chart_id="kv-replicas",
        section="replicas",
        title="KV cache by replica",
        note=note,
        x=run.time_axis("s"),
        y=Axis(title="replica", names=[str(replica) for replica in shown], inverse=True),
        heat=Heat(x=short(edges_s, 7), y=[], cells=cells, unit=unit, top=top),
        height=min(620, 130 + 14 * len(shown)),
        is_wide=True,
        time=True,
        back=True,
        row="replica",
    )
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


# --- replicas as a table -------------------------------------------------------------------------
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


# --- slowest requests ----------------------------------------------------------------------------
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
