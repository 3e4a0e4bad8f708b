"""The page of a sweep: a pivot, the trade-off, what each key does, and all points as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from emu.apps.shared.conditions import parse_conditions
from emu.apps.sweeps.cells import Columns, drawn_cell, key_name, mean_text, numbers
from emu.apps.sweeps.charts import by_key, trade_off
from emu.apps.sweeps.drive import SweepResult
from emu.apps.sweeps.labels import in_order, plot_names, shown_figures
from emu.apps.sweeps.results import cell_text, columns_of
from emu.apps.sweeps.words import answer_text, drawn_lines
from emu.report.atomic import write_text
from emu.report.intervals import mean_of
from emu.report.page.pages import page

_ROWS_MAX: Final = 500
_PIVOT_MAX: Final = 24


class TableText(msgspec.Struct):
    """A table of the page."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def write_page(result: SweepResult) -> Path:
    """Write report.html; its path."""
    columns = columns_of(result)
    limits = limits_of(result, columns)
    text = page(
        "sweep.html",
        title=f"emu: sweep {Path(result.source).stem}",
        charts=[*trade_off(result, columns, limits), *by_key(result, columns, limits)],
        facts=[
            f"{len(result.rows)} points",
            result.sweep.kind,
            f"base {result.sweep.base}",
            *drawn_lines(result),
        ],
        answer="" if result.answer is None else answer_text(result.answer),
        pivot=_pivot(result, columns),
        sections=[("trade-off", "Trade-off"), ("keys", "By key")],
        points=_points(result, columns),
    )
    path = result.directory / "report.html"
    write_text(path, text)
    return path


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


def _pivot(result: SweepResult, columns: Columns) -> TableText | None:
    """The figure of the plot over the two keys of a grid; nothing for other sweeps."""
    keys = [key for key in result.keys if len({cell_text(v) for v in columns[key]}) > 1]
    figure = plot_names(result)[1]
    if len(keys) != 2 or figure not in columns:
        return None
    values: dict[tuple[str, str], list[float]] = {}
    for index, value in enumerate(numbers(columns[figure])):
        if value is not None:
            place = (cell_text(columns[keys[0]][index]), cell_text(columns[keys[1]][index]))
            values.setdefault(place, []).append(value)
    rows = list(dict.fromkeys(row for row, _ in values))
    across = list(dict.fromkeys(column for _, column in values))
    if not 0 < len(across) <= _PIVOT_MAX or not 0 < len(rows) <= _PIVOT_MAX:
        return None
    return TableText(
        caption=f"{figure}: {keys[0]} down, {keys[1]} across",
        head=[key_name(keys[0], result), *(f"{key_name(keys[1], result)} {c}" for c in across)],
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


def _points(result: SweepResult, columns: Columns) -> TableText:
    """All points, or the first of many."""
    caption = f"{len(result.rows)} points"
    if len(result.rows) > _ROWS_MAX:
        caption += f", the first {_ROWS_MAX}; results.csv has all"
    names = [*result.keys, *(name for name in ("seed", "meets") if name in columns)]
    if any(row.result.status != "completed" for row in result.rows):
        names += ["status", "error"]
    names += shown_figures(result, columns)
    names = [name for name in names if any(value not in (None, "") for value in columns[name])]
    heads = [key_name(name, result) if name in result.keys else name for name in names]
    rows = [
        [drawn_cell(result.rows[index], name, columns[name][index]) for name in names]
        for index in in_order(result)[:_ROWS_MAX]
    ]
    return TableText(caption, heads, rows)
