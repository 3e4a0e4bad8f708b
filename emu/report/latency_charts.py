"""Charts of latencies: distributions and pictures over time. Pure.

Every chart has a fixed upper size whatever the number of requests: a distribution becomes 300
quantiles, a picture over time at most 120 x 40 cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from emu.report.page.chart import (
    PALETTE,
    Axis,
    Chart,
    Floats,
    Heat,
    Limit,
    Series,
    log_axis,
    short,
    spread_axis,
)
from emu.report.rundata import RunData
from emu.units import NS_PER_MS, NS_PER_S

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


Grid = tuple[Floats, Floats, Floats | NDArray[np.int64]]
"""Edges of cells in both directions, and the counts in them."""


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
    name: str, curves: Sequence[tuple[str, Floats, Floats]], limit_ms: float | None = None
) -> Chart | None:
    """Distributions of one latency in one chart: (name, values in ms, parts); None without any."""
    known = [curve for curve in curves if len(curve[1])]
    if not known:
        return None
    label, _, meaning = LATENCY_NAMES[name]
    low = min(float(values.min()) for _, values, _ in known)
    high = max(float(values.max()) for _, values, _ in known)
    return Chart(
        chart_id=f"cdf-{name}",
        section="latency",
        title=f"{label}: {meaning}",
        x=spread_axis(low, high, "ms", "ms"),
        y=Axis(
            title="% of " + ("gaps" if name == "itl" else "requests"), unit="%", low=0, high=100
        ),
        series=[
            Series(
                name=curve,
                x=short(values),
                y=short(parts * 100),
                color=PALETTE[index % len(PALETTE)],
                width=2.0,
            )
            for index, (curve, values, parts) in enumerate(known)
        ],
        limits=[Limit(axis="x", value=limit_ms, text=f"objective {limit_ms:g}")]
        if limit_ms
        else [],
        height=320,
    )


def limits_ms(run: RunData) -> dict[str, float | None]:
    """Objectives by latency."""
    slo = run.summary.slo
    return {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2e": slo.e2e_ms}


def distribution_charts(run: RunData) -> list[Chart]:
    """One distribution for each latency."""
    limits = limits_ms(run)
    charts = []
    for name, (label, _, _) in LATENCY_NAMES.items():
        chart = cdf_chart(name, [(label, *latency_cdf(run, name))], limits.get(name))
        if chart is not None:
            chart.height = 260
            charts.append(chart)
    return charts


def heat_charts(run: RunData) -> list[Chart]:
    """Latencies over time: how many requests, and the chosen percentile as a line."""
    charts = []
    arrivals_s = run.completed("arrival_ns") / NS_PER_S
    limits = limits_ms(run)
    for name, (label, column, _) in LATENCY_NAMES.items():
        if name == "itl":
            figure = _gap_heat(run)
        elif len(arrivals_s):
            values_ms = run.completed(column) / NS_PER_MS
            figure = _heat(arrivals_s, values_ms)
        else:
            figure = None
        if figure is None:
            continue
        x, y, z = figure
        places = np.argwhere(z > 0)
        cells = [(int(i), int(j), float(z[j, i])) for j, i in places.tolist()]
        unit = "gaps" if name == "itl" else "requests"
        limit = limits.get(name)
        chart = Chart(
            chart_id=f"heat-{name}",
            section="over-time",
            title=f"{label} over time",
            note=f"color: {unit} per cell",
            x=run.time_axis("token at, s" if name == "itl" else "arrival, s"),
            y=log_axis(float(y[0]), float(y[-1]), "ms", "ms"),
            heat=Heat(x=short(x, 7), y=short(y), cells=cells, unit=unit, top=float(z.max())),
            limits=[Limit(axis="y", value=limit, text=f"objective {limit:g}")] if limit else [],
            time=True,
        )
        if name != "itl":
            chart.series = _percentiles(arrivals_s, values_ms, run.end_s)
            chart.note += "; line: the chosen percentile"
        charts.append(chart)
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


def _heat(times_s: Floats, values_ms: Floats) -> Grid | None:
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


def _gap_heat(run: RunData) -> Grid | None:
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
