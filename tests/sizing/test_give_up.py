"""Runs of a search end early only where they miss for certain, and else have the figures of any."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emu.apps.shared.give_up import RATIO, Limit, certain_ratios, run_or_give_up
from emu.config.load import config_from_dict
from emu.report.records import LATENCIES
from emu.report.summary import figures_of
from emu.runs.runner import execute


def tables(rate: float) -> dict[str, Any]:
    """Two replicas."""
    return {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"gpu": "L40S", "gpus": 2}],
        "replicas": [{"count": 2}],
        "workload": {
            "synthetic": {
                "requests": 120,
                "arrivals": {"rate_per_s": rate},
                "prompt": {"median": 700, "sigma": 0.5, "max": 4000},
                "output": {"distribution": "uniform", "min": 1, "max": 40},
            }
        },
    }


@pytest.mark.parametrize("rate", [4.0, 14.0, 40.0])
def test_a_run_is_given_up_only_where_all_of_it_misses(rate: float, tmp_path: Path) -> None:
    config = config_from_dict({**tables(rate), "output": {"dir": str(tmp_path / "whole")}})
    whole = figures_of(execute(config, "whole", report=False).summary)  # type: ignore[arg-type]
    draw = random.Random(int(rate))
    given_up = 0
    for number in range(4):
        limits = [
            Limit("ttft", draw.choice([50, 95]), draw.uniform(60, 900), 1.1),
            Limit("tpot", 95, draw.uniform(20, 120), 1.1),
        ]
        place = tmp_path / str(number)
        place.mkdir()
        found = run_or_give_up(config, "part", place, limits)
        names = {50: "median", 95: "p95"}
        ratios = {
            one.figure: whole[f"{names[one.percentile]}_{one.metric}_ms"] / one.limit_ms
            for one in limits
        }
        if RATIO not in found:
            assert found == whole
            assert rate < 40 or max(ratios.values()) < 1.2  # what misses by far is given up
            continue
        given_up += 1
        assert 1.1 < found[RATIO] <= max(ratios.values())
        assert all(found[name] <= ratios[name] * (1 + 1e-9) for name in ratios)
    assert given_up or rate < 40


@pytest.mark.parametrize("seed", range(40))
def test_what_is_certain_holds_whatever_the_others_are(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 90))
    values = draw.integers(1, 1_000_000_000, count)
    done = int(draw.integers(0, count + 1))
    rows = b"".join(struct.pack("=7q", int(one), *[0] * 6) for one in values[:done])
    assert len(LATENCIES) == 7
    percentile = int(draw.choice([50, 95, 99]))
    (least,) = certain_ratios(rows, [Limit("ttft", percentile, 100.0)], count)
    final = float(np.percentile(values, percentile)) / 1e6 / 100
    assert least <= final * (1 + 1e-12)
    if done == count:
        assert least > 0
