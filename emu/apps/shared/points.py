"""Points of one configuration: the key that a result is stored under, its run, many of them.

`run_point` is what a worker does, in whatever process it lives; everything it needs is in the
`Task`, and its result is plain data. It never raises for a run that went wrong: the result says
so. A `Driver` runs batches of points through the store, so that no point is run twice; rows come
back in the order of the points, whatever the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emu.api import override_texts
from emu.apps.shared.answer import Watch
from emu.apps.shared.conditions import (
    Condition,
    figures_of,
    unserved_part,
)
from emu.cluster.plan import make_plan
from emu.config.load import config_from_text
from emu.config.schema import Config, OutputTable
from emu.errors import InputError, InvariantViolation, RunError
from emu.process.interrupts import scratch, strike_if_lost
from emu.process.pool import Pool, pool_of
from emu.report.drawn import Draws
from emu.runs.keys import Keys
from emu.runs.runner import execute
from emu.runs.store import Store


class Point(msgspec.Struct, frozen=True):
    """One run to be: the values of the swept keys, and the seed if the sweep has seeds."""

    values: dict[str, Any]
    seed: int | None = None
    round: int = 0
    """Which round of a search asked for it."""


def with_seeds(
    values: Sequence[Mapping[str, Any]], seeds: Sequence[int], round_: int = 0
) -> list[Point]:
    """Each point once, or once with each seed. `round_` is the number of the round of a search."""
    chosen: Sequence[int | None] = seeds or [None]
    return [Point(dict(point), seed, round_) for point in values for seed in chosen]


# Results come back in the order of the points, whatever the pool.

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


def meets(result: PointResult, conditions: Sequence[Condition], max_unserved: float) -> bool:
    """Whether a run completed, served what it should, and meets all conditions."""
    if result.status != "completed":
        return False
    if unserved_part(result.figures) > max_unserved:
        return False
    return all(condition.holds(result.figures) for condition in conditions)
