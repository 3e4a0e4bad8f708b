"""Intervals of a single run's percentiles: a bootstrap over blocks of requests.

A trace is the same with every seed, so seeds say nothing about how far its figures may be chance.
Requests close to each other share queues; blocks of consecutive arrivals keep that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from emu.api import run
from emu.apps.plan.question import Objective
from emu.documents import Document
from emu.process.interrupts import scratch
from emu.rng import rng_stream
from emu.units import NS_PER_MS

BLOCKS: Final = 40
RESAMPLES: Final = 400
_COLUMNS: Final = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2e": "latency_ns"}


def intervals_of(
    tables: Document, objectives: Sequence[Objective], seed: int
) -> list[tuple[float, float]]:
    """95 % intervals (low, high) in ms of the objectives' percentiles in one run."""
    with scratch("emu-plan-") as directory:
        requests = run(tables, output=Path(directory) / "run", report=False).requests
        order = np.argsort(requests["arrival_ns"], kind="stable")
        found = []
        for objective in objectives:
            values = requests[_COLUMNS[objective.metric]][order]
            found.append(
                block_interval(values[values >= 0] / NS_PER_MS, int(objective.at[1:]), seed)
            )
    return found


def block_interval(
    values: npt.NDArray[np.float64], percentile: int, seed: int
) -> tuple[float, float]:
    """95 % interval of a percentile of values in order of arrival."""
    blocks = np.array_split(values, min(BLOCKS, len(values)))
    rng = rng_stream(seed, "plan.bootstrap")
    drawn = [
        np.percentile(
            np.concatenate([blocks[index] for index in rng.integers(0, len(blocks), len(blocks))]),
            percentile,
        )
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)
