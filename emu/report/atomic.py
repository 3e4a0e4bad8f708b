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
import re
import sys
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
    "flows.csv",
    "transitions.csv",
    "marks.csv",
    "trace.json.gz",
    "itl.json",
    "experts.csv",
    "events.jsonl",
    "report.html",
    "run.json",
    TRAILER,
)
"""What a run may write. Only these are replaced or removed in an existing directory."""
_TRIES_MAX: Final = 100
"""How often a staging directory is made again that another run has removed."""
_LEFT_BEHIND: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(tmp|old)")


def partial_name(name: str) -> str:
    """`requests.csv` -> `requests.partial.csv`."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}.partial{dot}{suffix}"


def find(directory: Path, name: str) -> Path | None:
    """A file of the run under its final or its partial name."""
    for candidate in (directory / name, directory / partial_name(name)):
        if candidate.is_file():
            return candidate
    return None


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
        self._lock = -1
        self._made: list[Path] = []
        """Directories above it that were not there before, the innermost first."""
        try:
            target = Path(os.path.realpath(final))
            if os.path.lexists(target) and not target.is_dir():
                raise InputError(str(final), None, "output.dir", "is a file, expected a directory")
            self._target = target
            self._made = [parent for parent in target.parents if not parent.exists()]
            with held():
                self.staging, self._lock = _staging(target)
        except OSError as error:
            self._unmake()
            problem = f"cannot be written: {error.strerror or error}"
            raise InputError(str(final), None, "output.dir", problem) from error
        except BaseException:
            if self._lock >= 0:
                self.discard()
            raise

    def publish(self) -> None:
        """Everything in the staging directory becomes the result."""
        with writing(self._target), held():
            self._appear()

    def publish_partial(self) -> None:
        """Keep what there is of an interrupted run, under names that results never have."""
        with writing(self._target), held():
            for path in sorted(self.staging.iterdir()):
                if ".partial" not in path.name:
                    path.rename(path.with_name(partial_name(path.name)))
            self._appear()

    def discard(self) -> None:
        """Leave no trace of the run."""
        _remove(self.staging)
        self._unlock()
        self._unmake()

    def _unmake(self) -> None:
        """Remove the directories above that were made for this run, unless others use them."""
        with contextlib.suppress(OSError):
            for parent in self._made:
                parent.rmdir()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _appear(self) -> None:
        if self._is_ours():
            self._swap()
        else:
            self._merge(_by_trailer(self.staging))
        self._unlock()

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


def sweep(directory: Path) -> None:
    """Remove what runs left here that were killed (SIGKILL, a machine that went down).

    A staging directory is locked as long as its process lives, so that one without a lock is
    owned by none. Results that such a run had moved aside to replace them come back.
    """
    with contextlib.suppress(OSError):
        for path in sorted(directory.iterdir()):
            match = _LEFT_BEHIND.fullmatch(path.name)
            if match is not None and path.is_dir() and not path.is_symlink():
                _sweep_one(path, directory / match.group(1), is_old=match.group(2) == "old")


def _sweep_one(path: Path, final: Path, *, is_old: bool) -> None:
    known = {*RUN_FILES, *map(partial_name, RUN_FILES)}
    with contextlib.suppress(OSError):
        if any(p.is_dir() or not _is_part(p.name, known) for p in path.iterdir()):
            return  # not a run's
        lock = _locked(path)
        if lock < 0:
            return
        try:
            if is_old and not final.exists():
                os.rename(path, final)
            else:
                _remove(path)
        finally:
            os.close(lock)


def _is_part(name: str, known: set[str]) -> bool:
    """A file of a run, or one that it writes on the way (`requests.csv.latencies`)."""
    return name in known or any(name.startswith((f"{whole}.", f".{whole}.")) for whole in known)


def _staging(target: Path) -> tuple[Path, int]:
    """A new hidden directory beside the target, and the descriptor that locks it.

    Between its creation and its lock another run may sweep it away, or remove the directory above
    that it had made itself: then it is made again.
    """
    for tries_left in reversed(range(_TRIES_MAX)):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            sweep(target.parent)
            path = _beside(target)
            path.mkdir()
            lock = _locked(path)
        except (FileNotFoundError, FileExistsError):
            # The second: the directory above was there, and went before pathlib looked at it.
            if not tries_left:  # no other run: this place takes no directories (/proc)
                raise
            continue
        if lock >= 0 and path.is_dir():
            return path, lock
        if lock >= 0:
            os.close(lock)
    raise OSError(f"other runs removed {_TRIES_MAX} new directories")


def _locked(directory: Path) -> int:
    """A descriptor that holds the only lock of a directory; -1 if a live process has it."""
    if sys.platform == "win32":
        return 0
    import fcntl

    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return -1
    return lock


def _beside(path: Path) -> Path:
    """A hidden name in the same directory that no other process uses."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")


def _remove(directory: Path) -> None:
    """A directory of a run, with the files in it, as far as that can be had."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()
        directory.rmdir()
