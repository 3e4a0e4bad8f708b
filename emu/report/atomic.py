"""Files that appear whole or not at all, and the directory of a run. Owns no content.

    run = RunDirectory(Path("runs/latest"))     # a hidden staging directory beside it
    run.staging / "requests.csv"                # writers write here
    run.publish()                               # everything appears under the final name
    run.publish_partial()                       # interrupted: kept as requests.partial.csv ...
    run.discard()                               # nothing appears

A reader that finds `summary.json` under the final name finds all of a complete run: the directory
is renamed as a whole, or, where it holds files that are not ours, `summary.json` leaves first and
comes back last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from emu.errors import InputError, RunError
from emu.process.interrupts import held

TRAILER: Final = "summary.json"
"""Present under its final name only if the run is complete."""

RUN_FILES: Final = (
    "requests.csv",
    "timeseries.csv",
    "replicas.csv",
    "transitions.csv",
    "marks.csv",
    "trace.json.gz",
    "itl.json",
    "events.jsonl",
    "report.html",
    "run.json",
    TRAILER,
)
"""What a run may write. Only these are replaced or removed in an existing directory."""


def partial_name(name: str) -> str:
    """`requests.csv` -> `requests.partial.csv`."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}.partial{dot}{suffix}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"cannot write {error.filename or path}: {reason}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that it is never seen half: a temporary one beside it, then a rename."""
    with writing(path), held():
        name = _beside(path)
        try:
            with open(name, "xb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8, newlines as they are."""
    write_bytes(path, text.encode())


class RunDirectory:
    """Where a run's files are written, and how they become its results."""

    def __init__(self, final: Path) -> None:
        self.final = final
        target = Path(os.path.realpath(final))
        if target.exists() and not target.is_dir():
            raise InputError(str(final), None, "output.dir", "is a file, expected a directory")
        self._target = target
        self.staging = _beside(target)
        try:
            with held():
                target.parent.mkdir(parents=True, exist_ok=True)
                self.staging.mkdir()
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            raise InputError(str(final), None, "output.dir", problem) from error
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Everything in the staging directory becomes the result."""
        with writing(self._target), held():
            self._appear()

    def publish_partial(self) -> None:
        """Keep what there is of an interrupted run, under names that nobody takes for results."""
        with writing(self._target), held():
            for path in sorted(self.staging.iterdir()):
                if ".partial" not in path.name:
                    path.rename(path.with_name(partial_name(path.name)))
            self._appear()

    def discard(self) -> None:
        """Leave no trace of the run."""
        _remove(self.staging)

    def _appear(self) -> None:
        if self._is_ours():
            self._swap()
        else:
            self._merge(_by_trailer(self.staging))

    def _is_ours(self) -> bool:
        """True if the directory is new, empty, or holds nothing but an earlier run's files."""
        known = {*RUN_FILES, *map(partial_name, RUN_FILES)}
        return not self._target.exists() or all(
            path.name in known and not path.is_dir() for path in self._target.iterdir()
        )

    def _swap(self) -> None:
        if self._target.exists():
            old = self.staging.with_suffix(".old")
            os.rename(self._target, old)
            os.rename(self.staging, self._target)
            _remove(old)
        else:
            os.rename(self.staging, self._target)

    def _merge(self, fresh: list[Path]) -> None:
        for name in (TRAILER, *RUN_FILES, *map(partial_name, RUN_FILES)):
            with contextlib.suppress(FileNotFoundError):
                (self._target / name).unlink()
        for path in fresh:
            os.replace(path, self._target / path.name)
        self.staging.rmdir()


def _by_trailer(directory: Path) -> list[Path]:
    """Files of a directory, the trailer last."""
    return sorted(directory.iterdir(), key=lambda path: (path.name == TRAILER, path.name))


def _beside(path: Path) -> Path:
    """A hidden name in the same directory that nobody else uses."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")


def _remove(directory: Path) -> None:
    """A directory of a run, with the files in it, as far as that can be had."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()
        directory.rmdir()
