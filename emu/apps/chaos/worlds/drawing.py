"""How anything is drawn: one of some values, or a chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np

from emu.documents import Document

T = TypeVar("T")
Rng = np.random.Generator
Tables = Document
TIMES_S: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Few values, so that things often happen at the same instant."""


def pick(rng: Rng, values: Sequence[T]) -> T:
    """One of the values, all alike."""
    return values[int(rng.integers(len(values)))]


def chance(rng: Rng, probability: float) -> bool:
    """True with this probability."""
    return float(rng.random()) < probability


def by_arrival(lines: Sequence[Tables]) -> list[Tables]:
    """The lines of a workload in the order in which a file has them."""
    return sorted(lines, key=lambda line: int(line["arrival_time_ns"]))
