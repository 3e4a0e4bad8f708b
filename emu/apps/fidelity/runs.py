"""Measured runs: what the board knows of one, and how each kind is read and emulated.

Owns the types that readers fill and that the board, the fit and the tables read. A reader finds
runs below a directory; a run can write its own configuration and workload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

METRICS: Final = ("ttft", "tpot", "e2e", "ttft_p99", "e2e_p99")
"""Means in ms, and 99th percentiles in ms."""
OVERLOADED_MS: Final = 2_000.0
"""A stage whose mean TTFT exceeds this, or in which requests failed, was overloaded."""


class Figures(msgspec.Struct, frozen=True):
    """Latencies of one stage, ms."""

    ttft: float
    tpot: float
    e2e: float
    ttft_p99: float
    e2e_p99: float

    def of(self, metric: str) -> float:
        """The figure of one of METRICS."""
        return float(msgspec.structs.asdict(self)[metric])


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a run with one load."""

    label: str
    requests: int
    measured: Figures
    is_overloaded: bool
    is_compared: bool
    """Its errors enter medians: the load was steady, or every request was recorded to its end."""
    regime: str
    """cached, mixed, near the knee, overloaded."""


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a real server."""

    reader: str
    run_id: str
    engine: str
    gpu: str
    model: str
    """Catalogue name."""
    model_class: str
    """dense or moe."""
    tensor_parallel: int
    stages: tuple[Stage, ...]
    peers: dict[str, dict[str, float]] = {}
    """Published errors of other simulators on the whole run, per cent, by simulator and metric."""
    in_fit: bool = True
    """Constants may be fitted to it."""
    details: Any = None
    """What its reader needs to rebuild it."""


class Unread(msgspec.Struct, frozen=True):
    """A run that was found and cannot be emulated."""

    run_id: str
    reason: str


class Case(msgspec.Struct, frozen=True):
    """A run made ready for emulation."""

    config: str
    """TOML that expects the workload beside it as `workload.jsonl`."""
    workload: str
    counts: tuple[int, ...]
    """Requests of each stage, in the order of the workload."""


class Reader(msgspec.Struct, frozen=True):
    """A kind of measured runs."""

    name: str
    find: Callable[[Path], list[MeasuredRun | Unread]]
    """Runs in a directory, not below it; empty if it is of another kind."""
    build: Callable[[MeasuredRun, int, float], Case]
    """(run, seed, part of each stage's requests) -> a case."""
    figures: Callable[[MeasuredRun, Path, Case], list[Figures]]
    """The stages' figures from the directory of an emulated run."""


def percentile(values: Sequence[float], part: float) -> float:
    """The value at a part of the sorted values (no interpolation)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
