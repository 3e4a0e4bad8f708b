"""What a sweep leaves behind: results.csv, results.parquet, sweep.json, a page. No wall clock.

`emu sweep` (`sweep_command`) shows progress, and the table at the end.
"""

from __future__ import annotations

import io
import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from emu.apps.sweeps.drive import Answer, Row, SweepResult, run_sweep
from emu.apps.sweeps.sweepfile import parse_conditions
from emu.errors import InputError, needs_extra
from emu.process.console import open_console
from emu.report.atomic import write_bytes, write_text, writing
from emu.report.csvtext import quote, text_cell
from emu.report.drawn import SHOWN, better_part, interval_text, share_text
from emu.report.intervals import Mean, mean_of
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
from emu.report.page.pages import page
from emu.report.table import number


def columns_of(result: SweepResult) -> dict[str, list[Any]]:
    """Swept keys, seed and round where there are any, status, then all figures of the runs."""
    rows = result.rows
    columns: dict[str, list[Any]] = {
        key: [row.point.values.get(key) for row in rows] for key in result.keys
    }
    if any(row.point.seed is not None for row in rows):
        columns["seed"] = [row.point.seed for row in rows]
    if any(row.point.round for row in rows):
        columns["round"] = [row.point.round for row in rows]
    if any(row.meets is not None for row in rows):
        columns["meets"] = [row.meets for row in rows]
    columns["status"] = [row.result.status for row in rows]
    columns["error"] = [row.result.error for row in rows]
    columns["gpus"] = [row.result.gpus or None for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.result.figures)
    for name in names:
        columns[name] = [row.result.figures.get(name) for row in rows]
    if any(row.draws is not None for row in rows):
        columns.update(_intervals(rows))
    return columns


def _intervals(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Ends of the intervals of the figures that tables have, where they come from, and how often
    draws of a point are better than those of the first."""
    found: dict[str, list[Any]] = {}
    first = next(row.draws for row in rows if row.draws is not None)
    for name in SHOWN:
        mine = [row.draws.figures.get(name) if row.draws else None for row in rows]
        if not any(mine):
            continue
        found[f"{name}.low"] = [one and one.low for one in mine]
        found[f"{name}.high"] = [one and one.high for one in mine]
        found[f"{name}.from"] = [one and share_text(one) for one in mine]
        found[f"{name}.better"] = [
            None if row.draws is None else better_part(name, first, row.draws) for row in rows
        ]
    return found


def write_results(result: SweepResult) -> None:
    """Write the files. Raises InputError without pyarrow if the sweep asks for Parquet."""
    columns = columns_of(result)
    write_text(result.directory / "results.csv", _csv(columns))
    content = {
        "kind": result.sweep.kind,
        "keys": result.keys,
        "points": len(result.rows),
        "answer": msgspec.to_builtins(result.answer),
        **_draws_of(result.rows),
        "sweep": msgspec.to_builtins(result.sweep),
    }
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    write_bytes(result.directory / "sweep.json", text + b"\n")
    if result.sweep.parquet:
        _write_parquet(result.directory / "results.parquet", columns, result.source)


def _draws_of(rows: Sequence[Row]) -> dict[str, Any]:
    """What was drawn, for sweep.json; nothing without draws."""
    draws = [row.draws for row in rows]
    first = next((one for one in draws if one is not None), None)
    if first is None:
        return {}
    figures = [
        one and {name: one.figures[name] for name in SHOWN if name in one.figures} for one in draws
    ]
    return {
        "draws": {
            "count": first.count,
            "level_percent": first.level_percent,
            "engines": list(dict.fromkeys(e for one in draws if one for e in one.engines)),
            "points": msgspec.to_builtins(figures),
        }
    }


def _csv(columns: dict[str, list[Any]]) -> str:
    lines = [",".join(quote(name) for name in columns)]
    table = zip(*columns.values(), strict=True)
    lines += [",".join(map(_csv_cell, cells)) for cells in table]
    return "\n".join(lines) + "\n"


def _csv_cell(value: Any) -> str:
    return text_cell(value) if isinstance(value, str) else quote(cell_text(value))


def cell_text(value: Any) -> str:
    """A value as it stands in a table: empty for none, JSON for lists and tables."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return msgspec.json.encode(value).decode()


def _write_parquet(path: Path, columns: dict[str, list[Any]], source: str) -> None:
    with needs_extra("parquet", source):
        import pyarrow
        import pyarrow.parquet
    table = pyarrow.table({name: _parquet_column(values) for name, values in columns.items()})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    with writing(path):
        write_bytes(path, buffer.getvalue())


def _parquet_column(values: list[Any]) -> list[Any]:
    """Numbers stay numbers, a mixture becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or kinds in ({bool}, {str}):
        return [float(v) if kinds == {int, float} and v is not None else v for v in values]
    return [None if value is None else cell_text(value) for value in values]


# --------------------------------------------------------------------------------------------------
# What keys and figures of a sweep are called in tables and charts, and which are shown. Pure.

FIGURES: Final[Mapping[str, str]] = {
    "completed": "completed",
    "p99_ttft_ms": "TTFT p99",
    "p99_tpot_ms": "TPOT p99",
    "p99_e2el_ms": "E2E p99",
    "output_throughput": "tokens/s",
    "request_goodput": "goodput",
    "gpus": "GPUs",
    "gpu_seconds.total": "GPU s",
    "cost": "cost",
    "load.verdict": "load",
}
"""Figure -> its short name; those that every sweep shows."""
_LATENCY: Final = re.compile(r"(mean|median|std|p\d+)_(ttft|tpot|itl|e2el)_ms")
_METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_GROUP: Final = re.compile(r"replicas\.(\d+)\.(.+)")


def conditions_of(result: SweepResult) -> list[str]:
    """Figures that the conditions of a search name."""
    if result.sweep.search is None:
        return []
    meet = result.sweep.search.meet
    return [one.name for one in parse_conditions(meet, result.source, "search.meet")]


def shown_figures(result: SweepResult, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Figures of the tables: those of the conditions, then the usual ones.

    A condition on p95 TTFT stands in place of the usual p99.
    """
    asked = list(dict.fromkeys(conditions_of(result)))
    metrics = {match[2] for name in asked if (match := _LATENCY.fullmatch(name))}
    usual = [
        name
        for name in FIGURES
        if not ((match := _LATENCY.fullmatch(name)) and match[2] in metrics)
    ]
    return [name for name in dict.fromkeys((*asked, *usual)) if any(columns.get(name, ()))]


def latencies(result: SweepResult) -> list[str]:
    """The latencies that charts show: of the conditions, else p99 of TTFT and TPOT."""
    asked = [name for name in conditions_of(result) if _LATENCY.fullmatch(name)]
    return asked or ["p99_ttft_ms", "p99_tpot_ms"]


def plot_names(result: SweepResult) -> tuple[str, str]:
    """The axes (x, y) of the trade-off."""
    plot, pareto = result.sweep.plot, result.sweep.pareto
    if pareto is not None and len(pareto.minimize) > 1:
        return pareto.minimize[0], pareto.minimize[1]
    return plot.x, plot.y or latencies(result)[0]


def figure_label(name: str) -> str:
    """TTFT p95 for p95_ttft_ms; other names as they are."""
    match = _LATENCY.fullmatch(name)
    if match is not None:
        return f"{_METRICS[match[2]]} {match[1]}"
    return FIGURES.get(name, name)


def key_label(key: str, keys: Sequence[str], roles: Sequence[str]) -> str:
    """The last part of a dotted key, or as much of its end as tells it apart from the others.

    A group of replicas is called by its role (`prefill count`) where no other group has it.
    """
    match = _GROUP.fullmatch(key)
    if match is not None and int(match[1]) < len(roles):
        role = roles[int(match[1])]
        return f"{role if roles.count(role) == 1 else f'{role} {match[1]}'} {match[2]}"
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = parts[-count:]
        if sum(other.split(".")[-count:] == end for other in keys) <= 1:
            return ".".join(end)
    return key


def in_order(result: SweepResult) -> list[int]:
    """Rows along the axis: of a search and of random points the keys count, not the trials."""
    order = list(range(len(result.rows)))
    if result.sweep.search is None and result.sweep.random is None and result.sweep.pareto is None:
        return order

    def place(index: int) -> list[tuple[bool, float, str]]:
        values = [result.rows[index].point.values.get(key) for key in result.keys]
        return [
            (True, float(v), "")
            if isinstance(v, (int, float)) and not isinstance(v, bool)
            else (False, 0.0, str(v))
            for v in values
        ]

    return sorted(order, key=lambda index: (place(index), result.rows[index].point.seed or 0))


# --- the page: a pivot, the trade-off, what each key does, and all points as a table --------------
# Limits come from the conditions of a search, or from the objectives (`[slo]`) of the runs. Points
# that differ in nothing but their seed are one, with the mean and its 95 % interval.

_SOURCED: Final = ("p99_ttft_ms", "p99_tpot_ms", "request_goodput")
"""Figures of which it is said what their intervals come from; the files say it of all."""
_ROWS_MAX: Final = 500
_KEYS_MAX: Final = 6
_CURVES_MAX: Final = 10
_LABELS_MAX: Final = 40
_PIVOT_MAX: Final = 24

Columns = dict[str, list[Any]]


class Cloud(msgspec.Struct):
    """Points of a chart: place, mean over seeds, what is said about each."""

    x: list[float] = []
    y: list[Mean] = []
    rows: list[int] = []


class Pivot(msgspec.Struct):
    """A table of one figure over two keys, or of several over one."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def write_page(result: SweepResult) -> Path:
    """Write report.html; its path."""
    columns = columns_of(result)
    limits = limits_of(result, columns)
    charts = [*_trade_off(result, columns, limits), *_by_key(result, columns, limits)]
    head, rows = _table(result, columns)
    caption = f"{len(result.rows)} points"
    if len(result.rows) > _ROWS_MAX:
        caption += f", the first {_ROWS_MAX}; results.csv has all"
    sections = [("trade-off", "Trade-off"), ("keys", "By key")]
    present = {chart.section for chart in charts}
    text = page(
        "sweep.html",
        title=f"emu: sweep {Path(result.source).stem}",
        charts=charts,
        facts=[
            f"{len(result.rows)} points",
            result.sweep.kind,
            f"base {result.sweep.base}",
            *drawn_lines(result),
        ],
        answer="" if result.answer is None else answer_text(result.answer),
        pivot=_pivot(result, columns),
        sections=[(key, name) for key, name in sections if key in present],
        caption=caption,
        head=head,
        rows=rows,
    )
    path = result.directory / "report.html"
    write_text(path, text)
    return path


def answer_text(answer: Answer) -> str:
    """The answer of a search in one sentence."""
    wanted = " and ".join(answer.conditions)
    name = f"{answer.goal} {answer.key} with {wanted}"
    if answer.value is None:
        return f"{name}: none in the range ({answer.fails_at:g} does not meet it)"
    if answer.fails_at is None:
        text = f"{name}: {answer.value:g}, the end of the range; the true answer may lie beyond"
    else:
        text = f"{name}: {answer.value:g} ({answer.fails_at:g} does not meet it)"
    if not answer.is_monotone:
        text += "; the conditions changed more than once over the range, the first change counts"
    return text


def drawn_lines(result: SweepResult) -> list[str]:
    """What intervals come from, in words; nothing without draws."""
    drawn = [row.draws for row in result.rows if row.draws is not None]
    if not drawn:
        return []
    first = drawn[0]
    lines = [f"{first.level_percent} % intervals of {first.count} draws at each point"]
    for name in _SOURCED:
        shares: dict[str, list[float]] = {}
        for one in drawn:
            for source, share in (one.figures[name].shares if name in one.figures else {}).items():
                shares.setdefault(source, []).append(share)
        if shares:
            means = {source: sum(each) / len(each) for source, each in shares.items()}
            ordered = sorted(means.items(), key=lambda item: -item[1])
            text = ", ".join(f"{source} {100 * share:.0f} %" for source, share in ordered)
            lines.append(f"{name} varies by {text} (mean over points)")
    return [*lines, "engines: " + "; ".join(first.engines)]


def limits_of(result: SweepResult, columns: Columns) -> dict[str, tuple[str, float]]:
    """Figure -> (operator, limit): of the search, or the objectives that all runs share."""
    found: dict[str, tuple[str, float]] = {}
    if result.sweep.search is not None:
        for one in parse_conditions(result.sweep.search.meet, result.source, "search.meet"):
            if isinstance(one.limit, float):
                found[one.name] = (one.operator[0], one.limit)
    for metric, objective in (("ttft", "ttft"), ("tpot", "tpot"), ("e2el", "e2e")):
        values = {v for v in columns.get(f"slo.{objective}_ms", []) if v is not None}
        if len(values) == 1:
            for name in columns:
                if name.endswith(f"_{metric}_ms"):
                    found.setdefault(name, ("<", float(next(iter(values)))))
    return found


def _numbers(values: Sequence[Any]) -> list[float | None]:
    return [
        float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else None
        for v in values
    ]


def _groups(result: SweepResult, columns: Columns, x: str, y: str) -> Cloud:
    """Points with both figures; those that differ in their seed only are one."""
    xs, ys = _numbers(columns[x]), _numbers(columns[y])
    groups: dict[tuple[str, ...], list[int]] = {}
    for index in range(len(result.rows)):
        if xs[index] is not None and ys[index] is not None:
            key = tuple(cell_text(columns[name][index]) for name in result.keys)
            groups.setdefault(key, []).append(index)
    cloud = Cloud()
    for rows in groups.values():
        cloud.x.append(mean_of([value for i in rows if (value := xs[i]) is not None]).mean)
        cloud.y.append(mean_of([value for i in rows if (value := ys[i]) is not None]))
        cloud.rows.append(rows[0])
    return cloud


# --- trade-off -----------------------------------------------------------------------------------
def _trade_off(
    result: SweepResult, columns: Columns, limits: dict[str, tuple[str, float]]
) -> list[Chart]:
    names = list(plot_names(result))
    if any(name not in columns for name in names):
        return []
    cloud = _groups(result, columns, *names)
    if not cloud.x:
        return []
    ys = [one.mean for one in cloud.y]
    best = front(names, cloud.x, ys)
    labels = [_label(result, columns, i) for i in cloud.rows]
    series = [
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
    side = "right" if is_better_high(names[0]) else "left"
    height = "higher" if is_better_high(names[1]) else "lower"
    keys = ", ".join(_short(key, result) for key in result.keys)
    note = f"labels: {keys}; better is {height} and further {side}"
    chart = Chart(
        chart_id="trade-off",
        section="trade-off",
        title=f"{names[1]} against {names[0]}",
        note=note + ("; green: objectives met" if set(names) & set(limits) else ""),
        x=close_axis(min(cloud.x), max(cloud.x), names[0]),
        y=close_axis(min(ys), max(ys), names[1]),
        series=series,
        limits=_limit_lines(names, limits),
        regions=_region(names, limits),
        height=420,
        is_wide=True,
    )
    return [chart]


def _beside(result: SweepResult, columns: Columns, rows: Sequence[int]) -> list[str] | None:
    """The settings of each point in short, if there are few enough to be read."""
    if len(rows) > _LABELS_MAX:
        return None
    return [", ".join(_text(columns[key][row]) for key in result.keys) for row in rows]


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
    return "\n".join(f"{_short(key, result)} {cell_text(columns[key][index])}" for key in keys)


# --- by key --------------------------------------------------------------------------------------
def _by_key(
    result: SweepResult, columns: Columns, limits: dict[str, tuple[str, float]]
) -> list[Chart]:
    """For each numeric key: the latencies of the conditions, or p99 TTFT and TPOT, over it."""
    searched = result.sweep.search is not None
    names = [name for name in limits if name in columns] if searched else []
    charts = []
    for place, key in enumerate(result.keys[:_KEYS_MAX]):
        if len({x for x in _numbers(columns[key]) if x is not None}) < 2:
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
    cloud = _groups(result, columns, key, name)
    for x, mean, row in zip(cloud.x, cloud.y, cloud.rows, strict=True):
        label = ", ".join(f"{_short(k, result)} {cell_text(columns[k][row])}" for k in others)
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
    series = []
    for index, (label, points) in enumerate(curves.items()):
        xs, means = [x for x, _ in points], [mean for _, mean in points]
        has_band = any(mean.half is not None for mean in means)
        series.append(
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
    xs = [x for points in curves.values() for x, _ in points]
    ys = [mean.mean for points in curves.values() for _, mean in points]
    lines = _limit_lines(["", figure], limits)
    notes = [f"dashed: {lines[0].text}"] if lines else []
    if any(one.low for one in series):
        notes.append("bands: 95 % intervals over seeds")
    return Chart(
        chart_id="key-" + "".join(c if c.isalnum() else "-" for c in name),
        section="keys",
        title=f"{figure} over {key}",
        note="; ".join(notes),
        x=spread_axis(min(xs), max(xs), key),
        y=spread_axis(min(ys), max(ys), figure),
        series=series,
        limits=lines,
        regions=_region(["", figure], limits),
        height=300,
    )


# --- tables --------------------------------------------------------------------------------------
def mean_text(mean: Mean) -> str:
    """`12.3 ± 0.4 (5 seeds)`, or the figure alone."""
    if mean.half is None:
        return number(mean.mean)
    return f"{number(mean.mean)} ± {number(mean.half)} ({mean.count} seeds)"


def _pivot(result: SweepResult, columns: Columns) -> Pivot | None:
    """The figure of the plot over the two keys of a grid; nothing for other sweeps."""
    keys = [key for key in result.keys if len({cell_text(v) for v in columns[key]}) > 1]
    figure = plot_names(result)[1]
    if len(keys) != 2 or figure not in columns:
        return None
    values: dict[tuple[str, str], list[float]] = {}
    for index, value in enumerate(_numbers(columns[figure])):
        if value is not None:
            place = (cell_text(columns[keys[0]][index]), cell_text(columns[keys[1]][index]))
            values.setdefault(place, []).append(value)
    rows = list(dict.fromkeys(row for row, _ in values))
    across = list(dict.fromkeys(column for _, column in values))
    if not 0 < len(across) <= _PIVOT_MAX or not 0 < len(rows) <= _PIVOT_MAX:
        return None
    return Pivot(
        caption=f"{figure}: {keys[0]} down, {keys[1]} across",
        head=[_short(keys[0], result), *(f"{_short(keys[1], result)} {c}" for c in across)],
        rows=[
            [
                row,
                *(
                    mean_text(mean_of(values[row, column])) if (row, column) in values else "-"
                    for column in across
                ),
            ]
            for row in rows
        ],
    )


def _table(result: SweepResult, columns: Columns) -> tuple[list[str], list[list[str]]]:
    names = [*result.keys, *(name for name in ("seed", "meets") if name in columns)]
    if any(row.result.status != "completed" for row in result.rows):
        names += ["status", "error"]
    names += shown_figures(result, columns)
    names = [name for name in names if any(value not in (None, "") for value in columns[name])]
    heads = [_short(name, result) if name in result.keys else name for name in names]
    return heads, [
        [drawn_cell(result.rows[index], name, columns[name][index]) for name in names]
        for index in in_order(result)[:_ROWS_MAX]
    ]


def _short(key: str, result: SweepResult) -> str:
    return key_label(key, result.keys, result.roles)


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else cell_text(value)


def drawn_cell(row: Row, name: str, value: Any) -> str:
    """A value of a point in a table, with its interval where there are draws."""
    text = _text(value)
    interval = None if row.draws is None else row.draws.figures.get(name)
    return text if interval is None else f"{text} ({interval_text(interval)})"


# --- the command ----------------------------------------------------------------------------------
_ROWS_SHOWN = 30
_HEADING_COLUMNS = 12


def sweep_command(
    path: Path,
    *,
    output: Path | None,
    jobs: int,
    ray: str | None,
    settings: Sequence[str],
    quiet: bool,
    report: bool,
    as_json: bool = False,
    draws: int | None = None,
) -> int:
    """Run a sweep, write its files, print its table."""
    if jobs < 0:
        raise InputError("sweep", None, "--jobs", f"must be at least 0, not {jobs}")
    started_s = time.monotonic()
    overrides = settings_of(settings)

    def go(watch: Callable[[int, int, str], None] | None) -> SweepResult:
        return run_sweep(
            path,
            jobs=jobs,
            ray=ray,
            output=output,
            settings=overrides,
            watch=watch,
            draws=draws,
        )

    try:
        if quiet or as_json or not sys.stderr.isatty():
            result = go(None)
        else:
            with Progress(
                TextColumn("points"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            ) as bar:
                task = bar.add_task("points", total=None, line="")
                result = go(
                    lambda done, known, line: bar.update(
                        task, completed=done, total=known, line=line
                    )
                )
    except KeyboardInterrupt:
        print("what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise
    result.wall_s = time.monotonic() - started_s
    write_results(result)
    if report:
        write_page(result)
    if as_json:
        print((result.directory / "sweep.json").read_text(encoding="utf-8"), end="")
    elif not quiet:
        print_result(result, open_console())
    for row in result.rows:
        if row.result.error:
            print(f"{row.result.status}: {row.result.error}", file=sys.stderr)
    return 0


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as values. Raises InputError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError("--set", None, text, "expected KEY=VALUE")
        try:
            settings[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key.strip()] = value.strip()
    return settings


def print_result(result: SweepResult, console: Console) -> None:
    """The points as a table, and the answer of a search."""
    columns = columns_of(result)
    headings = _headings(result, columns)
    table = Table(title=f"{result.source}: {len(result.rows)} points", title_justify="left")
    for heading in headings.values():
        table.add_column(broken(heading), justify="right", overflow="fold")
    for index in in_order(result)[:_ROWS_SHOWN]:
        row = result.rows[index]
        table.add_row(*(Text(drawn_cell(row, name, columns[name][index])) for name in headings))
    console.print(table)
    if len(result.rows) > _ROWS_SHOWN:
        console.print(f"... and {len(result.rows) - _ROWS_SHOWN} more in results.csv")
    for line in drawn_lines(result):
        console.print(line, soft_wrap=True)
    if result.answer is not None:
        console.print(answer_text(result.answer), soft_wrap=True)
    stored = f", {result.from_store} of them from the store" if result.from_store else ""
    took = f"{len(result.rows)} points in {result.wall_s:.1f} s{stored}"
    console.print(f"{took}; results in {result.directory}", soft_wrap=True)


def broken(key: str) -> str:
    """A key in lines of at most twelve characters where its underscores and spaces allow it."""
    lines = [""]
    for part in key.replace("_", "_\n").replace(" ", " \n").split("\n"):
        if len(lines[-1]) + len(part) > _HEADING_COLUMNS and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _headings(result: SweepResult, columns: dict[str, list[Any]]) -> dict[str, str]:
    """Column -> heading."""
    headings = {key: key_label(key, result.keys, result.roles) for key in result.keys}
    headings.update((name, name) for name in ("seed", "meets") if name in columns)
    if any(row.result.status != "completed" for row in result.rows):
        headings["status"] = "status"
    skipped = ("completed", "p99_e2el_ms")
    headings.update(
        (name, figure_label(name))
        for name in shown_figures(result, columns)
        if name not in skipped or name in conditions_of(result)
    )
    return headings
