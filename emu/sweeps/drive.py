"""A sweep from its file to its directory: which points, what runs them, in what order they stand.

    result = run_sweep(Path("sweep.toml"), jobs=2)
    result.rows             # every point with its figures, in the order of the sweep
    result.answer           # of a search: the value, the bracket around the change, the verdict

Rows, files and answer are the same for any number of workers and any pool: rounds are whole, and
results are put in the order of their points. Interrupting a sweep loses only the runs under way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.errors import InputError, needs_extra
from emu.sweeps.conditions import (
    Condition,
    check_figure,
    parse_conditions,
    unserved_part,
)
from emu.sweeps.driver import (
    Base,
    Driver,
    PointResult,
    Row,
    Watch,
    point_pool,
    point_store,
)
from emu.sweeps.points import Bisection, fixed_points, rounded, with_seeds
from emu.sweeps.schema import ParetoTable, RangeTable, SearchTable, Sweep, flat, load_sweep, ranges

# --------------------------------------------------------------------------------------------------
# The front of two or three figures, searched with Optuna's NSGA-II (extra `search`).
#
# Points are asked for a round at a time and told in their order, with a seeded sampler: the search
# takes the same way whatever runs the points. A run that did not complete, or left requests
# unserved, is told as infeasible.


def search_front(driver: Driver, sweep: Sweep, table: ParetoTable, source: str) -> list[Row]:
    """All rows tried; `meets` marks those on the front. Raises InputError."""
    with needs_extra("search", source):
        import optuna
    space = ranges(table.keys, source, "pareto.keys")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.NSGAIISampler(
        seed=table.seed, population_size=max(2, table.points_per_round)
    )
    study = optuna.create_study(directions=["minimize"] * len(table.minimize), sampler=sampler)
    rows: list[Row] = []
    while len(study.trials) < table.points:
        count = min(table.points_per_round, table.points - len(study.trials))
        trials = [study.ask() for _ in range(count)]
        asked = [{key: _suggest(trial, key, one) for key, one in space.items()} for trial in trials]
        driver.line = f"{len(study.trials)} of {table.points} points"
        round_rows = driver.rows(
            with_seeds(asked, sweep.seeds, len(study.trials) // table.points_per_round)
        )
        each = len(round_rows) // count
        for at, trial in enumerate(trials):
            costs = cost_of(round_rows[at * each : (at + 1) * each], table.minimize, source)
            if costs is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, costs)
        rows += round_rows
    mark_front(rows, table.minimize)
    return rows


def _suggest(trial: Any, key: str, one: RangeTable) -> Any:
    if one.values:
        # Indices, because values may be tables or lists.
        return one.values[trial.suggest_int(key, 0, len(one.values) - 1)]
    if one.integer:
        return trial.suggest_int(
            key, math.ceil(one.min or 0), math.floor(one.max or 0), log=one.log
        )
    return rounded(trial.suggest_float(key, one.min, one.max, log=one.log))


def cost_of(rows: Sequence[Row], names: Sequence[str], source: str) -> list[float] | None:
    """Worst of each figure over the seeds; None if a run is of no use."""
    if any(row.result.status != "completed" for row in rows):
        return None
    if any(unserved_part(row.result.figures) > 0 for row in rows):
        return None
    costs = []
    for name in names:
        values = [row.result.figures.get(name) for row in rows]
        if not all(isinstance(value, (int, float)) for value in values):
            problem = f"the runs have no number {name}"
            raise InputError(source, None, "pareto.minimize", problem)
        costs.append(max(float(value) for value in values if value is not None))
    return costs


def mark_front(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Set `meets` of every row: True where no other run is better in all figures."""
    costs = [cost_of([row], names, "") for row in rows]
    for row, mine in zip(rows, costs, strict=True):
        row.meets = mine is not None and not any(
            other is not None
            and other != mine
            and all(theirs <= own for theirs, own in zip(other, mine, strict=True))
            for other in costs
        )


# --- A sweep from its file to its directory -------------------------------------------------------


class Answer(msgspec.Struct):
    """What a search found."""

    key: str
    goal: str
    conditions: list[str]
    value: float | None
    """None: not even the easy end of the range meets."""
    fails_at: float | None
    """The nearest value tried that does not meet; None if the whole range meets."""
    is_monotone: bool
    rounds: int


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
    wall_s: float = 0.0


NO_CONFIG: Final = "every point of the sweep is wrong; the first: "


def run_sweep(
    path: Path,
    *,
    jobs: int = 0,
    ray: str | None = None,
    output: Path | None = None,
    settings: dict[str, Any] | None = None,
    watch: Watch | None = None,
    draws: int | None = None,
) -> SweepResult:
    """Run a sweep file (or what is left of it); writes nothing but the store.

    `jobs` are processes of this machine (0 = its cores), `ray` is the address of a Ray cluster,
    `settings` are overrides of every point on top of the file's. Raises InputError, RunError,
    InvariantViolation; KeyboardInterrupt leaves a store to go on from. `draws` stands instead of
    the file's.
    """
    sweep = load_sweep(path)
    source = str(path)
    if draws is not None:
        sweep = msgspec.structs.replace(sweep, draws=draws)
    _check_draws(sweep, source)
    base = Base(path.parent / sweep.base)
    directory = output or path.parent / (sweep.output or f"runs/{path.stem}")
    directory = Path(os.path.normpath(directory))
    fixed = {**flat(sweep.fixed), **(settings or {})}
    _check_figures(sweep, source)
    first = [] if sweep.kind in ("search", "pareto") else fixed_points(sweep, source)
    with point_pool(jobs, ray) as pool:
        keep_in = str(directory.resolve() / "runs") if sweep.keep_runs else ""
        driver = Driver(base, fixed, point_store(directory), pool, keep_in)
        if watch is not None:
            driver.watch = watch
        answer: Answer | None = None
        if sweep.search is not None:
            rows, answer = _search(driver, sweep, sweep.search, source)
            keys = [sweep.search.key]
        elif sweep.pareto is not None:
            rows = search_front(driver, sweep, sweep.pareto, source)
            keys = list(rows[0].point.values)
        else:
            rows = driver.rows(first)
            keys = list(dict.fromkeys(key for point in first for key in point.values))
    if all(row.result.status == "invalid" for row in rows):
        raise InputError(source, None, "", NO_CONFIG + rows[0].result.error)
    if sweep.draws:
        _draw(driver, rows, sweep.draws, source, jobs, ray, directory)
    roles = _roles(base, fixed, rows)
    return SweepResult(source, directory, sweep, keys, rows, answer, driver.from_store, roles)


def _roles(base: Base, fixed: dict[str, Any], rows: Sequence[Row]) -> list[str]:
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


def _draw(
    driver: Driver,
    rows: Sequence[Row],
    count: int,
    source: str,
    jobs: int,
    ray: str | None,
    directory: Path,
) -> None:
    """Draws at each point that was completed; equal points have the same."""
    from emu.sweeps.draws import draw_each  # most sweeps have none

    completed = [row for row in rows if row.result.status == "completed"]
    unlike = {row.result.key: row for row in completed}
    found = draw_each(
        [driver.config_of(row.point) for row in unlike.values()],
        source,
        count,
        jobs=jobs,
        ray=ray,
        directory=directory,
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
    for field in ("x", "y"):
        name = getattr(sweep.plot, field)
        if name and "." not in name:  # with a dot it may be a key of the points
            check_figure(name, source, f"plot.{field}")


def _search(
    driver: Driver, sweep: Sweep, table: SearchTable, source: str
) -> tuple[list[Row], Answer]:
    conditions = parse_conditions(table.meet, source, "search.meet")
    search = Bisection(
        low=table.min,
        high=table.max,
        goal=table.goal,
        integer=table.integer,
        tolerance=table.tolerance,
        points_per_round=table.points_per_round,
    )
    rows: list[Row] = []
    rounds = 0
    while values := search.ask():
        rounds += 1
        driver.line = f"round {rounds}, {_standing(search, table)}"
        asked = [{table.key: int(v) if table.integer else v} for v in values]
        round_rows = driver.rows(with_seeds(asked, sweep.seeds, rounds))
        for row in round_rows:
            if row.result.status == "invalid":
                # Neither end of the range may be nonsense: there would be no answer.
                raise InputError(source, None, "search", row.result.error)
            row.meets = meets(row.result, conditions, table.max_unserved)
        rows += round_rows
        each = len(round_rows) // len(values)
        search.tell(
            {
                value: all(row.meets for row in round_rows[at * each : (at + 1) * each])
                for at, value in enumerate(values)
            }
        )
    bracket = search.bracket
    fails_at = bracket[1] if bracket else None
    if search.answer is None:
        fails_at = table.min if table.goal == "highest" else table.max
    return rows, Answer(
        key=table.key,
        goal=table.goal,
        conditions=[str(condition) for condition in conditions],
        value=search.answer,
        fails_at=fails_at,
        is_monotone=search.is_monotone,
        rounds=rounds,
    )


def _standing(search: Bisection, table: SearchTable) -> str:
    if search.answer is None:
        return f"{table.key} from {table.min:g} to {table.max:g}"
    bracket = search.bracket
    beyond = f", not at {bracket[1]:g}" if bracket else ""
    return f"{table.key} = {search.answer:g} meets{beyond}"


def meets(result: PointResult, conditions: Sequence[Condition], max_unserved: float) -> bool:
    """Whether a run completed, served what it should, and meets all conditions."""
    if result.status != "completed":
        return False
    if unserved_part(result.figures) > max_unserved:
        return False
    return all(condition.holds(result.figures) for condition in conditions)
