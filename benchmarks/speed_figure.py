"""The figure of docs/lab/speed-details.md: how cost grows, in three panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emu.report.page.panels import Line, Panel, svg

Points = Sequence[tuple[float, float]]


def speed_svg(rows: Sequence[dict[str, Any]]) -> str:
    """Requests, replicas, tokens of an answer."""
    clusters = by_cluster(rows)
    replicas = ("5,000 requests", per_request(rows, "replicas"))
    output = ("2,000 requests", per_request(rows, "output"))
    panels = [
        Panel(
            "more requests",
            "requests",
            "CPU s",
            lines=_curves(clusters),
            is_log_x=True,
            is_log_y=True,
        ),
        Panel(
            "more replicas, the same load on each",
            "replicas",
            "CPU ms a request",
            lines=_curves([replicas]),
            is_log_x=True,
        ),
        Panel(
            "longer answers, 8 replicas",
            "output tokens (median)",
            "CPU ms a request",
            lines=_curves([output]),
            is_log_x=True,
        ),
    ]
    labels = [name for name, _ in [*clusters, replicas, output]]
    return svg("How the cost of a run grows", [panels], labels)


def _curves(series: Sequence[tuple[str, Points]]) -> list[Line]:
    """A line through its points, and the points."""
    found = []
    for name, points in series:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        found += [Line(name, xs, ys), Line(name, xs, ys, is_points=True)]
    return found


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
