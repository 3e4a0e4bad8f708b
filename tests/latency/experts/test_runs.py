"""Groups that share experts as `[engine]` says: whole runs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.cluster.helpers import rows_of, run_config, summary_of

SHARED: dict[str, Any] = {
    "model": {"name": "deepseek-ai/DeepSeek-V2-Lite", "max_model_tokens": 4096},
    "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4, "nic_gbps": 400}],
    "engine": {"all2all": "deepep", "overlap": "two_batch"},
    "replicas": [{"count": 4, "expert_parallel": 4, "data_parallel_group": "a"}],
    "workload": {
        "synthetic": {
            "requests": 60,
            "arrivals": {"process": "poisson", "rate_per_s": 30.0},
            "prompt": {"median": 500.0, "sigma": 0.6, "max": 1500},
            "output": {"median": 80.0, "sigma": 0.6, "max": 300},
        }
    },
}
PLACED = {"redundant_experts": 4, "eplb_interval_s": 1.0, "expert_drift_s": 5.0}


def with_engine(**keys: object) -> dict[str, Any]:
    return {**SHARED, "engine": {**SHARED["engine"], **keys}}


@pytest.mark.parametrize(
    "keys",
    [
        PLACED,
        {"overlap": "single_batch", "all2all": "mnnvl"},
        {"overlap": "none", "all2all": "allgather_reducescatter", "expert_popularity": "zipf:1"},
    ],
    ids=["deepep, placed anew", "mnnvl", "collectives"],
)
def test_leaps_do_not_show(tmp_path: Path, keys: dict[str, object]) -> None:
    tables = with_engine(**keys)
    run_config(tmp_path / "leaps", **tables)
    run_config(tmp_path / "steps", **tables, scheduler={"leap": False})
    assert rows_of(tmp_path / "leaps") == rows_of(tmp_path / "steps")
    leaps, steps = (summary_of(tmp_path / one) for one in ("leaps", "steps"))
    assert leaps["experts"] == steps["experts"]


def test_a_placement_stalls_the_group_and_is_counted(tmp_path: Path) -> None:
    run_config(tmp_path / "placed", **with_engine(**PLACED))
    run_config(tmp_path / "once", **with_engine(redundant_experts=4))
    placed, once = (summary_of(tmp_path / one) for one in ("placed", "once"))
    assert placed["experts"]["a"]["placements"] >= 2
    assert placed["experts"]["a"]["placement_s"] > 26 * 0.02 * 2  # the host's part alone
    assert once["experts"]["a"]["placements"] == 0
    assert placed["max_itl_ms"] > once["max_itl_ms"] + 400


def test_popular_experts_cost_time_and_copies_even_them_out(tmp_path: Path) -> None:
    figures = {}
    for name, keys in {
        "even": {"expert_popularity": "uniform"},
        "uneven": {"expert_popularity": "lognormal:2"},
        "copied": {"expert_popularity": "lognormal:2", "redundant_experts": 32},
    }.items():
        run_config(tmp_path / name, **with_engine(**keys))
        figures[name] = summary_of(tmp_path / name)
    assert figures["even"]["mean_ttft_ms"] < figures["uneven"]["mean_ttft_ms"]
    balanced = {name: figure["experts"]["a"]["balancedness"] for name, figure in figures.items()}
    assert balanced["even"] == 1.0
    assert balanced["uneven"] < 0.6 < balanced["copied"]


@pytest.mark.parametrize(
    ("tables", "field", "problem"),
    [
        (with_engine(redundant_experts=3), "redundant_experts", "67 slots .* 4 ranks"),
        (with_engine(all2all="mnnvl"), "overlap", 'need all2all = "deepep"'),
        (with_engine(overlap="auto", expert_popularity="x"), "expert_popularity", "none of"),
        (
            {**SHARED, "replicas": [{"tensor_parallel": 4, "expert_parallel": 4}]},
            "all2all",
            "needs a data_parallel_group",
        ),
        ({**SHARED, "model": {"name": "Qwen/Qwen3-8B"}}, "all2all", "has no experts"),
        ({**SHARED, "latency": {"backend": "linear"}}, "all2all", "roofline"),
        (
            {**SHARED, "latency": {"expert_routing": "random"}},
            "all2all",
            "expert_routing says",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, tables: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        run_config(tmp_path / "run", **tables)
    assert caught.value.field == f"engine.{field}"


def test_redundant_experts_take_memory_from_kv() -> None:
    plans = [
        make_plan(config_from_dict(with_engine(redundant_experts=more)), "test").replicas[0]
        for more in (0, 4)
    ]
    expert_bytes = 3 * 2048 * 1408 * 2
    lost_tokens = 16 * (plans[0].num_blocks - plans[1].num_blocks)
    lost_bytes = lost_tokens * plans[0].memory.kv_bytes_token
    assert lost_bytes == pytest.approx(26 * expert_bytes, rel=0.001)
