"""What faults cost: the arithmetic of the table, on runs small enough to check by hand."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from emu.apps.chaos.copies import copies_of
from emu.apps.chaos.resilience import Cost, resilience
from emu.cli import main
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.cluster.helpers import workload

LINEAR = {"backend": "linear", "base_us": 1000.0, "per_token_us": 10.0}
ROWS = [
    {"input_toks": 100, "output_toks": 20, "arrival_time_ns": i * 50_000_000} for i in range(40)
]


def tables(tmp_path: Path, faults: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "nodes": [{"count": 2, "gpus": 1, "gpu": "A100-SXM4-80GB"}],
        "replicas": [{"role": "colocated", "count": 2}],
        "latency": LINEAR,
        "workload": {"path": workload(tmp_path / "w.jsonl", ROWS)},
        "recovery": {"restart_s": 0.4},
        "faults": faults,
        **more,
    }


def cost_of(tmp_path: Path, faults: list[dict[str, Any]], **more: Any) -> Cost:
    config = config_from_dict(tables(tmp_path, faults, **more))
    return resilience(config, "test", tmp_path)[2]


def test_a_crash_costs_the_tokens_that_are_computed_again(tmp_path: Path) -> None:
    """The request on the dead replica had its 100 prompt tokens and some of its output."""
    cost = cost_of(tmp_path, [{"at_s": 1.01, "kind": "replica_crash", "replica": 0}])
    with (tmp_path / "with" / "requests.csv").open(newline="") as file:
        again = [row for row in csv.DictReader(file) if row["retries"] == "1"]
    assert cost.faults == {"replica_crash": 1}
    assert cost.first_fault_s == 1.01
    assert cost.retried == len(again) == 1
    tokens = int(again[0]["recomputed_toks"])
    assert 100 < tokens < 120
    assert cost.recomputed_tokens == tokens
    assert cost.lost_gpu_s == pytest.approx((1000 + 10 * tokens) / 1e6)
    assert cost.down_gpu_s == pytest.approx(0.4)
    assert cost.lost_ends == 0


def test_a_fault_that_touches_nobody_costs_nothing(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, [{"at_s": 1.0, "kind": "link_latency", "node": 0, "magnitude": 5.0}])
    assert (cost.affected, cost.worse, cost.retried, cost.lost_ends) == (0, 0, 0, 0)
    assert (cost.recomputed_tokens, cost.lost_gpu_s, cost.down_gpu_s) == (0, 0.0, 0.0)
    assert cost.recovery_s == 0.0


def test_a_straggler_is_seen_in_tpot_until_it_ends(tmp_path: Path) -> None:
    """First tokens come hardly later; an iteration takes 30 ms instead of 10."""
    fault = {"at_s": 0.5, "kind": "straggler", "replica": 0, "magnitude": 3.0, "duration_s": 1.0}
    slow = {**LINEAR, "base_us": 10_000.0}
    cost = cost_of(tmp_path, [fault], latency=slow, replicas=[{"count": 1}])
    assert cost.worse > 0
    assert cost.extra_ttft_ms_mean < 50
    assert cost.recovery_s == pytest.approx(1.5)  # the second from 1 to 2 s was the last


def test_requests_that_fail_are_no_longer_completed(tmp_path: Path) -> None:
    fault = {"at_s": 1.01, "kind": "replica_crash", "replica": 0}
    cost = cost_of(tmp_path, [fault], recovery={"on_crash": "fail"})
    assert cost.lost_ends == 1
    assert cost.worse >= 1


def test_without_faults_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="faults: missing"):
        cost_of(tmp_path, [])


def test_the_command_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).resolve().parents[2] / "configs/experiments/chaos-decode-crash.toml"
    arguments = ["resilience", str(config), "--set", "workload.limit=100", "--output"]
    assert main([*arguments, str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "with faults" in text
    assert "lost work" in text
    assert (tmp_path / "without" / "summary.json").exists()


def test_it_names_what_was_struck_and_what_found_nothing(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"at_s": 1.01, "kind": "gpu_crash", "gpu": 1, "duration_s": 0.2},
        {"at_s": 1.0, "kind": "metrics_lost"},
    ]
    cost = cost_of(tmp_path, faults)
    assert cost.targets == ["GPU 1 (replica 1)"]
    assert cost.missed == ["metrics_lost: there is no planner"]


def test_copies_of_experts_buy_less_to_read_and_more_ranks_to_lose() -> None:
    config = config_from_dict(
        {
            "model": {"name": "deepseek-ai/DeepSeek-V2-Lite", "max_model_tokens": 4096},
            "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8, "nic_gbps": 400}],
            "engine": {"all2all": "deepep", "redundant_experts": 16},
            "replicas": [{"count": 8, "expert_parallel": 8, "data_parallel_group": "a"}],
            "recovery": {"ep_fault": "mask", "ep_detect_s": 0.5, "ep_agree_s": 0.1},
        }
    )
    ((name, rows),) = copies_of(make_plan(config))
    assert name == "a"
    assert [row.redundant for row in rows] == [0, 8, 16, 24, 64]
    assert [row.is_configured for row in rows] == [False, False, True, False, False]
    assert [row.spares for row in rows] == [0, 0, 1, 2, 4]  # of 8 to 16 slots a rank
    assert rows[0].lost_mean == 8.0  # its 8 of 64
    assert rows[0].still_s == rows[1].still_s == -1.0
    assert all(one.lost_mean > other.lost_mean for one, other in pairwise(rows))
    assert all(one.still_s >= other.still_s > 0.6 for one, other in pairwise(rows[2:]))
    assert rows[1].gpu_bytes == 26 * 3 * 2048 * 1408 * 2  # one expert in 26 layers, bf16
