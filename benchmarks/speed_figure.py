"""The figure of docs/speed.md: how cost grows, as one SVG file without a drawing library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Final, NamedTuple

WIDTH: Final = 900
_PANEL: Final = (270, 190)
_COLOURS: Final = ("#4269d0", "#ff725c", "#3ca951", "#a463f2")
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One diagram with logarithmic axes."""

    title: str
    x_name: str
    y_name: str
    lines: list[tuple[str, Points]]


def speed_svg(rows: Sequence[dict[str, Any]]) -> str:
    """Three panels: requests, replicas, tokens of an answer."""
    panels = [
        Panel("more requests", "requests", "CPU s", by_cluster(rows)),
        Panel(
            "more replicas, the same load on each",
            "replicas",
            "CPU ms a request",
            [("5,000 requests", per_request(rows, "replicas"))],
        ),
        Panel(
            "longer answers, 8 replicas",
            "output tokens (median)",
            "CPU ms a request",
            [("2,000 requests", per_request(rows, "output"))],
        ),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 270" role="img" '
        'font-family="sans-serif" font-size="11">',
        "<title>How the cost of a run grows</title>",
        f'<rect width="{WIDTH}" height="270" fill="#fff"/>',
    ]
    for index, panel in enumerate(panels):
        if any(points for _, points in panel.lines):
            parts += draw(panel, 42 + index * 300, 34)
    return "\n".join([*parts, "</svg>", ""])


def by_cluster(rows: Sequence[dict[str, Any]]) -> list[tuple[str, Points]]:
    """CPU seconds over requests: the trace on three clusters, and the synthetic million."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["group"] in ("azure", "million"):
            name = row["case"].split(", ", 1)[1]
            found.setdefault(name, []).append((row["requests"], row["cpu_s"]))
    return [(name, sorted(points)) for name, points in found.items()]


def per_request(rows: Sequence[dict[str, Any]], group: str) -> Points:
    """CPU milliseconds a request over the group's axis."""
    return sorted(
        (row["x"], 1e3 * row["cpu_s"] / row["requests"]) for row in rows if row["group"] == group
    )


def draw(panel: Panel, x: int, y: int) -> list[str]:
    """Axes at powers of ten, a line for each series, names at the right end of the lines."""
    every = [point for _, points in panel.lines for point in points]
    left, right = decades([a for a, _ in every])
    low, high = decades([b for _, b in every])
    width, height = _PANEL[0] - 40, _PANEL[1]

    def place(a: float, b: float) -> tuple[float, float]:
        across = (math.log10(a) - left) / (right - left)
        up = (math.log10(b) - low) / (high - low)
        return x + across * width, y + (1 - up) * height

    parts = [f'<text x="{x}" y="{y - 14}" font-size="13">{escape(panel.title)}</text>']
    for power in range(left, right + 1):
        at, _ = place(10.0**power, 10.0**low)
        parts.append(f'<path d="M{at:.1f} {y}V{y + height}" stroke="#ddd"/>')
        parts.append(label(at, y + height + 14, number(10.0**power), "middle"))
    for power in range(low, high + 1):
        _, at = place(10.0**left, 10.0**power)
        parts.append(f'<path d="M{x} {at:.1f}H{x + width}" stroke="#ddd"/>')
        parts.append(label(x - 4, at + 4, number(10.0**power), "end"))
    parts.append(label(x + width / 2, y + height + 30, panel.x_name, "middle"))
    parts.append(label(x, y - 2, panel.y_name, "start"))
    for index, (name, points) in enumerate(panel.lines):
        parts += series(name, [place(*point) for point in points], _COLOURS[index % 4], (x, y))
        parts.append(legend(name, _COLOURS[index % 4], x + 8, y + 14 + 13 * index))
    return parts


def series(name: str, at: Points, colour: str, corner: tuple[int, int]) -> list[str]:
    """A line through its points."""
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in at)
    return [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2">'
        f"<title>{escape(name)}</title></path>",
        *(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in at),
    ]


def legend(name: str, colour: str, x: float, y: float) -> str:
    """The name of a line in its colour."""
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(name)}</text>'


def label(x: float, y: float, text: str, anchor: str) -> str:
    """A word beside an axis."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#444">{escape(text)}</text>'


def decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all values, at least one decade."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def number(value: float) -> str:
    """1,000,000 is too long for an axis."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
