"""Who runs the points: this process, processes of this machine, or a Ray cluster.

A pool takes tasks and yields results in any order; the sweep puts them in order, so a result
never depends on the pool. Leaving the pool ends what is still running.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from emu.errors import InputError, install_hint
from emu.process.workers import Workers
from emu.sweeps.evaluate import PointResult, Task, run_point


class Pool(Protocol):
    """What a sweep needs."""

    workers: int

    def results(self, tasks: Sequence[Task]) -> Iterator[PointResult]:
        """Run all tasks; results as they come."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_pool(jobs: int, ray_address: str | None) -> Pool:
    """The pool that the command line asks for. Raises InputError."""
    if ray_address is not None:
        from emu.sweeps.raypool import RayPool

        return RayPool(ray_address, jobs)
    return LocalPool(jobs) if jobs > 1 else HerePool()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HerePool:
    """One after the other, in this process."""

    workers = 1

    def results(self, tasks: Sequence[Task]) -> Iterator[PointResult]:
        """Run all tasks."""
        for task in tasks:
            yield run_point(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LocalPool(Workers[Task, PointResult]):
    """Processes of this machine, each fed one task at a time."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, run_point, lambda task: f"its point was {task.key}")


def missing(package: str, extra: str, what: str) -> InputError:
    """The error for an extra that is not installed."""
    problem = f"needs the package {package}: {install_hint(extra)}"
    return InputError(what, None, "", problem)
