"""Where the points run: this process, processes of this machine, or a Ray cluster.

A pool takes tasks and yields results in any order; the sweep puts them in order, so a result
never depends on the pool. Leaving the pool ends what is still running.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from emu.errors import InputError, RunError, install_hint
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


class RayPool:
    """Points on a Ray cluster (extra `ray`): results in the order in which Ray has them.

    `address` is that of a running cluster ("auto", "10.0.0.1:6379", "ray://..."), or "local" for a
    cluster of this machine alone with as many workers as jobs. emu travels to the workers with the
    job; the packages it needs and the files that a config names must be there already.
    """

    def __init__(self, address: str, jobs: int, call: Callable[[Any], Any]) -> None:
        """`call`: what is done with each task, a function of a module."""
        try:
            import ray
        except ModuleNotFoundError:
            raise missing("ray", "ray", "--ray") from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = ray
        options: dict[str, Any] = {"num_cpus": jobs} if address == "local" else {}
        package = str(Path(__file__).resolve().parents[1])
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
                runtime_env={"py_modules": [package]},
                logging_level="ERROR",
                **options,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            raise InputError("--ray", None, address, problem) from None
        self.workers = int(ray.cluster_resources().get("CPU", 1))

        self._remote = ray.remote(num_cpus=1, max_retries=3)(call)

    def results(self, tasks: Sequence[Any]) -> Iterator[Any]:
        """Run all tasks. A point whose machine is lost is tried again by Ray."""
        waiting = [self._remote.remote(task) for task in tasks]
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=1)
            try:
                yield self._ray.get(ready[0])
            except self._ray.exceptions.RayError as error:
                raise RunError(f"Ray: {str(error).splitlines()[0]}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ray.shutdown()


def missing(package: str, extra: str, what: str) -> InputError:
    """The error for an extra that is not installed."""
    problem = f"needs the package {package}: {install_hint(extra)}"
    return InputError(what, None, "", problem)
