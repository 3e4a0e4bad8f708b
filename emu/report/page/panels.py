"""Panels: lines, steps and bars in rows, as SVG for documents (extra `plots`).

    write_text(path, svg("TTFT", [[Panel("8B", "ms", "part", lines=[Line("blitz", xs, ys)])]]))

Colors follow the position of a label in `labels`, so that one system has one color in all panels.
Drawn by matplotlib; the same figures give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.errors import needs_extra
from emu.report.page.chart import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_PICTURE_IN: Final = (3.1, 2.3)
_PICTURE_STYLE: Final[Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "emu",
}
_COLORS: Final = (*PALETTE, "#111827")


class Line(msgspec.Struct):
    """A curve; `is_step` holds each value until the next point; `is_points` draws dots only."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_step: bool = False
    is_points: bool = False


class Bars(msgspec.Struct):
    """One bar of a group for each name."""

    label: str
    heights: Sequence[float]


class Panel(msgspec.Struct):
    """Axes with curves, or with groups of bars named by `names`."""

    title: str
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    names: Sequence[str] = ()
    x_max: float = 0.0
    """Where the axis ends, at least."""
    is_log_x: bool = False
    is_log_y: bool = False


def svg(title: str, rows: Sequence[Sequence[Panel]], labels: Sequence[str]) -> str:
    """Panels in rows, below them what the colors mean. Raises InputError without matplotlib."""
    with needs_extra("plots", "picture"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    wide = max(map(len, rows))
    with matplotlib.rc_context(_PICTURE_STYLE):
        size = (_PICTURE_IN[0] * wide, _PICTURE_IN[1] * len(rows) + 0.6)
        made = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(made)
        made.suptitle(_plain(title), x=0.01, ha="left")
        places = made.subplots(len(rows), wide, squeeze=False)
        for row, line in zip(rows, places, strict=True):
            for index, place in enumerate(line):
                if index < len(row):
                    _draw(place, row[index], labels)
                else:
                    place.set_axis_off()
        patches = [Patch(color=_color_of(label, labels), label=_plain(label)) for label in labels]
        if any(labels):
            made.legend(handles=patches, loc="outside lower left", ncols=min(4, len(labels)))
        text = io.StringIO()
        made.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def _draw(place: Axes, panel: Panel, labels: Sequence[str]) -> None:
    place.set_title(_plain(panel.title), loc="left", fontsize=8)
    place.set_xlabel(_plain(panel.x_label))
    place.set_ylabel(_plain(panel.y_label))
    for number, line in enumerate(panel.lines):
        color = _color_of(line.label, labels)
        if line.is_points:
            place.plot(line.xs, line.ys, "o", color=color, ms=4, gid=f"points-{number}")
        else:
            step: Any = "steps-post" if line.is_step else "default"
            place.plot(line.xs, line.ys, color=color, drawstyle=step, lw=1.2, gid=f"curve-{number}")
    width = 0.8 / max(len(panel.bars), 1)
    for number, bars in enumerate(panel.bars):
        places = [index - 0.4 + (number + 0.5) * width for index in range(len(bars.heights))]
        drawn = place.bar(places, bars.heights, width, color=_color_of(bars.label, labels))
        for index, bar in enumerate(drawn):
            bar.set_gid(f"bar-{number}-{index}")
    if panel.bars:
        place.set_xticks(range(len(panel.names)), [_plain(name) for name in panel.names])
    values = [value for line in panel.lines for value in line.xs]
    if panel.is_log_x and values and min(values) > 0:
        place.set_xscale("log")
    elif panel.x_max:
        place.set_xlim(right=max(panel.x_max, *values, 0.0))
    heights = [value for line in panel.lines for value in line.ys]
    if panel.is_log_y and heights and min(heights) > 0:
        place.set_yscale("log")
    else:
        place.set_ylim(bottom=0)


def _color_of(label: str, labels: Sequence[str]) -> str:
    return _COLORS[labels.index(label) % len(_COLORS)] if label in labels else _COLORS[-1]


def _plain(text: str) -> str:
    """Text without the marks of mathematics."""
    return text.replace("$", r"\$")
