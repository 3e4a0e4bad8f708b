"""Who runs the points: this process, processes of this machine, or a Ray cluster.

A pool takes tasks and yields results in any order; the sweep puts them in order, so a result
never depends on the pool. Leaving the pool ends what is still running.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from emu.errors import InputError, install_hint
from emu.process.workers import Workers
from emu.sweeps.evaluate import PointResult, Task, run_point

Work = TypeVar("Work")
Found = TypeVar("Found")
Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)


class AnyPool(Protocol[Given, Made]):
    """What does one thing with each of many tasks."""

    workers: int

    def results(self, tasks: Sequence[Given]) -> Iterator[Made]:
        """Run all tasks; results as they come."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


Pool = AnyPool[Task, PointResult]
"""What a sweep needs."""


def make_pool(jobs: int, ray_address: str | None) -> Pool:
    """The pool of points that the command line asks for. Raises InputError."""
    return pool_of(run_point, jobs, ray_address, lambda task: f"its point was {task.key}")


def pool_of(
    call: Callable[[Work], Found],
    jobs: int,
    ray_address: str | None,
    told: Callable[[Work], str],
) -> AnyPool[Work, Found]:
    """A pool that calls a function of a module with each task. Raises InputError.

    `told`: how a task is named when its worker has died.
    """
    if ray_address is not None:
        from emu.sweeps.raypool import RayPool

        return RayPool(ray_address, jobs, call)
    return Workers(jobs, call, told) if jobs > 1 else HerePool(call)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HerePool(Generic[Work, Found]):
    """One after the other, in this process."""

    workers = 1

    def __init__(self, call: Callable[[Work], Found]) -> None:
        self._call = call

    def results(self, tasks: Sequence[Work]) -> Iterator[Found]:
        """Run all tasks."""
        for task in tasks:
            yield self._call(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


def missing(package: str, extra: str, what: str) -> InputError:
    """The error for an extra that is not installed."""
    problem = f"needs the package {package}: {install_hint(extra)}"
    return InputError(what, None, "", problem)
