"""Models with states in data-parallel groups: each member keeps its own states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.wide_ep import Site, backend, decodes
from tests.cluster.helpers import rows_of, run_config, summary_of

GROUP: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-Next-80B-A3B-Instruct", "max_model_tokens": 8192},
    "nodes": [{"gpu": "H200-SXM-141GB", "gpus": 4}],
    "replicas": [{"count": 4, "expert_parallel": 4, "data_parallel_group": "a"}],
    "workload": {
        "synthetic": {
            "requests": 40,
            "arrivals": {"process": "poisson", "rate_per_s": 20.0},
            "prompt": {"median": 500.0, "max": 2000},
            "output": {"median": 60.0, "max": 200},
        }
    },
}


@pytest.mark.parametrize("all2all", ["allgather_reducescatter", "deepep"])
def test_leaps_do_not_show(tmp_path: Path, all2all: str) -> None:
    tables = {**GROUP, "engine": {"all2all": all2all}}
    run_config(tmp_path / "leaps", **tables)
    run_config(tmp_path / "steps", **tables, scheduler={"leap": False})
    assert rows_of(tmp_path / "leaps") == rows_of(tmp_path / "steps")
    assert summary_of(tmp_path / "leaps")["completed"] == 40


def test_experts_of_a_group_compute_the_tokens_of_all_members() -> None:
    """Each member's step has the exchange, and the rows of all members on a quarter of experts."""
    site = Site(model="Qwen/Qwen3-Next-80B-A3B-Instruct")
    shared, alone = (backend("colocated", ranks, None, site) for ranks in (4, 1))
    few, many = (shared.components_ns(decodes(count, 500)) for count in (64, 1024))
    assert few["collectives"] > 0
    assert alone.components_ns(decodes(64, 500))["collectives"] == 0
    own = alone.components_ns(decodes(1024, 500))
    assert own["moe"] / 4 < many["moe"] < own["moe"] * 1.1
