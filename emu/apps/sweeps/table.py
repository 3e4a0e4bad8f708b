"""`emu.sweep`: many runs from Python, their figures as one table in memory.

A class may be a value of a key, as `{"router.policy": ["load", Mine]}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from emu.api import Rows, column_of, table_of
from emu.apps.shared.points import (
    Base,
    Point,
    PointResult,
    PointStore,
    Task,
    point_pool,
    point_results,
    point_store,
    with_seeds,
)
from emu.apps.shared.watching import Watch, watching
from emu.config.toml_text import toml_text
from emu.documents import DocumentView
from emu.errors import InputError, RunError
from emu.plugins.named import is_object, replaced
from emu.process.interrupts import scratch
from emu.report.atomic import write_text


def sweep(
    config: str | Path | DocumentView,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    points: Iterable[DocumentView] = (),
    seeds: Sequence[int] = (),
    jobs: int = 0,
    ray: str | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> Rows:
    """Run all combinations of `grid` (dotted key -> values), or the `points`, with each seed.

    One record for each run: the keys, `seed`, `status`, `error`, and every figure of summary.json
    by its dotted name (NaN where there is none). `output`: a directory whose store is used, so that
    what was run is not run again; without it nothing is left. `progress`: a bar, where a terminal
    or a notebook shows it. Classes as values run in this process. Raises InputError for a wrong
    configuration.
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
        with watching("points", wanted=progress) as watch:
            rows = _rows(base, store, with_seeds(values, list(seeds)), jobs, ray, watch)
    names = dict.fromkeys(name for _, result in rows for name in result.figures)
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(name for point, _ in rows for name in point.values):
        columns[key] = [point.values.get(key) for point, _ in rows]
    columns["seed"] = [-1 if point.seed is None else point.seed for point, _ in rows]
    columns["status"] = [result.status for _, result in rows]
    columns["error"] = [result.error for _, result in rows]
    for name in names:
        columns[name] = [result.figures.get(name) for _, result in rows]
    return table_of({name: column_of(values) for name, values in columns.items()})


def _rows(
    base: Base,
    store: PointStore,
    points: Sequence[Point],
    jobs: int,
    ray: str | None,
    watch: Watch,
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
    with point_pool(1 if is_local else jobs, ray) as pool:
        results = {}
        for result in point_results(tasks, store, pool):
            results[result.key] = result
            watch(len(results), len(tasks), "")
    for result in results.values():
        if result.status == "invalid":
            raise InputError(base.source, None, "", result.error)
        if result.status == "violated":
            raise RunError(result.error)
    return [(point, results[key]) for point, key in order]
