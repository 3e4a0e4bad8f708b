"""One point of a sweep: its config, the key that its result is stored under, and its run.

`run_point` is what a worker does, in whatever process it lives; everything it needs is in the
`Task`, and its result is plain data. It never raises for a run that went wrong: the result says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from emu.api import override_texts
from emu.cluster.plan import make_plan
from emu.config.load import config_from_text
from emu.config.schema import Config
from emu.config.tables.output import OutputTable
from emu.errors import InputError, InvariantViolation, RunError
from emu.process.interrupts import scratch
from emu.process.pool import Pool, pool_of
from emu.runs.runner import execute
from emu.runs.store import Keys, Store
from emu.sweeps.conditions import figures_of
from emu.sweeps.points import Point


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
