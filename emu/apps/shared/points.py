"""Points of one configuration: the key that a result is stored under, its run, many of them.

`run_point` is what a worker does, in whatever process it lives; everything it needs is in the
`Task`, and its result is plain data. It never raises for a run that went wrong: the result says
so. A `Driver` runs batches of points through the store, so that no point is run twice; rows come
back in the order of the points, whatever the pool.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.api import override_texts
from emu.apps.shared.blocks import Percentile, intervals_of
from emu.apps.shared.conditions import (
    Condition,
    unserved_part,
)
from emu.apps.shared.give_up import RATIO, Limit, run_or_give_up
from emu.apps.shared.watching import Watch
from emu.cluster.plan import make_plan
from emu.config.input_files import reason
from emu.config.load import config_from_text
from emu.config.schema import Config, OutputTable
from emu.documents import Document, DocumentView
from emu.errors import InputError, InvariantViolation, RunError
from emu.process.interrupts import scratch, strike_if_lost
from emu.process.pool import Pool, pool_of
from emu.report.drawn import Draws
from emu.report.summary import figures_of
from emu.runs.keys import Keys
from emu.runs.runner import execute
from emu.runs.store import Store
from emu.units import NS_PER_MS, NS_PER_S
from emu.world import asks_outside


class Point(msgspec.Struct, frozen=True):
    """One run to be: the values of the swept keys, and the seed if the sweep has seeds."""

    values: Document
    seed: int | None = None
    round: int = 0
    """Which round of a search asked for it."""
    since_s: float = 0.0
    """Latencies of the requests that arrive from then on are figures, too (`since.p95_ttft_ms`);
    0 = not wanted."""
    limits: tuple[Limit, ...] = ()
    """The run may end as soon as one of them is missed for certain."""
    intervals: tuple[Percentile, ...] = ()
    """95 % intervals of them over blocks of its requests are figures, too (`blocks.py`)."""


def with_seeds(
    values: Sequence[DocumentView], seeds: Sequence[int], round_: int = 0
) -> list[Point]:
    """Each point once, or once with each seed. `round_` is the number of the round of a search."""
    chosen: Sequence[int | None] = seeds or [None]
    return [Point(dict(point), seed, round_) for point in values for seed in chosen]


class Task(msgspec.Struct, frozen=True):
    """One run to be done."""

    key: str
    config: Config
    source: str
    keep_in: str
    """Where the run's directory is kept; empty = nowhere."""
    since_s: float = 0.0
    """As in `Point`."""
    limits: tuple[Limit, ...] = ()
    """As in `Point`."""
    intervals: tuple[Percentile, ...] = ()
    """As in `Point`."""
    given_up_key: str = ""
    """Key of the result if the run is given up."""


class PointResult(msgspec.Struct):
    """What is stored of a run."""

    key: str
    status: str
    """completed; given up (a limit of its point is missed for certain); failed (the run could not
    go on); invalid (the config or workload is wrong); violated (an invariant of emu)."""
    error: str
    figures: Document
    """Figures of summary.json by dotted name; of a run that was given up, RATIO of give_up.py;
    else empty."""
    gpus: int = 0
    """Of all replicas, also those that scaling may add."""

    @property
    def is_kept(self) -> bool:
        """A failed run is a result, a mistake in the configuration is not."""
        return self.status in ("completed", "given up", "failed")


PointPool = Pool[Task, PointResult]
PointStore = Store[PointResult]


class Base:
    """The config that all points start from. Digests of files are taken once."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        try:
            self._text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise InputError(self.source, None, "", reason(error).lower()) from None
        self._directory = path.resolve().parent
        self._keys = Keys()

    def config(self, fixed: Document, point: Point) -> Config:
        """The config of a point. Raises InputError."""
        texts = override_texts({**fixed, **point.values})
        config = config_from_text(self._text, self.source, texts, self._directory)
        return config if point.seed is None else msgspec.structs.replace(config, seed=point.seed)

    def key(self, config: Config, point: Point | None = None, *, is_given_up: bool = False) -> str:
        """What the result of a point depends on, and nothing else, as a hash."""
        given: list[object] = []
        if point is not None:
            limits = repr(point.limits) if is_given_up else ""
            given = [one for one in (point.since_s, limits, point.intervals) if one]
        return self._keys.key(config, *given)


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
            heartbeat_s=0.0,
            timeseries_interval_ms=0,
        )
        return _run(task, output)


def _run(task: Task, output: OutputTable) -> PointResult:
    config = msgspec.structs.replace(task.config, output=output)
    place = Path(output.dir)
    try:
        plan = make_plan(config, task.source)
        if task.limits and not task.keep_in and not asks_outside(plan):
            place.mkdir(parents=True, exist_ok=True)
            figures = run_or_give_up(config, task.source, place, task.limits)
            if RATIO in figures:
                return PointResult(task.given_up_key, "given up", "", figures)
        else:
            done = execute(config, task.source, report=False if not task.keep_in else None)
            assert done.summary is not None
            figures = figures_of(done.summary)
    except InputError as error:
        return PointResult(task.key, "invalid", str(error), {})
    except RunError as error:
        return PointResult(task.key, "failed", f"{type(error).__name__}: {error}", {})
    except InvariantViolation as error:
        return PointResult(task.key, "violated", f"{type(error).__name__}: {error}", {})
    rows = place / "requests.csv"
    if task.since_s:
        figures |= _figures_since(rows, task.since_s)
    if task.intervals:
        figures |= intervals_of(rows, task.intervals, config.seed)
    gpus = {gpu for replica in plan.replicas for gpu in replica.gpus}
    return PointResult(task.key, "completed", "", figures, len(gpus))


_SINCE: Final = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2el": "latency_ns"}
_PERCENTILES: Final = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


def _figures_since(path: Path, since_s: float) -> dict[str, float]:
    """Latencies of completed requests that arrived from a time on, ms."""
    columns: dict[str, list[float]] = {metric: [] for metric in _SINCE}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] == "completed" and int(row["arrival_ns"]) >= since_s * NS_PER_S:
                for metric, name in _SINCE.items():
                    columns[metric].append(int(row[name]) / NS_PER_MS)
    return {
        f"since.{statistic}_{metric}_ms": float(np.percentile(values, at))
        for metric, values in columns.items()
        for statistic, at in _PERCENTILES.items()
        if values
    }


def point_pool(jobs: int, ray_address: str | None) -> PointPool:
    """The pool of points that the command line asks for. Raises InputError."""
    return pool_of(run_point, jobs, ray_address, lambda task: f"its point was {task.key}")


def point_store(directory: Path) -> PointStore:
    """The store of points in a directory."""
    return Store(directory, PointResult)


def point_results(
    tasks: Mapping[str, Task], store: PointStore, pool: PointPool
) -> Iterator[PointResult]:
    """Results of all tasks (by key), in any order: those of the store, then the others as they are
    run. Only what is no mistake of a configuration is kept."""
    left = []
    for key, task in tasks.items():
        found = store.get(key)
        if found is None:
            left.append(task)
        else:
            yield found
    for result in pool.results(left) if left else ():
        if result.is_kept:
            store.put(result.key, result)
        yield result
        strike_if_lost()


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
        fixed: Document,
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
            wanted = {task.given_up_key: key for key, task in tasks.items() if task.limits}
            for result in self._pool.results(list(tasks.values())):
                if result.status == "violated":
                    raise InvariantViolation(f"a point of the sweep: {result.error}")
                if result.is_kept:
                    self._store.put(result.key, result)
                results[wanted.get(result.key, result.key)] = result
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
        key = self._base.key(config, point)
        if key in results or key in tasks:
            return key
        stored = self._store.get(key)
        given_up = self._base.key(config, point, is_given_up=True) if point.limits else ""
        if stored is None and given_up:
            stored = self._store.get(given_up)
        if stored is not None and (not self._keep_in or (Path(self._keep_in) / key).exists()):
            results[key] = stored
            self.from_store += 1
        else:
            keep = str(Path(self._keep_in) / key) if self._keep_in else ""
            more = (point.since_s, point.limits, point.intervals, given_up)
            tasks[key] = Task(key, config, self._base.source, keep, *more)
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
