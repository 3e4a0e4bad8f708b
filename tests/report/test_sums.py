"""Figures of columns: what plain Python adds up is what numpy adds up, to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emu.report.sums import FEW, added, deviation_of, mean_of


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 127, 128, 129, 135, 136, 255, 1000, FEW])
def test_sums_are_those_of_numpy(count: int) -> None:
    drawn = random.Random(count)
    for digits in range(1, 13):
        values = [drawn.randrange(10**digits) for _ in range(count)]
        column = np.array(values)
        assert mean_of(values) == float(column.mean())
        assert deviation_of(values) == float(column.std())
        parts = [value * 0.1 - 3.0 for value in values]
        assert added(parts) == float(np.array(parts).sum())
