"""A GPU without a measured kernel is marked, and its intervals are as wide as emu's own doubt."""

from __future__ import annotations

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.runs.engine_lines import Spread, spread


def spread_on(gpu: str) -> Spread:
    config = config_from_dict({"nodes": [{"gpu": gpu, "gpus": 1}]})
    found = spread(config, make_plan(config), (8, 1000, 500))
    assert found is not None
    return found


@pytest.mark.parametrize("gpu", ["MI300X", "RTX4090", "H800"])
def test_what_was_measured_nowhere_is_said_and_counts(gpu: str) -> None:
    found = spread_on(gpu)
    assert "is unmeasured" in found.source
    least = 9.0 if gpu == "H800" else 25.0  # an H800 takes the kernels of other Hopper GPUs
    assert min(found.halves.values()) > least
    assert found.parts["tpot"]["rest"] > 0.3


@pytest.mark.parametrize("gpu", ["H100", "B300-SXM-288GB"])
def test_what_was_measured_is_not_marked(gpu: str) -> None:
    assert "unmeasured" not in spread_on(gpu).source
