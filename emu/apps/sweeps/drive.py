"""A sweep from its file to its directory: which points, what runs them, in what order they stand.

    result = run_sweep(Path("sweep.toml"), jobs=2)
    result.rows             # every point with its figures, in the order of the sweep
    result.answer           # of a search: the value, the bracket around the change, the verdict

Rows, files and answer are the same for any number of workers and any pool: rounds are whole, and
results are put in the order of their points. Interrupting a sweep loses only the runs under way.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from emu.api import Rows, override_texts
from emu.apps.sweeps.sweepfile import (
    Condition,
    ParetoTable,
    RangeTable,
    SearchTable,
    Sweep,
    check_figure,
    figures_of,
    flat,
    load_sweep,
    parse_conditions,
    ranges,
    unserved_part,
)
from emu.cluster.plan import make_plan
from emu.config.load import config_from_text
from emu.config.names import toml_text
from emu.config.schema import Config
from emu.config.tables import OutputTable
from emu.errors import InputError, InvariantViolation, RunError, needs_extra
from emu.plugins import is_object, replaced
from emu.process.exits import scratch, strike_if_lost
from emu.process.pool import Pool, pool_of
from emu.report.atomic import write_text
from emu.report.drawn import Draws
from emu.rng import rng_stream
from emu.runs.keys import Keys
from emu.runs.runner import execute
from emu.runs.store import Store

# --- points: which ones a grid, a list or a random sweep has; the order is part of the result -----
POINTS_MAX = 100_000


class Point(msgspec.Struct, frozen=True):
    """One run to be: the values of the swept keys, and the seed if the sweep has seeds."""

    values: dict[str, Any]
    seed: int | None = None
    round: int = 0
    """Which round of a search asked for it."""


def fixed_points(sweep: Sweep, source: str) -> list[Point]:
    """All points of a grid, a list or a random sweep. Raises InputError."""
    if sweep.grid is not None:
        values = _grid(flat(sweep.grid), source)
    elif sweep.listed is not None:
        values = [flat(entry) for entry in sweep.listed]
    else:
        assert sweep.random is not None
        space = ranges(sweep.random.keys, source, "random.keys")
        values = _random(space, sweep.random.points, sweep.random.seed)
    if not values:
        raise InputError(source, None, "", "the sweep has no point")
    return with_seeds(values, sweep.seeds)


def with_seeds(
    values: Sequence[Mapping[str, Any]], seeds: Sequence[int], round_: int = 0
) -> list[Point]:
    """Each point once, or once with each seed. `round_` is the number of the round of a search."""
    chosen: Sequence[int | None] = seeds or [None]
    return [Point(dict(point), seed, round_) for point in values for seed in chosen]


def _grid(keys: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    for key, values in keys.items():
        if not isinstance(values, list) or not values:
            raise InputError(source, None, f"grid.{key}", "expected an array of values")
    count = math.prod(len(values) for values in keys.values())
    if count > POINTS_MAX:
        raise InputError(source, None, "grid", f"{count:,} points; at most {POINTS_MAX:,}")
    if not keys:
        return []
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*keys.values())]


def _random(space: Mapping[str, RangeTable], count: int, seed: int) -> list[dict[str, Any]]:
    # A stream for each key: adding a key leaves the draws of the others as they are.
    streams = {key: rng_stream(seed, f"sweep.{key}") for key in space}
    return [{key: draw(space[key], rng) for key, rng in streams.items()} for _ in range(count)]


def draw(one: RangeTable, rng: np.random.Generator) -> Any:
    """One value of a range."""
    if one.values:
        return one.values[int(rng.integers(len(one.values)))]
    assert one.min is not None
    assert one.max is not None
    part = float(rng.random())
    if one.integer:
        low, high = math.ceil(one.min), math.floor(one.max)
        value = low * ((high + 1) / low) ** part if one.log else low + part * (high + 1 - low)
        return min(math.floor(value), high)
    if one.log:
        return rounded(one.min * (one.max / one.min) ** part)
    return rounded(one.min + part * (one.max - one.min))


def rounded(value: float) -> float:
    """Six significant digits: a value that can be read, typed and found again."""
    return float(f"{value:.6g}")


# --------------------------------------------------------------------------------------------------
# Bisection in rounds: the end of the values that meet a condition. Pure.
#
#     search = Bisection(low=1, high=100, goal="highest", ...)
#     while values := search.ask():
#         search.tell({value: meets(value) for value in values})
#     search.answer, search.bracket, search.is_monotone
#
# Every round tries a fixed set of values, so the answer does not depend on how many of them are
# tried at the same time. The condition is taken to change once over the range; a value that meets
# it beyond one that does not is noted (`is_monotone`), and the first change counts.

GEOMETRIC_FROM = 4.0
"""Brackets whose ends differ by more than this factor are divided in the logarithm."""


class Bisection:
    """State of one search.

    It ends at a bracket of `tolerance` of its upper end, and tries `points_per_round` values at
    once.
    """

    def __init__(
        self,
        *,
        low: float,
        high: float,
        goal: str,
        integer: bool,
        tolerance: float,
        points_per_round: int,
    ) -> None:
        if integer:
            low, high = math.ceil(low), math.floor(high)
        self._good, self._bad = (low, high) if goal == "highest" else (high, low)
        self._integer = integer
        self._tolerance = tolerance
        self._points = points_per_round
        self._met: dict[float, bool] = {}
        self._is_done = False
        self.answer: float | None = None
        """The value searched for; None if not even the easy end of the range meets."""
        self.is_end_of_range = False
        """True if the whole range meets: the true answer may lie beyond."""

    @property
    def bracket(self) -> tuple[float, float] | None:
        """(meets, does not meet), neighbors as far as tried; None without a change."""
        if self.answer is None or self.is_end_of_range:
            return None
        return self._good, self._bad

    @property
    def is_monotone(self) -> bool:
        """Whether the condition changed once over all values tried."""
        ordered = sorted(self._met, reverse=self._good > self._bad)
        flags = [self._met[value] for value in ordered]
        return flags == sorted(flags, reverse=True)

    def ask(self) -> list[float]:
        """The values of the next round, ascending; empty when the search is over."""
        if self._is_done:
            return []
        inner = self._between(*sorted((self._good, self._bad)))
        if not self._met:
            return sorted({self._good, self._bad, *inner})
        return [] if self._is_narrow() else inner

    def tell(self, met: Mapping[float, bool]) -> None:
        """What came out of a round."""
        is_first = not self._met
        self._met.update(met)
        low, high = sorted((self._good, self._bad))
        inside = sorted(v for v in self._met if low <= v <= high)
        if self._good > self._bad:
            inside.reverse()
        if is_first and not self._met[inside[0]]:
            self._is_done = True
            return
        self._good = self.answer = inside[0]
        for value in inside[1:]:
            if not self._met[value]:
                self._bad = value
                return
            self._good = self.answer = value
        self._is_done = self.is_end_of_range = True

    def _is_narrow(self) -> bool:
        gap = abs(self._good - self._bad)
        if self._integer:
            return gap <= 1
        return gap <= self._tolerance * max(abs(self._good), abs(self._bad))

    def _between(self, low: float, high: float) -> list[float]:
        count = self._points
        if self._integer:
            count = min(count, int(high - low) - 1)
        parts = [(index + 1) / (count + 1) for index in range(count)]
        if low > 0 and high / low > GEOMETRIC_FROM:
            values = [low * (high / low) ** part for part in parts]
        else:
            values = [low + (high - low) * part for part in parts]
        chosen = {float(round(v)) if self._integer else rounded(v) for v in values}
        return sorted(v for v in chosen if low < v < high and v not in self._met)


# --- runs, through the store, so that no point is run twice ---------------------------------------
# Results come back in the order of the points, whatever the pool.

# --------------------------------------------------------------------------------------------------
# One point of a sweep: its config, the key that its result is stored under, and its run.
#
# `run_point` is what a worker does, in whatever process it lives; everything it needs is in the
# `Task`, and its result is plain data. It never raises for a run that went wrong: the result says
# so.


class Task(msgspec.Struct, frozen=True):
    """One run to be done."""

    key: str
    config: Config
    source: str
    keep_in: str
    """Where the run's directory is kept; empty = nowhere."""


class PointResult(msgspec.Struct):
    """What is stored of a run."""

    key: str
    status: str
    """completed; failed (the run could not go on); invalid (the config or workload is wrong);
    violated (an invariant of emu)."""
    error: str
    figures: dict[str, Any]
    """Figures of summary.json by dotted name; empty unless completed."""
    gpus: int = 0
    """Of all replicas, also those that scaling may add."""

    @property
    def is_kept(self) -> bool:
        """A failed run is a result, a mistake in the configuration is not."""
        return self.status in ("completed", "failed")


PointPool = Pool[Task, PointResult]
PointStore = Store[PointResult]


class Base:
    """The config that all points start from. Digests of files are taken once."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        try:
            self._text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise InputError(self.source, None, "", problem.lower()) from None
        self._directory = path.resolve().parent
        self._keys = Keys()

    def config(self, fixed: dict[str, Any], point: Point) -> Config:
        """The config of a point. Raises InputError."""
        texts = override_texts({**fixed, **point.values})
        config = config_from_text(self._text, self.source, texts, self._directory)
        return config if point.seed is None else msgspec.structs.replace(config, seed=point.seed)

    def key(self, config: Config) -> str:
        """What the result depends on, and nothing else, as a hash."""
        return self._keys.key(config)


def run_point(task: Task) -> PointResult:
    """Run one point. KeyboardInterrupt passes through."""
    if task.keep_in:
        return _run(task, msgspec.structs.replace(task.config.output, dir=task.keep_in))
    with scratch("emu-sweep-") as directory:  # no user will see these files
        output = msgspec.structs.replace(
            task.config.output,
            dir=str(directory / "run"),
            trace=False,
            events=False,
            timeseries_interval_ms=0,
        )
        return _run(task, output)


def _run(task: Task, output: OutputTable) -> PointResult:
    config = msgspec.structs.replace(task.config, output=output)
    try:
        done = execute(config, task.source, report=False if not task.keep_in else None)
    except InputError as error:
        return PointResult(task.key, "invalid", str(error), {})
    except RunError as error:
        return PointResult(task.key, "failed", f"{type(error).__name__}: {error}", {})
    except InvariantViolation as error:
        return PointResult(task.key, "violated", f"{type(error).__name__}: {error}", {})
    assert done.summary is not None
    gpus = {gpu for replica in make_plan(config, task.source).replicas for gpu in replica.gpus}
    return PointResult(task.key, "completed", "", figures_of(done.summary), len(gpus))


def point_pool(jobs: int, ray_address: str | None) -> PointPool:
    """The pool of points that the command line asks for. Raises InputError."""
    return pool_of(run_point, jobs, ray_address, lambda task: f"its point was {task.key}")


def point_store(directory: Path) -> PointStore:
    """The store of points in a directory."""
    return Store(directory, PointResult)


# --- What runs the points of a sweep --------------------------------------------------------------

Watch = Callable[[int, int, str], None]
"""Told (points done, points known, a line) whenever something changes."""


class Row(msgspec.Struct):
    """One point and what came of it."""

    point: Point
    result: PointResult
    meets: bool | None = None
    """Search: whether it meets the conditions; Pareto: whether it is on the front."""
    draws: Draws | None = None
    """Intervals of its figures, where the sweep draws."""


class Driver:
    """Runs batches of points, through the store."""

    def __init__(
        self,
        base: Base,
        fixed: dict[str, Any],
        store: PointStore,
        pool: PointPool,
        keep_in: str,
    ) -> None:
        self._base = base
        self._fixed = fixed
        self._store = store
        self._pool = pool
        self._keep_in = keep_in
        self.done = self.known = self.from_store = 0
        self.watch: Watch = lambda done, known, line: None
        self.line = ""

    def rows(self, points: Sequence[Point]) -> list[Row]:
        """A row for each point, in their order. Equal points are run once."""
        results: dict[str, PointResult] = {}
        keys: list[str] = []
        tasks: dict[str, Task] = {}
        for index, point in enumerate(points):
            key = self._prepare(index, point, results, tasks)
            keys.append(key)
        self.known += len(results) + len(tasks)
        self.done += len(results)
        self._tell()
        if tasks:
            for result in self._pool.results(list(tasks.values())):
                if result.status == "violated":
                    raise InvariantViolation(f"a point of the sweep: {result.error}")
                if result.is_kept:
                    self._store.put(result.key, result)
                results[result.key] = result
                self.done += 1
                self._tell()
                strike_if_lost()
        return [Row(point, results[key]) for point, key in zip(points, keys, strict=True)]

    def config_of(self, point: Point) -> Config:
        """The configuration of a point. Raises InputError."""
        return self._base.config(self._fixed, point)

    def _prepare(
        self, index: int, point: Point, results: dict[str, PointResult], tasks: dict[str, Task]
    ) -> str:
        """Find a point's result in the store, or make a task of it; its key."""
        try:
            config: Config = self._base.config(self._fixed, point)
        except InputError as error:
            key = f"invalid {index}"
            results[key] = PointResult(key, "invalid", str(error), {})
            return key
        key = self._base.key(config)
        if key in results or key in tasks:
            return key
        stored = self._store.get(key)
        if stored is not None and (not self._keep_in or (Path(self._keep_in) / key).exists()):
            results[key] = stored
            self.from_store += 1
        else:
            keep = str(Path(self._keep_in) / key) if self._keep_in else ""
            tasks[key] = Task(key, config, self._base.source, keep)
        return key

    def _tell(self) -> None:
        self.watch(self.done, self.known, self.line)


# --- the sweep ------------------------------------------------------------------------------------
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
    from emu.apps.sweeps.repeats import draw_each  # most sweeps have none

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


# --- `emu.sweep`: many runs from Python, their figures as one table in memory ---------------------
# A class may be a value of a key, as `{"router.policy": ["load", Mine]}`.


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
        tasks: dict[str, Task] = {}
        order = []
        is_local = False
        for point in with_seeds(values, list(seeds)):
            its = base.config({}, point)
            key = base.key(its)
            tasks[key] = Task(key, its, str(path), "")
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
                raise InputError(str(path), None, "", result.error)
            if result.status == "violated":
                raise RunError(result.error)
    rows = [(point, results[key]) for point, key in order]
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
