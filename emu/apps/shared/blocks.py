"""Intervals of a single run's percentiles: a bootstrap over blocks of requests.

A trace is the same with every seed, so seeds say nothing about how far its figures may be chance.
Requests close to each other share queues; blocks of consecutive arrivals keep that.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from emu.rng import rng_stream
from emu.units import NS_PER_MS

BLOCKS: Final = 40
RESAMPLES: Final = 400
_COLUMNS: Final = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2e": "latency_ns"}
Percentile = tuple[str, int]
"""Of a latency (ttft, tpot or e2e)."""


def interval_figures(percentile: Percentile) -> tuple[str, str]:
    """The names of the figures for the ends of its interval."""
    metric, at = percentile
    return f"interval.{metric}_p{at}.low", f"interval.{metric}_p{at}.high"


def intervals_of(path: Path, percentiles: Sequence[Percentile], seed: int) -> Mapping[str, float]:
    """95 % intervals in ms of percentiles of a run, from its requests.csv, in order of arrival."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows)
        places = {metric: header.index(name) for metric, name in _COLUMNS.items()}
        texts = list(zip(*rows, strict=True))
    found: dict[str, float] = {}
    for metric, at in percentiles:
        known = [text for text in texts[places[metric]] if text] if texts else []
        values = np.array(known, dtype=np.int64) / NS_PER_MS
        if len(values):
            ends = block_interval(values[values >= 0], at, seed)
            found |= zip(interval_figures((metric, at)), ends, strict=True)
    return found


def block_interval(
    values: npt.NDArray[np.float64], percentile: int, seed: int
) -> tuple[float, float]:
    """95 % interval of a percentile of values in order of arrival.

    Resamples are not laid out: how many of one are up to a value follows from the blocks, each
    sorted once.
    """
    blocks = [np.sort(block) for block in np.array_split(values, min(BLOCKS, len(values)))]
    rng = rng_stream(seed, "plan.bootstrap")
    times = np.zeros((RESAMPLES, len(blocks)), dtype=np.int64)
    for row in times:
        np.add.at(row, rng.integers(0, len(blocks), len(blocks)), 1)
    counts = times @ np.array([len(block) for block in blocks])
    at = (counts - 1) * (percentile / 100)
    below = np.floor(at).astype(np.int64)
    low = _of_rank(blocks, times, below)
    wide = _of_rank(blocks, times, np.minimum(below + 1, counts - 1)) - low
    part = at - below  # as numpy interpolates, from the nearer end
    drawn = np.where(part < 0.5, low + wide * part, low + wide - wide * (1 - part))
    first, last = np.percentile(drawn, (2.5, 97.5))
    return float(first), float(last)


def _of_rank(
    blocks: Sequence[npt.NDArray[np.float64]],
    times: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """In each resample the value of a rank (from 0): by bisection over all values."""
    ordered = np.sort(np.concatenate(blocks))
    low = np.zeros(len(ranks), dtype=np.int64)
    high = np.full(len(ranks), len(ordered) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        upto = [np.searchsorted(block, ordered[middle], side="right") for block in blocks]
        is_enough = (times * np.array(upto).T).sum(axis=1) > ranks
        high = np.where(is_enough, middle, high)
        low = np.where(is_enough, low, middle + 1)
    return ordered[low]
