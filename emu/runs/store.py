"""Results on disk, one file for each task, so that what was interrupted goes on where it was.

    store = Store(directory, PointResult)
    for result in kept_results(tasks, pool, store, lambda result: result.key): ...

A file's name is the hash of everything that its result depends on (`emu/runs/keys.py`); a file that
is there is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from emu.errors import InputError, RunError
from emu.process.interrupts import strike_if_lost
from emu.process.pool import Pool
from emu.process.prepared import prepared
from emu.report.atomic import write_bytes

Work = TypeVar("Work")
Result = TypeVar("Result")


class Store(Generic[Result]):
    """The directory `points/` of a sweep, plan, campaign or set of runs."""

    def __init__(self, directory: Path, kind: type[Result]) -> None:
        self.directory = directory / "points"
        self._kind = kind
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            raise InputError(str(directory), None, "output", problem) from None

    def get(self, key: str) -> Result | None:
        """A stored result. A file that cannot be read counts as absent."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=prepared(self._kind))
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        except OSError as error:
            raise RunError(f"cannot read {self._path(key)}: {error.strerror}") from error

    def put(self, key: str, result: Result) -> None:
        """Keep a result."""
        text = msgspec.json.format(msgspec.json.encode(result), indent=1)
        write_bytes(self._path(key), text + b"\n")

    def drop(self, key: str) -> None:
        """Forget a result."""
        self._path(key).unlink(missing_ok=True)

    def remove(self) -> None:
        """All is done, and its results stand elsewhere."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def kept_results(
    tasks: Mapping[str, Work],
    pool: Pool[Work, Result],
    store: Store[Result] | None,
    key_of: Callable[[Result], str],
) -> Iterator[Result]:
    """Results of all tasks, in any order: those of the store, then the others as they are run.

    Raises KeyboardInterrupt also where a task has swallowed it; what was run is then kept.
    """
    left = []
    for key, task in tasks.items():
        found = None if store is None else store.get(key)
        if found is None:
            left.append(task)
        else:
            yield found
    for result in pool.results(left) if left else ():
        if store is not None:
            store.put(key_of(result), result)
        yield result
        strike_if_lost()
