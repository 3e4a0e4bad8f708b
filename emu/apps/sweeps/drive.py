"""A sweep from its file to its directory: which points, what runs them, in what order they stand.

    result = run_sweep(SweepOptions(sweep=Path("sweep.toml"), jobs=2))
    result.rows             # every point with its figures, in the order of the sweep
    result.answer           # of a search: the value, the bracket around the change, the verdict

Rows, files and answer are the same for any number of workers and any pool: rounds are whole, and
results are put in the order of their points. Interrupting a sweep loses only the runs under way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.shared.conditions import (
    check_figure,
    parse_conditions,
)
from emu.apps.shared.points import Base, Driver, Row, point_pool, point_store
from emu.apps.shared.settings import settings_of
from emu.apps.shared.watching import Watch
from emu.apps.sweeps.front import search_front
from emu.apps.sweeps.options import SweepOptions
from emu.apps.sweeps.points import fixed_points
from emu.apps.sweeps.search import Answer, search_value
from emu.apps.sweeps.sweepfile import (
    Sweep,
    flat,
    load_sweep,
)
from emu.cluster.plan import make_plan
from emu.documents import Document
from emu.errors import InputError
from emu.options.shared import Workers


class SweepResult(msgspec.Struct):
    """A sweep that has ended."""

    source: str
    directory: Path
    sweep: Sweep
    keys: list[str]
    """The swept keys."""
    rows: list[Row]
    answer: Answer | None
    from_store: int
    """Points that had been run before."""
    roles: list[str] = []
    """Roles of the groups of replicas of the first point that has a configuration."""
    known: list[str] = []
    """How well the engine is known at the first point that completed, and at the first with each
    other kind of GPU that is swept; none with draws."""
    wall_s: float = 0.0


NO_CONFIG: Final = "every point of the sweep is wrong; the first: "


def run_sweep(options: SweepOptions, watch: Watch | None = None) -> SweepResult:
    """Run a sweep file (or what is left of it); writes nothing but the store.

    Raises InputError, RunError, InvariantViolation; KeyboardInterrupt leaves a store to go on from.
    """
    path = options.sweep
    sweep = load_sweep(path)
    source = str(path)
    if options.draws is not None:
        sweep = msgspec.structs.replace(sweep, draws=options.draws)
    _check_draws(sweep, source)
    base = Base(path.parent / sweep.base)
    directory = options.output or path.parent / (sweep.output or f"runs/{path.stem}")
    directory = Path(os.path.normpath(directory))
    fixed = {**flat(sweep.fixed), **settings_of(options.overrides)}
    _check_figures(sweep, source)
    first = [] if sweep.kind in ("search", "pareto") else fixed_points(sweep, source)
    with point_pool(options.jobs, options.ray) as pool:
        keep_in = str(directory.resolve() / "runs") if sweep.keep_runs else ""
        driver = Driver(base, fixed, point_store(directory), pool, keep_in)
        if watch is not None:
            driver.watch = watch
        answer: Answer | None = None
        if sweep.search is not None:
            rows, answer = search_value(driver, sweep, sweep.search, source)
            keys = [sweep.search.key]
        elif sweep.pareto is not None:
            rows = search_front(driver, sweep, sweep.pareto, source)
            keys = list(rows[0].point.values)
        else:
            rows = driver.rows(first)
            keys = list(dict.fromkeys(key for point in first for key in point.values))
    if all(row.result.status == "invalid" for row in rows):
        raise InputError(source, None, "", NO_CONFIG + rows[0].result.error)
    result = SweepResult(source, directory, sweep, keys, rows, answer, driver.from_store)
    if sweep.draws:
        _draw(driver, result, options)
    else:
        result.known = _known(driver, rows, source)
    result.roles = _roles(base, fixed, rows)
    return result


def _known(driver: Driver, rows: Sequence[Row], source: str) -> list[str]:
    """How well the engine is known, by arithmetic: of points that completed the first, and the
    first on each kind of GPU."""
    from emu.runs.engine_lines import known_line, typical_of

    lines: dict[str, str] = {}
    for row in rows:
        figures = row.result.figures
        gpus = {key: value for key, value in row.point.values.items() if key.endswith(".gpu")}
        where = ", ".join(f"{key} = {value}" for key, value in gpus.items())
        if row.result.status != "completed" or not figures["completed"] or where in lines:
            continue
        config = driver.config_of(row.point)
        plan = make_plan(config, source)
        count = figures["completed"]
        shape = typical_of(
            plan,
            in_flight=count * figures["mean_e2el_ms"] / 1000 / max(figures["duration"], 1e-9),
            prompt_tokens=figures["total_input_tokens"] / count,
            output_tokens=figures["total_output_tokens"] / count,
        )
        lines[where] = known_line(config, plan, shape)
    is_one = len(lines) == 1
    return [
        f"engine at {'the first point' if is_one else where}: {line}"
        for where, line in lines.items()
        if line
    ]


def _roles(base: Base, fixed: Document, rows: Sequence[Row]) -> list[str]:
    """Roles of the groups of replicas; none where points differ in them."""
    if any(key == "replicas" or key.endswith(".role") for row in rows for key in row.point.values):
        return []
    for row in rows:
        if row.result.status != "invalid":
            return [str(table.role) for table in base.config(fixed, row.point).replicas]
    return []


def _check_draws(sweep: Sweep, source: str) -> None:
    """Draws go with points that are known before they are run. Raises InputError."""
    if not sweep.draws:
        return
    if sweep.draws < 2:
        raise InputError(source, None, "draws", "an interval needs 2 draws or more")
    if sweep.kind in ("search", "pareto"):
        problem = f"go with a grid, a list or random points, not with [{sweep.kind}]"
        raise InputError(source, None, "draws", problem)
    if sweep.seeds:
        raise InputError(source, None, "draws", "seed themselves; leave out seeds")


def _draw(driver: Driver, result: SweepResult, workers: Workers) -> None:
    """Draws at each point that was completed; equal points have the same."""
    from emu.apps.sweeps.draws import draw_each  # most sweeps have none

    completed = [row for row in result.rows if row.result.status == "completed"]
    unlike = {row.result.key: row for row in completed}
    found = draw_each(
        [driver.config_of(row.point) for row in unlike.values()],
        result.source,
        result.sweep.draws,
        workers,
        directory=result.directory,
        told=lambda done, known: driver.watch(done, known, "draws"),
    )
    by_key = dict(zip(unlike, found, strict=True))
    for row in completed:
        row.draws = by_key[row.result.key]


def _check_figures(sweep: Sweep, source: str) -> None:
    """Names of figures are checked before anything runs. Raises InputError."""
    if sweep.search is not None:
        parse_conditions(sweep.search.meet, source, "search.meet")
    if sweep.pareto is not None:
        for index, name in enumerate(sweep.pareto.minimize):
            check_figure(name, source, f"pareto.minimize.{index}")
    for field, name in (("x", sweep.plot.x), ("y", sweep.plot.y)):
        if name and "." not in name:  # with a dot it may be a key of the points
            check_figure(name, source, f"plot.{field}")
