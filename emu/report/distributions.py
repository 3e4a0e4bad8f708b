"""Charts of latencies: distributions and pictures over time. Pure.

Every chart has a fixed upper size whatever the number of requests: a distribution becomes 300
quantiles, a picture over time at most 120 x 40 cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.report.rundata import RunData
from emu.units import NS_PER_MS, NS_PER_S

Floats = NDArray[np.float64]

LATENCY_NAMES: Final = {
    "ttft": ("TTFT", "ttft_ns", "time to first token"),
    "tpot": ("TPOT", "tpot_ns", "time per output token"),
    "itl": ("ITL", "", "gap between tokens"),
    "e2e": ("E2E", "latency_ns", "arrival to last token"),
}
PALETTE: Final = ("#4c8dff", "#f28e2b", "#3ba272", "#e15759", "#9b6bd3", "#2bb3b1", "#e0a800")
TIME_CELLS: Final = 120
_QUANTILES: Final = 300
_VALUE_CELLS: Final = 40


class Chart(msgspec.Struct):
    """One figure: `data` and `layout` are plotly's."""

    chart_id: str
    section: str
    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 260
    is_wide: bool = False


def short(values: NDArray[Any] | Sequence[float], digits: int = 5) -> list[float]:
    """Numbers for the page: five significant digits are more than a screen can show."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, dtype=np.float64).tolist()]


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


def distribution_charts(run: RunData) -> list[Chart]:
    charts = []
    limits = {"ttft": run.summary.slo.ttft_ms, "tpot": run.summary.slo.tpot_ms}
    limits["e2e"] = run.summary.slo.e2e_ms
    for name, (label, _, meaning) in LATENCY_NAMES.items():
        values, parts = latency_cdf(run, name)
        if not len(values):
            continue
        trace = {
            "type": "scatter",
            "mode": "lines",
            "name": label,
            "x": short(values),
            "y": short(parts * 100),
            "line": {"color": PALETTE[0], "width": 2},
            "hovertemplate": "%{y:.1f} % at most %{x:.4g} ms<extra></extra>",
        }
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": "ms"}, **_axis_for(values)},
            "yaxis": {"title": {"text": "%"}, "range": [0, 100.5]},
            "showlegend": False,
        }
        limit = limits.get(name)
        if limit:
            layout["shapes"] = [_vertical(limit)]
            layout["annotations"] = [_vertical_label(limit, values)]
        charts.append(Chart(f"cdf-{name}", "latency", f"{label}: {meaning}", "", [trace], layout))
    return charts


def _axis_for(values: Floats) -> dict[str, Any]:
    """Logarithmic when values span more than a factor of 20 and none is zero."""
    low, high = float(values.min()), float(values.max())
    if low <= 0 or high / low <= 20:
        return {"type": "linear"}
    return log_axis(low, high)


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis labelled at 1, 2, 5 of each decade, or at decades if there are many.

    Plotly's own labels between decades are single digits, which nobody can read off.
    """
    steps = (1, 2, 5) if high / low < 3000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**decade for decade in decades for step in steps]
    shown = [value for value in values if low / 1.5 <= value <= high * 1.5]
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": short(shown),
        "ticktext": [f"{value:,.0f}" if value >= 1 else f"{value:g}" for value in shown],
    }


def _vertical(limit_ms: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": limit_ms,
        "x1": limit_ms,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "#e15759", "width": 1.5, "dash": "dash"},
    }


def _vertical_label(limit_ms: float, values: Floats) -> dict[str, Any]:
    is_log = _axis_for(values)["type"] == "log"
    return {
        "x": float(np.log10(limit_ms)) if is_log else limit_ms,
        "y": 0.04,
        "yref": "paper",
        "text": f"objective {limit_ms:g}",
        "showarrow": False,
        "xanchor": "left",
    }


# --- latencies over time -------------------------------------------------------------------------
def heat_charts(run: RunData) -> list[Chart]:
    charts = []
    arrivals = run.completed("arrival_ns") / NS_PER_S
    for name, (label, column, _) in LATENCY_NAMES.items():
        if name == "itl":
            figure = _gap_heat(run)
        elif len(arrivals):
            figure = _heat(arrivals, run.completed(column) / NS_PER_MS)
        else:
            figure = None
        if figure is None:
            continue
        x, y, z = figure
        trace = {
            "type": "heatmap",
            "x": short(x, 7),
            "y": short(y),
            "z": [[int(v) if v else None for v in row] for row in z.tolist()],
            "showscale": True,
            "colorbar": {"thickness": 8, "outlinewidth": 0},
            "hoverongaps": False,
            "hovertemplate": "%{x:.5g} s, %{y:.4g} ms: %{z}<extra></extra>",
        }
        layout = {
            "xaxis": {
                "title": {"text": "token at, s" if name == "itl" else "arrival, s"},
            },
            "yaxis": {**log_axis(float(y[0]), float(y[-1])), "title": {"text": "ms"}},
        }
        note = "gaps per cell" if name == "itl" else "requests per cell"
        charts.append(
            Chart(f"heat-{name}", "over-time", f"{label} over time", note, [trace], layout)
        )
    return charts


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
