"""The largest traffic that is met: found in few runs, whatever the figures do."""

from __future__ import annotations

import math

import pytest

from emu.apps.plan.headroom import STEPS, TOLERANCE, last_met

CURVES = {
    "line": lambda x, edge: x / edge,
    "steep": lambda x, edge: (x / edge) ** 12,
    "queue": lambda x, edge: 0.5 / (1.5 - x / edge) if x < 1.5 * edge else math.inf,
    "cliff": lambda x, edge: 0.3 if x <= edge else 40.0,
    "unserved": lambda x, edge: 0.9 if x <= edge else math.inf,
    "flat": lambda x, edge: 0.999 if x <= edge else 1.001,
}


@pytest.mark.parametrize("curve", list(CURVES))
@pytest.mark.parametrize("edge", [1.001, 1.02, 1.1, 1.24, 1.33, 1.39, 1.41, 1.6, 1.99, 2.5])
def test_the_last_that_is_met_is_found_in_few_runs(curve: str, edge: float) -> None:
    tried = []

    def ratio_at(factor: float) -> float:
        tried.append(factor)
        return CURVES[curve](factor, edge) if factor > edge else min(1, CURVES[curve](factor, edge))

    low, high = last_met(ratio_at, CURVES[curve](1.0, edge))
    assert len(tried) == len(set(tried)) <= 9
    assert low <= edge
    if edge >= STEPS[-1]:
        assert (low, high) == (STEPS[-1], None)
    else:
        assert high is not None
        assert high > edge
        assert high - low <= TOLERANCE * high
