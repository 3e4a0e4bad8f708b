"""Plain charts as SVG text: lines, steps and bars in a row of panels. No dependency, same bytes.

    write_text(path, svg("TTFT", [[Panel("8B", "ms", "part", lines=[Line("blitz", xs, ys)])]]))

For the pictures of the documentation; the pages of a run have their own, interactive charts.
Colours follow the position of a label in `labels`, so that one system has one colour in all panels.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

import msgspec

COLOURS: Final = (
    "#1f6fb4",
    "#e8830c",
    "#2f9e44",
    "#9c5fc2",
    "#d6336c",
    "#6b7280",
    "#111827",
    "#0ca5a5",
)
_WIDTH, _HEIGHT = 300, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 40
_HEAD, _LEGEND = 34, 20


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
    """The picture: rows of panels, and what the colours mean."""
    columns = max(len(row) for row in rows)
    width = columns * _WIDTH
    per_line = max(1, width // 150)
    legend_lines = math.ceil(len(labels) / per_line)
    head = _HEAD + _LEGEND * legend_lines
    height = head + len(rows) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(width / 2, 20, title, size=14, anchor="middle", weight="bold"),
    ]
    for index, label in enumerate(labels):
        x = 16 + index % per_line * 150
        y = _HEAD + index // per_line * _LEGEND
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="8" fill="{_colour(label, labels)}"/>'
        )
        parts.append(_text(x + 17, y + 8, label))
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            parts.append(f'<g transform="translate({column * _WIDTH} {head + row * _HEIGHT})">')
            parts += _panel(panel, labels)
            parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, labels: Sequence[str]) -> list[str]:
    x_scale = _Scale(
        _x_values(panel),
        _LEFT,
        _WIDTH - _RIGHT,
        is_log=panel.is_log_x,
        has_zero=bool(panel.bars or panel.x_max),
    )
    heights = [y for line in panel.lines for y in line.ys]
    heights += [height for bars in panel.bars for height in bars.heights]
    y_scale = _Scale(heights or [0, 1], _HEIGHT - _BOTTOM, _TOP, is_log=panel.is_log_y)
    parts = [_text((_LEFT + _WIDTH) / 2, 18, panel.title, anchor="middle", weight="bold")]
    parts += _axes(panel, x_scale, y_scale)
    for line in panel.lines:
        parts.append(_curve(line, x_scale, y_scale, _colour(line.label, labels)))
    if panel.bars:
        parts += _groups(panel, x_scale, y_scale, labels)
    return parts


def _x_values(panel: Panel) -> list[float]:
    if not panel.lines:
        return [0, len(panel.names)]
    values = [x for line in panel.lines for x in line.xs]
    return [*values, panel.x_max] if panel.x_max else values


def _axes(panel: Panel, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in y_scale.ticks():
        y = y_scale.at(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#e5e7eb"/>')
        parts.append(_text(_LEFT - 5, y + 4, _short(value), anchor="end"))
    if not panel.bars:
        for value in x_scale.ticks():
            x = x_scale.at(value)
            parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#6b7280"/>')
            parts.append(_text(x, bottom + 15, _short(value), anchor="middle"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="#6b7280" fill="none"/>')
    parts.append(_text((_LEFT + right) / 2, bottom + 31, panel.x_label, anchor="middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle" '
        f'fill="#374151">{html.escape(panel.y_label)}</text>'
    )
    return parts


def _curve(line: Line, x_scale: _Scale, y_scale: _Scale, colour: str) -> str:
    points = [(x_scale.at(x), y_scale.at(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    if line.is_points:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        return f'<path d="{dots}" stroke="{colour}" stroke-width="4" stroke-linecap="round"/>'
    path, before = [], ""
    for index, (x, y) in enumerate(points):
        here = f"{x:.1f} {y:.1f}"
        if here == before:
            continue
        before = here
        if index == 0:
            path.append(f"M{here}")
        else:
            path.append(f"H{x:.1f}V{y:.1f}" if line.is_step else f"L{here}")
    return f'<path d="{"".join(path)}" stroke="{colour}" stroke-width="1.6" fill="none"/>'


def _groups(panel: Panel, x_scale: _Scale, y_scale: _Scale, labels: Sequence[str]) -> list[str]:
    parts = []
    bottom = _HEIGHT - _BOTTOM
    step = 0.8 / max(1, len(panel.bars))
    for index, name in enumerate(panel.names):
        parts.append(_text(x_scale.at(index + 0.5), bottom + 15, name, anchor="middle"))
        for position, bars in enumerate(panel.bars):
            left = x_scale.at(index + 0.1 + position * step)
            wide = x_scale.at(index + 0.1 + (position + 0.92) * step) - left
            top = y_scale.at(bars.heights[index])
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}" fill="{_colour(bars.label, labels)}"/>'
            )
    return parts


class _Scale:
    """Values to places."""

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        is_log: bool = False,
        has_zero: bool = True,
    ) -> None:
        self.is_log = is_log
        self.start, self.end = start, end
        if is_log:
            above = [value for value in values if value > 0]
            self.low = math.log10(min(above, default=1))
            self.high = math.log10(max(above, default=10))
        else:
            self.low = min(0.0, *values) if has_zero or len(values) < 2 else min(values)
            self.high = max(values)
        if self.high <= self.low:
            self.high = self.low + 1
        if not is_log and start > end:  # room above the highest bar or curve
            self.high += (self.high - self.low) * 0.04

    def at(self, value: float) -> float:
        """The place of a value; those below a logarithmic axis stand at its foot."""
        if self.is_log:
            value = math.log10(value) if value > 0 else self.low
            value = max(value, self.low)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the scale."""
        if self.is_log:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            ticks = [float(factor * 10.0**power) for power in decades for factor in (1, 3)]
            return [t for t in ticks if self.low - 1e-9 <= math.log10(t) <= self.high + 1e-9]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 3))
        for factor in (1, 2, 5, 10):
            if (self.high - self.low) / (step * factor) <= 5:
                step *= factor
                break
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _colour(label: str, labels: Sequence[str]) -> str:
    return COLOURS[labels.index(label) % len(COLOURS)]


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 6):g}"


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="#374151">{html.escape(text)}</text>'
    )
