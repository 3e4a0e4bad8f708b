"""Figures by matplotlib (extra `plots`): charts of runs for papers, pictures of the documentation.

    write_figure(Path("ttft.pdf"), "ttft-cdf", [Path("runs/a"), Path("runs/b")], width="single")

Widths are those of a column and of a page with two columns. Fonts are embedded as outlines of
TrueType, colors are Okabe and Ito's, and curves differ in their dashes, too. Same runs, same bytes:
a figure holds no date.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from emu.config.suggestions import did_you_mean
from emu.documents import Document
from emu.errors import InputError, needs_extra
from emu.report.compare import run_names
from emu.report.compare_page import overlaid_cdfs, timelines
from emu.report.page.chart import (
    PALETTE,
    TEXT_COLOUR,
    Axis,
    Chart,
    Kind,
    Series,
    Spans,
    front,
    spread_axis,
)
from emu.report.rundata import RunData, read_run
from emu.report.state_charts import gpus_over_time, role_of, state_timeline
from emu.report.summary import Summary, plain_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FIGURES: Final = (
    *("ttft-cdf", "tpot-cdf", "itl-cdf", "e2e-cdf", "timeline", "gpus", "gantt", "pareto"),
)
Cloud = tuple[list[float], list[float]]
_KINDS: Final[Document] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {"Software": None},
}
WIDTHS_IN: Final = {"single": 3.35, "double": 7.0}
_PANEL_IN: Final = 1.75
_ROW_IN: Final = 0.11
_DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_ROLES: Final = {
    "prefill": PALETTE[0],
    "decode": PALETTE[1],
    "colocated": PALETTE[2],
    "failed": PALETTE[3],
    "draining": PALETTE[4],
    "loading": PALETTE[5],
    "inactive": "#dddddd",
}
"""Colors that stay apart for colour-blind readers, by role."""
STYLE: Final[Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "emu",
    "savefig.dpi": 300,
}


def write_figure(
    path: Path,
    figure: str,
    directories: Sequence[Path],
    *,
    width: str = "single",
    x: str = "gpu_seconds.total",
    y: str = "p99_ttft_ms",
) -> None:
    """Draw a figure (`emu plot --help` lists them); `x` and `y` are for a trade-off (`pareto`).

    Raises InputError for a file type that matplotlib does not write, for directories that are no
    runs (`pareto` takes directories of sweeps, too), and without matplotlib.
    """
    if figure == "pareto":
        charts = [_pareto(run_names(directories), [_points(d, x, y) for d in directories], x, y)]
    else:
        charts = figure_charts(figure, [read_run(directory) for directory in directories])
    save(draw_charts(charts, width), path)


def save(made: Figure, path: Path) -> None:
    """Write a figure without a date: the same figure is the same file. Raises InputError."""
    import matplotlib

    if path.suffix[1:] not in _KINDS:
        raise InputError(str(path), None, "--out", f"expected a name in {', '.join(_KINDS)}")
    try:
        with matplotlib.rc_context(STYLE):
            made.savefig(path, metadata=_KINDS[path.suffix[1:]])
    except OSError as error:
        raise InputError(str(path), None, "--out", error.strerror or str(error)) from None


def draw_charts(charts: Sequence[Chart], width: str) -> Figure:
    """Charts as a figure of matplotlib, one below the other. Raises InputError without it."""
    with needs_extra("plots", "plot"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    if width not in WIDTHS_IN:
        raise InputError("plot", None, "width", f"expected one of {', '.join(WIDTHS_IN)}")
    heights = [_height_in(chart) for chart in charts]
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(WIDTHS_IN[width], sum(heights)), layout="constrained")
        FigureCanvasAgg(made)
        places = made.subplots(
            len(charts), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for chart, place in zip(charts, places[:, 0], strict=True):
            draw(place, chart, has_title=len(charts) > 1)
    return made


def figure_charts(figure: str, runs: Sequence[RunData], x: str = "", y: str = "") -> list[Chart]:
    """The charts that a figure is made of, one below the other.

    Raises InputError for an unknown figure and for runs that have nothing for it.
    """
    if figure not in FIGURES:
        hint = did_you_mean(figure, FIGURES)
        raise InputError("plot", None, "figure", f"unknown {figure!r}{hint}")
    names = run_names([run.directory for run in runs])
    charts: list[Chart] = []
    if figure == "pareto":
        return [_pareto(names, [_point(run, x, y) for run in runs], x, y)]
    if figure.endswith("-cdf"):
        wanted = f"cdf-{figure.removesuffix('-cdf')}"
        charts = [chart for chart in overlaid_cdfs(runs) if chart.chart_id == wanted]
    elif figure == "timeline":
        charts = [chart for chart in timelines(runs) if chart.chart_id.startswith("over-")]
    else:
        charts = _own_charts(figure, names, runs)
    if not charts:
        raise InputError("plot", None, "--figure", f"the runs have nothing for {figure}")
    return charts


def _own_charts(figure: str, names: Sequence[str], runs: Sequence[RunData]) -> list[Chart]:
    """A chart of each run, with its name."""
    charts = []
    for name, run in zip(names, runs, strict=True):
        for chart in gpus_over_time(run) if figure == "gpus" else _gantt(run):
            chart.title = name
            charts.append(chart)
    return charts


def _gantt(run: RunData) -> list[Chart]:
    """The state timeline with one color for each role: papers have fewer colors than states."""
    charts = state_timeline(run)
    for chart in charts:
        assert chart.spans is not None
        roles = list(dict.fromkeys(role_of(kind.name) for kind in chart.spans.kinds))
        of = [roles.index(role_of(kind.name)) for kind in chart.spans.kinds]
        rows = [(*span[:3], of[span[3]], span[4]) for span in chart.spans.rows]
        kinds = [Kind(name=role, color=_ROLES.get(role, "#777777")) for role in roles]
        chart.spans = Spans(kinds=kinds, rows=rows, texts=chart.spans.texts)
    return charts


def _pareto(names: Sequence[str], clouds: Sequence[Cloud], x: str, y: str) -> Chart:
    """Runs, or the points of sweeps, as points of a trade-off; one series for each directory."""
    all_x, all_y = ([value for cloud in clouds for value in cloud[axis]] for axis in (0, 1))
    chart = Chart(
        chart_id="pareto",
        section="",
        title=f"{y} against {x}",
        x=Axis(title=x),
        y=spread_axis(min(all_y), max(all_y), y),
    )
    for index, (name, (xs, ys)) in enumerate(zip(names, clouds, strict=True)):
        color = PALETTE[index % len(PALETTE)]
        chart.series.append(Series(name=name, x=xs, y=ys, color=color, shape="points", size=5))
    best = front((x, y), all_x, all_y)
    if len(best) > 1:
        line = [all_x[i] for i in best], [all_y[i] for i in best]
        top = Series(name="best trade-off", x=line[0], y=line[1], color=PALETTE[5])
        chart.series.insert(0, top)
    return chart


def _points(directory: Path, x: str, y: str) -> Cloud:
    """The two figures of a run, or of every point of a sweep."""
    table = directory / "results.csv"
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for name in (x, y):
            if rows and name not in rows[0]:
                raise InputError(str(table), 1, name, "no such column")
        found = [(float(row[x]), float(row[y])) for row in rows if row[x] and row[y]]
    else:
        return _point(read_run(directory), x, y)
    if not found:
        raise InputError(str(table), None, "", "has no point with both figures")
    return [a for a, _ in found], [b for _, b in found]


def _point(run: RunData, x: str, y: str) -> Cloud:
    return [_figure(run.summary, x)], [_figure(run.summary, y)]


def _figure(summary: Summary, name: str) -> float:
    value: Any = plain_summary(summary)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputError("plot", None, name, "is no number in summary.json")
    return float(value)


def draw(place: Axes, chart: Chart, *, has_title: bool) -> None:
    """One chart into one panel."""
    if chart.spans is not None:
        _draw_spans(place, chart.spans)
    right = place.twinx() if any(one.right for one in chart.series) else None
    areas = [one for one in chart.series if one.area]
    if areas:
        colors = [_ROLES.get(one.name, _color(one)) for one in areas]
        labels = [one.name for one in areas]
        place.stackplot(
            areas[0].x, *(one.y for one in areas), colors=colors, labels=labels, step="post", lw=0
        )
    for index, one in enumerate(one for one in chart.series if not one.area):
        _draw_series(right if right is not None and one.right else place, one, index)
    for limit in chart.limits:
        line = place.axvline if limit.axis == "x" else place.axhline
        line(limit.value, color="0.4", lw=0.8, ls=":", label=limit.text)
    _set_axes(place, chart)
    if right is not None and chart.y2 is not None:
        right.set_ylabel(chart.y2.title)
        right.set_ylim(bottom=0)
        right.spines["right"].set_visible(True)
    if has_title:
        place.set_title(chart.title, loc="right")
    _legend(place, right)


def _color(one: Series) -> str:
    return "black" if one.color == TEXT_COLOUR else one.color


def _draw_series(place: Axes, one: Series, index: int) -> None:
    if one.shape == "points":
        marker = "osD^vP*"[index % 7]
        place.plot(
            one.x, one.y, marker, color=_color(one), ms=(one.size or 8) * 0.4, label=one.name
        )
        return
    step: Any = {"after": "steps-post", "before": "steps-pre"}.get(one.shape, "default")
    dash: Any = _DASHES[index % len(_DASHES)]
    place.plot(one.x, one.y, color=_color(one), ls=dash, drawstyle=step, label=one.name or None)
    if one.low is not None and one.high is not None:
        place.fill_between(one.x, one.low, one.high, color=_color(one), alpha=0.2, lw=0)


def _draw_spans(place: Axes, spans: Spans) -> None:
    for index, kind in enumerate(spans.kinds):
        rows = [row for row in spans.rows if row[3] == index]
        place.barh(
            [row[2] for row in rows],
            [row[1] - row[0] for row in rows],
            left=[row[0] for row in rows],
            height=0.8,
            color=kind.color,
            label=kind.name,
            lw=0,
        )


def _set_axes(place: Axes, chart: Chart) -> None:
    place.set_xlabel(chart.x.title)
    place.set_ylabel(chart.y.title)
    for axis, scale, bounds in (
        (chart.x, place.set_xscale, place.set_xlim),
        (chart.y, place.set_yscale, place.set_ylim),
    ):
        if axis.log:
            scale("log")
        if axis.low is not None or axis.high is not None:
            bounds(axis.low, axis.high)
    if chart.y.names is not None:
        every = max(1, len(chart.y.names) // 16)
        places = list(range(0, len(chart.y.names), every))
        place.set_yticks(places, [chart.y.names[i] for i in places])
    if chart.y.inverse:
        place.invert_yaxis()


def _legend(place: Axes, right: Axes | None) -> None:
    handles, labels = place.get_legend_handles_labels()
    if right is not None:
        more, names = right.get_legend_handles_labels()
        handles, labels = [*handles, *more], [*labels, *names]
    if len(labels) > 1:
        place.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2,
            handlelength=1.6, columnspacing=1.0,
        )  # fmt: skip


def _height_in(chart: Chart) -> float:
    rows = len(chart.y.names or ())
    return max(_PANEL_IN, 0.8 + _ROW_IN * rows) + 0.2
