"""Where many tasks run: this process, processes of this machine, or a Ray cluster.

A pool takes tasks and yields results in any order; what asks for them puts them in order, so a
result never depends on the pool. Leaving the pool ends what is still running.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from emu.errors import EmuError, InputError, RunError, needs_extra
from emu.process.exits import helps, spawning

# --------------------------------------------------------------------------------------------------
# Tasks on a Ray cluster (extra `ray`).
#
# `address` is that of a running cluster ("auto", "10.0.0.1:6379", "ray://..."), or "local" for a
# cluster of this machine alone with as many workers as jobs. emu travels to the workers with the
# job; the packages it needs and the files that a config names must be there already.


class RayPool:
    """Results in the order in which Ray has them."""

    def __init__(self, address: str, jobs: int, call: Callable[[Any], Any]) -> None:
        """`call`: what is done with each task, a function of a module."""
        with needs_extra("ray", "--ray"):
            import ray
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
        except Exception as error:  # a node that does not start is a bare Exception of Ray's
            problem = " ".join(str(error).split()) or type(error).__name__
            raise InputError("--ray", None, address, f"Ray: {problem}") from None
        self.workers = int(ray.cluster_resources().get("CPU", 1))

        self._remote = ray.remote(num_cpus=1, max_retries=3)(call)

    def results(self, tasks: Sequence[Any]) -> Iterator[Any]:
        """Run all tasks. A task whose machine is lost is tried again by Ray."""
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


# --------------------------------------------------------------------------------------------------
# Processes of this machine that do one thing with each of many tasks.
#
# Results come in any order; a caller that needs an order sorts them. Processes are spawned, not
# forked: nothing of the parent leaks into them. Each has a pipe of its own and one task at a time,
# so that one that dies takes nothing with it that others wait for. Leaving ends what is still
# running.

Task = TypeVar("Task")
Result = TypeVar("Result")

_END_S: Final = 30.0
"""Wall time that a worker has to end, on a machine with too much to do."""


class Workers(Generic[Task, Result]):
    """Some processes that call a function of a module."""

    def __init__(
        self, workers: int, call: Callable[[Task], Result], told: Callable[[Task], str]
    ) -> None:
        """`told`: how a task is named when its worker has died."""
        self.workers = workers
        self._call = call
        self._told = told
        self._context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def results(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks; workers are started when there is work for them.

        Raises RunError if a worker dies, and what EmuError a task has raised.
        """
        waiting = list(reversed(tasks))
        while len(self._ends) < min(self.workers, len(tasks)):
            self._start()
        busy: dict[Connection, Task] = {}
        for end in self._ends:
            if waiting:
                self._feed(end, waiting.pop(), busy)
        while busy:
            for ready in multiprocessing.connection.wait(list(busy)):
                assert isinstance(ready, Connection)
                task = busy.pop(ready)
                try:
                    answer = ready.recv()
                except (EOFError, ConnectionResetError):
                    raise self._died(ready, task) from None
                if isinstance(answer, BaseException):
                    raise answer
                if waiting:
                    self._feed(ready, waiting.pop(), busy)
                yield answer

    def _feed(self, end: Connection, task: Task, busy: dict[Connection, Task]) -> None:
        try:
            end.send((self._call, task))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(end, task) from None
        busy[end] = task

    def _died(self, end: Connection, task: Task) -> RunError:
        process = self._processes[self._ends.index(end)]
        process.join(_END_S)
        problem = f"a worker ended with status {process.exitcode} (out of memory?)"
        return RunError(f"{problem}; {self._told(task)}")

    def _start(self) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs,), daemon=True)
        with spawning():
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            if kind is not None:  # what is under way is of no use
                process.terminate()
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()


def work(end: Connection) -> None:
    """What a worker does: a task comes, a result goes, until the parent hangs up."""
    try:
        helps()
        while True:
            call, task = end.recv()
            try:
                answer = call(task)
            except EmuError as error:
                answer = error
            end.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except KeyboardInterrupt:  # the parent has ended the run
        return


# --- Where many tasks run -------------------------------------------------------------------------

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
