"""Figures of systems over their seeds: means with error bars, distributions with bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError, needs_extra
from emu.report.drawn import SHOWN
from emu.report.figures import STYLE, WIDTHS_IN
from emu.report.intervals import mean_of
from emu.report.latency_charts import cdf_chart, latency_cdf
from emu.report.page.chart import PALETTE, Chart
from emu.report.paired import SeedSet, seed_mean
from emu.report.rundata import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTRIBUTIONS: Final = ("ttft-cdf", "tpot-cdf", "itl-cdf", "e2e-cdf")
MEANS_SHOWN: Final = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "gpu_seconds.total")
"""Figures of summary.json that `means` draws unless others are asked for."""
_PLACES: Final = 200
"""Latencies at which distributions of several seeds are averaged."""
_PANELS_A_ROW: Final = {"single": 2, "double": 4}
_LINE_IN: Final = 0.2
_HEAD_IN: Final = 0.75


def draw_means(sets: Sequence[SeedSet], names: Sequence[str], width: str) -> Figure:
    """A panel for each figure: systems below each other, their mean and its 95 % interval.

    Raises InputError for a figure that not all systems have, and without matplotlib.
    """
    with needs_extra("plots", "plot"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    if width not in WIDTHS_IN:
        raise InputError("plot", None, "width", f"expected one of {', '.join(WIDTHS_IN)}")
    for name in names:
        if not all(name in one.figures for one in sets):
            raise InputError("plot", None, name, "is no number in summary.json of every run")
    columns = min(len(names), _PANELS_A_ROW[width])
    lines = -(-len(names) // columns)
    places = list(range(len(sets)))
    with matplotlib.rc_context(STYLE):
        size = (WIDTHS_IN[width], lines * (_HEAD_IN + _LINE_IN * len(sets)))
        made = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(made)
        panels = made.subplots(lines, columns, squeeze=False, sharey=True).flat
        for panel, name in zip(panels, names, strict=False):
            for place, one in zip(places, sets, strict=True):
                mean = seed_mean(one.figures[name])
                panel.errorbar(
                    mean.mean, place, xerr=mean.half, fmt="osD^vP*"[place % 7], ms=4, capsize=2,
                    lw=1.0, color=PALETTE[place % len(PALETTE)],
                )  # fmt: skip
            panel.set_xlabel(SHOWN.get(name, name))
            panel.set_yticks(places, [one.name for one in sets])
            panel.set_ylim(len(sets) - 0.5, -0.5)
            panel.margins(x=0.15)
        for panel in list(panels)[len(names) :]:
            panel.set_visible(False)
    return made


def cdf_bands(figure: str, systems: Sequence[tuple[str, Sequence[RunData]]]) -> Chart:
    """Distributions of systems: the mean over seeds, and a band, its 95 % interval at each place.

    Raises InputError for another figure and for runs that have no such latency.
    """
    if figure not in DISTRIBUTIONS:
        problem = f"lists of runs are drawn as means or {', '.join(DISTRIBUTIONS)}, not {figure!r}"
        raise InputError("plot", None, "figure", problem)
    metric = figure.removesuffix("-cdf")
    curves, bands = [], []
    for name, runs in systems:
        each = [found for run in runs if len((found := latency_cdf(run, metric))[0])]
        if not each:
            raise InputError("plot", None, "figure", f"the runs of {name} have nothing for it")
        low = min(float(values[0]) for values, _ in each)
        high = max(float(values[-1]) for values, _ in each)
        spread = np.geomspace if low > 0 else np.linspace
        at = np.asarray(spread(low, high, _PLACES), dtype=np.float64)
        shares = np.array([_share_at(at, *found) for found in each])
        means = [mean_of(column.tolist()) for column in shares.T]
        curves.append((name, at, np.array([mean.mean for mean in means])))
        bands.append(np.array([mean.half or 0.0 for mean in means]))
    chart = cdf_chart(metric, curves)
    assert chart is not None
    chart.series = [
        msgspec.structs.replace(
            one,
            low=np.clip(100 * (middle - half), 0, 100).tolist(),
            high=np.clip(100 * (middle + half), 0, 100).tolist(),
        )
        for one, (_, _, middle), half in zip(chart.series, curves, bands, strict=True)
    ]
    return chart


def _share_at(
    at: NDArray[np.float64], values: NDArray[np.float64], parts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Part of the requests at or below each latency."""
    index = np.searchsorted(values, at, side="right")
    return np.where(index > 0, parts[np.maximum(index, 1) - 1], 0.0)
