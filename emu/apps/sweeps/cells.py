"""Points of a sweep as cells of a table and as places in a chart.

Points that differ in nothing but their seed are one, with the mean and its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from emu.apps.shared.points import Row
from emu.apps.sweeps.drive import SweepResult
from emu.apps.sweeps.labels import key_label
from emu.apps.sweeps.results import cell_text
from emu.report.drawn import interval_text
from emu.report.intervals import Mean, mean_of
from emu.report.table import number

Columns = dict[str, list[Any]]


class Cloud(msgspec.Struct):
    """Points of a chart: place, mean over seeds, what is said about each."""

    x: list[float] = []
    y: list[Mean] = []
    rows: list[int] = []


def numbers(values: Sequence[Any]) -> list[float | None]:
    return [
        float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else None
        for v in values
    ]


def groups(result: SweepResult, columns: Columns, x: str, y: str) -> Cloud:
    """Points with both figures; those that differ in their seed only are one."""
    xs, ys = numbers(columns[x]), numbers(columns[y])
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


def mean_text(mean: Mean) -> str:
    """`12.3 ± 0.4 (5 seeds)`, or the figure alone."""
    if mean.half is None:
        return number(mean.mean)
    return f"{number(mean.mean)} ± {number(mean.half)} ({mean.count} seeds)"


def key_name(key: str, result: SweepResult) -> str:
    return key_label(key, result.keys, result.roles)


def value_text(value: Any) -> str:
    return number(value) if isinstance(value, float) else cell_text(value)


def drawn_cell(row: Row, name: str, value: Any) -> str:
    """A value of a point in a table, with its interval where there are draws."""
    text = value_text(value)
    interval = None if row.draws is None else row.draws.figures.get(name)
    return text if interval is None else f"{text} ({interval_text(interval)})"
