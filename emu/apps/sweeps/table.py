"""`emu.sweep`: many runs from Python, their figures as one table in memory.

A class may be a value of a key, as `{"router.policy": ["load", Mine]}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from emu.api import Rows
from emu.apps.shared.points import (
    Base,
    Point,
    PointResult,
    PointStore,
    Task,
    point_pool,
    point_store,
    with_seeds,
)
from emu.config.names import toml_text
from emu.errors import InputError, RunError
from emu.plugins import is_object, replaced
from emu.process.interrupts import scratch
from emu.report.atomic import write_text


def sweep(
    config: str | Path | Mapping[str, Any],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    points: Iterable[Mapping[str, Any]] = (),
    seeds: Sequence[int] = (),
    jobs: int = 0,
    ray: str | None = None,
    output: str | Path | None = None,
) -> Rows:
    """Run all combinations of `grid` (dotted key -> values), or the `points`, with each seed.

    One record for each run: the keys, `seed`, `status`, `error`, and every figure of summary.json
    by its dotted name (NaN where there is none). `output`: a directory whose store is used, so that
    what was run is not run again; without it nothing is left. Classes as values run in this
    process. Raises InputError for a wrong configuration.
    """
    values = [dict(point) for point in points]
    if grid:
        keys = list(grid)
        values += [dict(zip(keys, found, strict=True)) for found in product(*grid.values())]
    if not values:
        raise InputError("sweep", None, "grid", "give a grid or points")
    values = [replaced(value) for value in values]
    with scratch("emu-sweep-") as directory:
        place = Path(output) if output is not None else directory
        path = Path(config) if isinstance(config, (str, Path)) else directory / "base.toml"
        if isinstance(config, Mapping):
            write_text(path, toml_text(replaced(dict(config))))
        base, store = Base(path), point_store(place)
        rows = _rows(base, store, with_seeds(values, list(seeds)), jobs, ray)
    names = dict.fromkeys(name for _, result in rows for name in result.figures)
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(name for point, _ in rows for name in point.values):
        columns[key] = [point.values.get(key) for point, _ in rows]
    columns["seed"] = [-1 if point.seed is None else point.seed for point, _ in rows]
    columns["status"] = [result.status for _, result in rows]
    columns["error"] = [result.error for _, result in rows]
    for name in names:
        columns[name] = [result.figures.get(name) for _, result in rows]
    return _table(columns)


def _rows(
    base: Base, store: PointStore, points: Sequence[Point], jobs: int, ray: str | None
) -> list[tuple[Point, PointResult]]:
    """The points and what came of them, in their order. Raises InputError, RunError."""
    tasks: dict[str, Task] = {}
    order = []
    is_local = False
    for point in points:
        its = base.config({}, point)
        key = base.key(its)
        tasks[key] = Task(key, its, base.source, "")
        order.append((point, key))
        is_local |= any(isinstance(v, str) and is_object(v) for v in point.values.values())
    results = {key: found for key in tasks if (found := store.get(key)) is not None}
    left = [task for key, task in tasks.items() if key not in results]
    with point_pool(1 if is_local else jobs, ray) as pool:
        for result in pool.results(left):
            if result.is_kept:
                store.put(result.key, result)
            results[result.key] = result
    for result in results.values():
        if result.status == "invalid":
            raise InputError(base.source, None, "", result.error)
        if result.status == "violated":
            raise RunError(result.error)
    return [(point, results[key]) for point, key in order]


def _table(columns: dict[str, list[Any]]) -> Rows:
    """Columns as records: numbers where all are numbers (NaN for none), else words."""
    arrays = {}
    for name, values in columns.items():
        if all(isinstance(v, bool) or v is None for v in values) and None not in values:
            arrays[name] = np.array(values)
        elif all(v is None or isinstance(v, (int, float)) for v in values):
            is_whole = all(type(v) is int for v in values)
            kind = np.int64 if is_whole else np.float64
            arrays[name] = np.array([np.nan if v is None else v for v in values], dtype=kind)
        else:
            arrays[name] = np.array(["" if v is None else str(v) for v in values], dtype=np.str_)
    kinds = [(name, array.dtype) for name, array in arrays.items()]
    table = np.empty(len(next(iter(arrays.values()))), dtype=kinds)
    for name, array in arrays.items():
        table[name] = array
    return table.view(Rows)
