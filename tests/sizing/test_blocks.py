"""Intervals of one run's percentiles are those of resamples that are laid out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emu.apps.shared.blocks import (
    BLOCKS,
    RESAMPLES,
    block_interval,
    interval_figures,
    intervals_of,
)
from emu.rng import rng_stream


def laid_out(values: np.ndarray, percentile: int, seed: int) -> tuple[float, float]:
    """The same by drawing blocks and joining them."""
    blocks = np.array_split(values, min(BLOCKS, len(values)))
    rng = rng_stream(seed, "plan.bootstrap")
    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(blocks), len(blocks))
        drawn.append(np.percentile(np.concatenate([blocks[at] for at in chosen]), percentile))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


@pytest.mark.parametrize("count", [1, 2, 39, 40, 41, 333])
@pytest.mark.parametrize("percentile", [50, 95, 99])
def test_an_interval_is_that_of_blocks_laid_end_to_end(count: int, percentile: int) -> None:
    values = np.random.default_rng(count).lognormal(3, 1, count).round(1)  # with ties
    assert block_interval(values, percentile, 7) == laid_out(values, percentile, 7)


def test_rows_without_a_figure_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = ["1000000,2000000,9000000,a", ",,,b", "-1,,,c", "3000000,4000000,8000000,d"]
    path.write_text("\n".join(["ttft_ns,tpot_ns,latency_ns,session_id", *rows]), encoding="utf-8")
    found = intervals_of(path, [("ttft", 50), ("e2e", 95)], 1)
    low, high = interval_figures(("ttft", 50))
    assert (found[low], found[high]) == laid_out(np.array([1.0, 3.0]), 50, 1)
    path.write_text("ttft_ns,tpot_ns,latency_ns\n", encoding="utf-8")
    assert not intervals_of(path, [("tpot", 95)], 1)
