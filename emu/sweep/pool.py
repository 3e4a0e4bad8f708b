"""Who runs the points: this process, processes of this machine, or a Ray cluster.

A pool takes tasks and yields results in any order; the sweep puts them in order, so a result
never depends on the pool. Processes are spawned, not forked: nothing of the parent leaks into a
run. Leaving the pool ends what is still running.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from emu.errors import EmuError, InputError, RunError
from emu.sweep.evaluate import PointResult, Task, run_point


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
        from emu.sweep.raypool import RayPool

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


class LocalPool:
    """Processes of this machine, each fed one task at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def results(self, tasks: Sequence[Task]) -> Iterator[PointResult]:
        """Run all tasks; workers are started when there is work for them."""
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
                    index = self._ends.index(ready)
                    self._processes[index].join(1)
                    status = self._processes[index].exitcode
                    problem = f"a worker ended with status {status} (out of memory?)"
                    raise RunError(f"{problem}; its point was {task.key}") from None
                if isinstance(answer, BaseException):
                    raise answer
                if waiting:
                    self._feed(ready, waiting.pop(), busy)
                yield answer

    def _feed(self, end: Connection, task: Task, busy: dict[Connection, Task]) -> None:
        end.send(task)
        busy[end] = task

    def _start(self) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs,), daemon=True)
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
            if kind is not None:  # what is under way is of no use to anybody
                process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def work(end: Connection) -> None:
    """What a worker does: a task comes, a result goes, until the parent hangs up."""
    try:
        while True:
            task = end.recv()
            # An exit, not a death: what the run has in temporary files is removed. (A run takes
            # the signal over, and gives it back as the system's default.)
            signal.signal(signal.SIGTERM, _exit)
            try:
                answer: PointResult | EmuError = run_point(task)
            except EmuError as error:
                answer = error
            end.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except KeyboardInterrupt:  # the parent was interrupted too, and tells the user
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit(number: int, frame: object) -> None:
    # The parent says why. What is torn in the middle (a coroutine that was never awaited) would
    # complain on the user's terminal.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    raise SystemExit(128 + number)


def missing(package: str, extra: str, what: str) -> InputError:
    """The error for an extra that is not installed."""
    problem = f"needs the package {package}: pip install 'emu[{extra}]'"
    return InputError(what, None, "", problem)
