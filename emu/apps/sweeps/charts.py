"""Charts of a sweep: the trade-off of two figures, and what each key does.

Limits come from the conditions of a search, or from the objectives (`[slo]`) of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.sweeps.cells import Columns, groups, key_name, mean_text, numbers, value_text
from emu.apps.sweeps.drive import SweepResult
from emu.apps.sweeps.labels import key_label, latencies, plot_names
from emu.apps.sweeps.results import cell_text
from emu.report.intervals import Mean
from emu.report.page.chart import (
    PALETTE,
    Chart,
    Limit,
    Region,
    Series,
    close_axis,
    front,
    is_better_high,
    short,
    spread_axis,
)

_KEYS_MAX: Final = 6
_CURVES_MAX: Final = 10
_LABELS_MAX: Final = 40


def trade_off(
    result: SweepResult, columns: Columns, limits: dict[str, tuple[str, float]]
) -> list[Chart]:
    names = list(plot_names(result))
    if any(name not in columns for name in names):
        return []
    cloud = groups(result, columns, *names)
    if not cloud.x:
        return []
    ys = [one.mean for one in cloud.y]
    best = front(names, cloud.x, ys)
    labels = [_label(result, columns, i) for i in cloud.rows]
    side = "right" if is_better_high(names[0]) else "left"
    height = "higher" if is_better_high(names[1]) else "lower"
    keys = ", ".join(key_name(key, result) for key in result.keys)
    note = f"labels: {keys}; better is {height} and further {side}"
    chart = Chart(
        chart_id="trade-off",
        section="trade-off",
        title=f"{names[1]} against {names[0]}",
        note=note + ("; green: objectives met" if set(names) & set(limits) else ""),
        x=close_axis(min(cloud.x), max(cloud.x), names[0]),
        y=close_axis(min(ys), max(ys), names[1]),
        limits=_limit_lines(names, limits),
        regions=_region(names, limits),
        height=420,
        is_wide=True,
    )
    chart.series = [
        Series(
            name="best trade-off",
            x=short([cloud.x[i] for i in best]),
            y=short([ys[i] for i in best]),
            color=PALETTE[1],
        ),
        Series(
            name="points",
            x=short(cloud.x),
            y=short(ys),
            color=PALETTE[0],
            shape="points",
            size=9,
            text=[
                f"{label}\n{names[1]} {mean_text(mean)}"
                for label, mean in zip(labels, cloud.y, strict=True)
            ],
            labels=_beside(result, columns, cloud.rows),
        ),
    ]
    return [chart]


def _beside(result: SweepResult, columns: Columns, rows: Sequence[int]) -> list[str] | None:
    """The settings of each point in short, if there are few enough to be read."""
    if len(rows) > _LABELS_MAX:
        return None
    return [", ".join(value_text(columns[key][row]) for key in result.keys) for row in rows]


def _limit_lines(names: Sequence[str], limits: dict[str, tuple[str, float]]) -> list[Limit]:
    """Limits on the figures of the axes (x, y)."""
    lines = []
    for name, line in zip(names, ("x", "y"), strict=True):
        if name in limits:
            operator, value = limits[name]
            text = f"{name} {operator} {value:g}"
            lines.append(Limit(axis="x" if line == "x" else "y", value=value, text=text))
    return lines


def _region(names: Sequence[str], limits: dict[str, tuple[str, float]]) -> list[Region]:
    """Where the limits on both axes are met."""
    bounds: dict[str, float] = {}
    for name, line in zip(names, ("x", "y"), strict=True):
        if name in limits:
            operator, value = limits[name]
            bounds[f"{line}_{'high' if operator == '<' else 'low'}"] = value
    return [Region(text="", **bounds)] if bounds else []


def _label(result: SweepResult, columns: Columns, index: int) -> str:
    """The settings of a point, one a line."""
    keys = [key for key in result.keys if key in columns]
    return "\n".join(f"{key_name(key, result)} {cell_text(columns[key][index])}" for key in keys)


def by_key(
    result: SweepResult, columns: Columns, limits: dict[str, tuple[str, float]]
) -> list[Chart]:
    """For each numeric key: the latencies of the conditions, or p99 TTFT and TPOT, over it."""
    searched = result.sweep.search is not None
    names = [name for name in limits if name in columns] if searched else []
    charts = []
    for place, key in enumerate(result.keys[:_KEYS_MAX]):
        if len({x for x in numbers(columns[key]) if x is not None}) < 2:
            continue
        for name in names or latencies(result):
            if name in columns:
                curves = _curves(result, columns, key, name)
                title = key_label(key, [key], result.roles) if key.startswith("replicas.") else key
                charts += [_key_chart(f"{place}-{name}", title, name, curves, limits)] * bool(
                    curves
                )
    return charts


def _curves(
    result: SweepResult, columns: Columns, key: str, name: str
) -> dict[str, list[tuple[float, Mean]]]:
    """Label -> points along the key; one curve for each choice of the other keys."""
    others = [k for k in result.keys if k != key and k in columns]
    curves: dict[str, list[tuple[float, Mean]]] = {}
    cloud = groups(result, columns, key, name)
    for x, mean, row in zip(cloud.x, cloud.y, cloud.rows, strict=True):
        label = ", ".join(f"{key_name(k, result)} {cell_text(columns[k][row])}" for k in others)
        curves.setdefault(label, []).append((x, mean))
    if len(curves) > _CURVES_MAX:  # a cloud, not curves
        curves = {"": [point for curve in curves.values() for point in curve]}
    return {
        label: sorted(curve, key=lambda point: (point[0], point[1].mean))
        for label, curve in curves.items()
    }


def _key_chart(
    name: str,
    key: str,
    figure: str,
    curves: dict[str, list[tuple[float, Mean]]],
    limits: dict[str, tuple[str, float]],
) -> Chart:
    every = [(x, mean.mean) for points in curves.values() for x, mean in points]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    lines = _limit_lines(["", figure], limits)
    chart = Chart(
        chart_id="key-" + "".join(c if c.isalnum() else "-" for c in name),
        section="keys",
        title=f"{figure} over {key}",
        x=spread_axis(min(xs), max(xs), key),
        y=spread_axis(min(ys), max(ys), figure),
        limits=lines,
        regions=_region(["", figure], limits),
        height=300,
    )
    for index, (label, points) in enumerate(curves.items()):
        xs, means = [x for x, _ in points], [mean for _, mean in points]
        has_band = any(mean.half is not None for mean in means)
        chart.series.append(
            Series(
                name=label or figure,
                x=short(xs),
                y=short([mean.mean for mean in means]),
                color=PALETTE[index % len(PALETTE)],
                shape="linepoints" if len(set(xs)) == len(xs) else "points",
                low=short([m.mean - (m.half or 0) for m in means]) if has_band else None,
                high=short([m.mean + (m.half or 0) for m in means]) if has_band else None,
            )
        )
    notes = [f"dashed: {lines[0].text}"] if lines else []
    if any(one.low for one in chart.series):
        notes.append("bands: 95 % intervals over seeds")
    chart.note = "; ".join(notes)
    return chart
