"""What a chart is, whatever draws it: pages (ECharts) and figures for papers (matplotlib). Pure.

A chart has two axes and any of: curves, points and bars (`series`), a grid of counts (`heat`),
stretches of time in rows (`spans`), limits and regions. Colors and fonts that depend on light or
dark belong to what draws it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.documents import Document

Floats = NDArray[np.float64]

PALETTE: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d1f")
"""Okabe and Ito's colors: they stay apart for colour-blind readers and in gray print."""
WIDE_RATIO: Final = 20.0
"""Values that span a larger factor get a logarithmic axis."""
NARROW_RATIO: Final = 2.0
TEXT_COLOUR: Final = "text"
"""The color of text, light or dark, as what draws the chart has it."""

Shape = Literal["line", "after", "before", "linepoints", "points", "bar"]
"""`after`: a value holds until the next one; `before`: it is that of the interval before."""


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of what a chart is made of; a page gets only what is not as usual."""


class Axis(Part, kw_only=True, omit_defaults=True):
    """One axis."""

    title: str = ""
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    names: list[str] | None = None
    """Categories, instead of numbers."""
    inverse: bool = False
    whole: bool = False
    """It counts: labels are whole numbers."""


class Series(Part, kw_only=True, omit_defaults=True):
    """A curve, a cloud of points, or bars."""

    name: str = ""
    x: list[float]
    y: list[float]
    color: str
    shape: Shape = "line"
    width: float | None = None
    dash: bool = False
    area: bool = False
    """Stacked on the areas before it."""
    low: list[float] | None = None
    high: list[float] | None = None
    """A band around a curve: a 95 % interval."""
    text: list[str] | None = None
    """What is said about each point."""
    labels: list[str] | None = None
    """What stands beside each point."""
    symbol: str | None = None
    size: float | None = None
    right: bool = False
    """Measured on the right axis."""
    stat: str = ""
    """Shown only while this percentile is chosen."""


class Limit(Part, kw_only=True, omit_defaults=True):
    """A line across the chart."""

    axis: Literal["x", "y"]
    value: float
    text: str


class Region(Part, kw_only=True, omit_defaults=True):
    """A part of the chart in which objectives are met; None = to the end of the axis."""

    x_low: float | None = None
    x_high: float | None = None
    y_low: float | None = None
    y_high: float | None = None
    text: str


class Heat(Part, kw_only=True, omit_defaults=True):
    """Counts in cells: `cells` are (x cell, y cell or row, value), only those that are known."""

    x: list[float]
    """Edges."""
    y: list[float]
    """Edges; empty where the y axis has names."""
    cells: list[tuple[int, int, float]]
    unit: str
    top: float
    """Value of the last color."""


class Kind(Part, kw_only=True, omit_defaults=True):
    """A kind of stretches."""

    name: str
    color: str


class Spans(Part, kw_only=True, omit_defaults=True):
    """Stretches of time in the rows of the y axis: (start, end, row, kind, text)."""

    kinds: list[Kind]
    rows: list[tuple[float, float, int, int, int]]
    texts: list[str]


class Chart(Part, kw_only=True, omit_defaults=True):
    """One figure of a page."""

    chart_id: str
    section: str
    title: str
    note: str = ""
    x: Axis
    y: Axis
    y2: Axis | None = None
    series: list[Series] = []
    heat: Heat | None = None
    spans: Spans | None = None
    limits: list[Limit] = []
    regions: list[Region] = []
    height: int = 260
    is_wide: bool = False
    time: bool = False
    """Its x axis is the time of the run: all such charts are zoomed together."""
    slider: bool = False
    """It carries the slider that zooms them."""
    back: bool = False
    """Where nothing is drawn, the ground is gray: there is nothing, not zero."""
    row: str = ""
    """What a row of the y axis is."""


def payload(charts: Sequence[Chart]) -> list[Document]:
    """What the script of a page draws."""
    return [{**msgspec.to_builtins(chart), "id": f"chart-{chart.chart_id}"} for chart in charts]


def short(values: NDArray[Any] | Sequence[float], digits: int = 5) -> list[float]:
    """Numbers for a page: five significant digits are more than a screen can show."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, dtype=np.float64).tolist()]


def spread_axis(low: float, high: float, title: str, unit: str = "") -> Axis:
    """An axis for values from `low` to `high`: logarithmic if they span a wide range above 0.

    Logarithmic axes end at 1, 2 or 5 of a decade.
    """
    if low <= 0 or high / low <= WIDE_RATIO:
        return Axis(title=title, unit=unit)
    return log_axis(low, high, title, unit)


def close_axis(low: float, high: float, title: str) -> Axis:
    """An axis for a cloud of points: where they lie close together, far from 0, they fill it."""
    if not 0 < low < high < NARROW_RATIO * low:
        return spread_axis(low, high, title)
    room = (high - low) / 8
    step = 10.0 ** math.floor(math.log10(high - low)) / 2
    ends = math.floor((low - room) / step) * step, math.ceil((high + room) / step) * step
    return Axis(title=title, low=float(f"{ends[0]:.12g}"), high=float(f"{ends[1]:.12g}"))


_MORE_IS_BETTER: Final = ("throughput", "goodput", "attainment", "hit_rate", "completed", "rate")


def is_better_high(name: str) -> bool:
    """More of this figure is better, by its name."""
    return any(word in name for word in _MORE_IS_BETTER)


def front(names: Sequence[str], x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Indices of the points that no other beats in both figures (x and y by `names`); along x."""
    x_sign, y_sign = (-1 if is_better_high(name) else 1 for name in names)
    order = sorted(range(len(x)), key=lambda index: (x_sign * x[index], y_sign * y[index]))
    chosen: list[int] = []
    for index in order:
        if not chosen or y_sign * y[index] < y_sign * y[chosen[-1]]:
            chosen.append(index)
    return sorted(chosen, key=lambda index: x[index])


def log_axis(low: float, high: float, title: str, unit: str = "") -> Axis:
    """A logarithmic axis from `low` to `high`, both above 0."""
    return Axis(title=title, unit=unit, log=True, low=_below(low), high=_above(high))


def _below(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return float(f"{max(step * decade for step in (1, 2, 5) if step * decade <= value):.12g}")


def _above(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return float(f"{min(step * decade for step in (1, 2, 5, 10) if step * decade >= value):.12g}")
