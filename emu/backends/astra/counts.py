"""Counts that ASTRA-Sim has given, kept by batch shape: to be reused, or replayed without it.

Owns a SQLite file with one table: a fingerprint of everything that the counts depend on beside
the batch (model, degrees, network, memories, layer times, program), the canonical batch shape,
and the cycles of each pipeline stage. Shapes that cost the same are one: the order of prompt
chunks does not matter, and of the decodes only count, sum and extremes of their contexts.

The file may be shared by processes; a run reads what it knows once and writes what it learns.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from emu.errors import InputError, RunError
from emu.latency.base import BatchShape

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counts (
    fingerprint TEXT NOT NULL,
    shape TEXT NOT NULL,
    cycles TEXT NOT NULL,
    PRIMARY KEY (fingerprint, shape)
) WITHOUT ROWID
"""
_COMMIT_EVERY: Final = 256


def shape_key(shape: BatchShape) -> str:
    """The canonical text of a shape."""
    chunks = sorted(zip(shape.prefill_new, shape.prefill_context, strict=True))
    prompts = "+".join(f"{new}@{context}" for new, context in chunks) or "-"
    decodes = (
        f"{shape.decode_count}x{shape.decode_context_sum}"
        f"[{shape.decode_context_min},{shape.decode_context_max}]"
        if shape.decode_count
        else "-"
    )
    layers = f"{shape.start_layer}:{shape.layers}"
    return f"p={prompts} d={decodes} n={shape.sequences} pad={shape.padded_tokens} l={layers}"


def fingerprint(*parts: object) -> str:
    """A short text that differs when anything in `parts` (Structs, plain values) differs."""
    data = msgspec.json.encode([msgspec.to_builtins(part, str_keys=True) for part in parts])
    return hashlib.sha256(data).hexdigest()[:32]


class CountStore:
    """One file of counts, for one fingerprint."""

    def __init__(self, path: Path, system: str, *, must_exist: bool = False) -> None:
        """Raises InputError for a file that is missing (`must_exist`) or is no such file."""
        self.path = path
        self._system = system
        self._unsaved: list[tuple[str, str, str]] = []
        self.hits = 0
        self.misses = 0
        if must_exist and not path.is_file():
            raise InputError(str(path), None, "latency.replay", "no such file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path)
        except (OSError, sqlite3.Error) as error:
            raise InputError(str(path), None, "", f"cannot be opened: {error}") from None
        try:
            self._db.execute(_SCHEMA)
            rows = self._db.execute(
                "SELECT shape, cycles FROM counts WHERE fingerprint = ?", (system,)
            )
            self._known = {shape: _cycles(text) for shape, text in rows}
        except (sqlite3.Error, ValueError) as error:
            self._db.close()
            raise InputError(str(path), None, "", f"not a file of counts: {error}") from None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, shape: BatchShape) -> tuple[int, ...] | None:
        """Cycles of each stage, or None."""
        found = self._known.get(shape_key(shape))
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def require(self, shape: BatchShape) -> tuple[int, ...]:
        """Cycles of each stage. Raises RunError that says which shape is missing."""
        found = self.get(shape)
        if found is None:
            others = self._count_others()
            hint = f" (it has {others} for other systems)" if others and not self._known else ""
            raise RunError(
                f"{self.path}: no count for the batch {shape_key(shape)}; "
                f"the file has {len(self._known)} for this system{hint}"
            )
        return found

    def put(self, shape: BatchShape, cycles: Sequence[int]) -> None:
        """Remember the counts of a shape."""
        key = shape_key(shape)
        self._known[key] = tuple(cycles)
        text = ",".join(map(str, cycles))
        self._unsaved.append((self._system, key, text))
        if len(self._unsaved) >= _COMMIT_EVERY:
            self.save()

    def save(self) -> None:
        """Make everything durable. Raises RunError.

        Nothing is open between two calls: replicas of several kinds share the file in one run.
        """
        rows, self._unsaved = self._unsaved, []
        if not rows:
            return
        try:
            with self._db:
                self._db.executemany("INSERT OR REPLACE INTO counts VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise RunError(f"{self.path}: counts cannot be stored: {error}") from None

    def _count_others(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM counts").fetchone()
        return int(count)

    def close(self) -> None:
        """Save and close."""
        try:
            self.save()
        finally:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cycles(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
