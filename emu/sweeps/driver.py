"""What runs the points of a sweep: through the store, so that no point is run twice.

Results come back in the order of the points, whatever the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emu.config.schema import Config
from emu.errors import InputError, InvariantViolation
from emu.process.interrupts import strike_if_lost
from emu.report.drawn import Draws
from emu.sweeps.evaluate import Base, PointPool, PointResult, PointStore, Task
from emu.sweeps.points import Point

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
