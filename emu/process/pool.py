"""Where many tasks run: this process, processes of this machine, or a Ray cluster.

A pool takes tasks and yields results in any order; what asks for them puts them in order, so a
result never depends on the pool. Leaving the pool ends what is still running.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from emu.process.ray_pool import RayPool
from emu.process.workers import Workers

Work = TypeVar("Work")
Found = TypeVar("Found")
Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)


class Pool(Protocol[Given, Made]):
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


def pool_of(
    call: Callable[[Work], Found],
    jobs: int,
    ray_address: str | None,
    told: Callable[[Work], str],
) -> Pool[Work, Found]:
    """A pool that calls a function of a module with each task. Raises InputError.

    `jobs`: processes, 0 = one for each core. `told`: how a task is named when its worker has died.
    """
    jobs = jobs or cores()
    if ray_address is not None:
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
