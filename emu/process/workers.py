"""Processes of this machine that do one thing with each of many tasks.

Results come in any order; a caller that needs an order sorts them. Processes are spawned, not
forked: nothing of the parent leaks into them. Each has a pipe of its own and one task at a time,
so that one that dies takes nothing with it that others wait for. Leaving ends what is still
running.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from emu.errors import EmuError, RunError
from emu.process.interrupts import helps, spawning

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
