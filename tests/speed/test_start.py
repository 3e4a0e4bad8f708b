"""A run of a few requests on many replicas costs in proportion to the replicas.

Counted is work, not time: lines that the interpreter begins (each turn of a loop and of a
comprehension is one). A cost of n replicas that is a + b n has the same slope
everywhere; one with n x n in it has a steeper slope between larger sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from emu.config.load import config_from_dict
from emu.runs.runner import execute

_WORK: dict[str, Any] = {
    "requests": 10,
    "arrivals": {"rate_per_s": 1.0},
    "prompt": {"median": 1000.0, "max": 8000},
    "output": {"median": 10.0, "sigma": 0.5, "max": 80},
}


def _lines(directory: Path, tables: dict[str, Any], interval_ms: float = 10_000.0) -> int:
    """Lines begun in all of a run, from its tables to its files."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return on_event

    output = {"dir": str(directory), "timeseries_interval_ms": interval_ms, "report": False}
    config = config_from_dict({**tables, "output": output})
    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        execute(config, "test")
    finally:
        sys.settrace(before)
    return count


def _node(gpus: int) -> list[dict[str, Any]]:
    return [{"gpu": "H100-SXM5-80GB", "gpus": 8, "count": -(-gpus // 8)}]


def _of_replicas(count: int) -> dict[str, Any]:
    return {
        "nodes": _node(count),
        "replicas": [{"count": count}],
        "workload": {"synthetic": _WORK},
    }


def _of_roles(count: int) -> dict[str, Any]:
    pools = [{"role": role, "count": count // 2} for role in ("prefill", "decode")]
    return {**_of_replicas(count), "replicas": pools}


def _scaled(count: int) -> dict[str, Any]:
    """Weights stay in the memory of each machine for a time, so that their bytes have books."""
    pools = [{"role": "colocated", "count": count // 2}, {"role": "inactive", "count": count // 2}]
    scaling = {"planner": "hpa", "executor": "serverless", "loader": "cache", "tick_ms": 5000.0}
    scaling["min_replicas"] = count // 2
    return {**_of_replicas(count), "replicas": pools, "autoscale": scaling}


def _of_models(count: int) -> dict[str, Any]:
    """So many models with two replicas each."""
    names = [f"model-{index}" for index in range(count)]
    models = [
        {"served_name": name, "name": "meta-llama/Llama-3.1-8B", "prefill": 1, "decode": 1}
        for name in names
    ]
    shares = dict.fromkeys(names, 1.0)
    return {
        "nodes": _node(2 * count),
        "models": models,
        "workload": {"synthetic": _WORK, "model_shares": shares},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (_of_replicas, (64, 512, 4096)),
        (_of_roles, (64, 256, 1024)),
        (_scaled, (64, 256, 1024)),
        (_of_models, (10, 40, 100)),
    ],
    ids=["replicas", "roles", "scaled", "models"],
)
def test_the_work_of_a_start_grows_evenly(
    shape: Callable[[int], dict[str, Any]], sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    _lines(tmp_path / "first", shape(sizes[0]))  # loads modules, fills tables
    few, some, many = (_lines(tmp_path / str(size), shape(size)) for size in sizes)
    early = (some - few) / (sizes[1] - sizes[0])
    late = (many - some) / (sizes[2] - sizes[1])
    print(f"{early:.0f}, then {late:.0f} lines for each one more")
    assert late < 1.02 * early


def test_a_sample_of_replicas_at_rest_reads_none_of_their_figures(tmp_path: Path) -> None:
    replicas = 128
    _lines(tmp_path / "first", _of_replicas(replicas))
    seldom = _lines(tmp_path / "seldom", _of_replicas(replicas))
    often = _lines(tmp_path / "often", _of_replicas(replicas), interval_ms=100.0)
    samples = len((tmp_path / "often" / "timeseries.csv").read_text().splitlines()) - 3
    assert samples > 50
    # Three lines for each replica: the loop, the question, the next one.
    assert (often - seldom) / samples < 3.8 * replicas
