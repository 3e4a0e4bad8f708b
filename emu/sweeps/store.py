"""Results on disk, one file for each point, so that an interrupted sweep goes on where it was.

A file's name is the hash of everything that its result depends on (`Base.key`); a file that is
there is whole. Only results worth keeping are kept: a failed run is a result, a mistake in the
config is not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from emu.errors import InputError, RunError
from emu.report.atomic import write_bytes
from emu.sweeps.evaluate import PointResult


class Store:
    """The directory `points/` of a sweep."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "points"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            raise InputError(str(directory), None, "output", problem) from None

    def get(self, key: str) -> PointResult | None:
        """A stored result. A file that cannot be read counts as absent."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=PointResult)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        except OSError as error:
            raise RunError(f"cannot read {self._path(key)}: {error.strerror}") from error

    def put(self, result: PointResult) -> None:
        """Keep a result."""
        if result.status in ("completed", "failed"):
            text = msgspec.json.format(msgspec.json.encode(result), indent=1)
            write_bytes(self._path(result.key), text + b"\n")

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"
