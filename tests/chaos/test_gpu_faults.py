"""A GPU that dies alone, or with its machine: which replicas go down with it, live on, and step in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.chaos.test_faults import ROWS, ends, marks
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

Fault = dict[str, Any]


def struck(
    tmp_path: Path,
    faults: list[Fault],
    replicas: list[dict[str, Any]],
    nodes: dict[str, Any] | None = None,
    **tables: Any,
) -> dict[int, list[tuple[str, float]]]:
    """By replica: the states that it took, and when, in s. Every request completes."""
    run_config(
        tmp_path,
        nodes=[{"count": 2, "gpus": 4, "gpu": "A100-SXM4-80GB", **(nodes or {})}],
        replicas=replicas,
        faults=faults,
        workload={"path": workload(tmp_path / "w.jsonl", ROWS)},
        **{"latency": LINEAR, "recovery": {"restart_s": 0.2}, **tables},
    )
    assert ends(tmp_path) == {"completed": len(ROWS)}
    states: dict[int, list[tuple[str, float]]] = {}
    for row in rows_of(tmp_path, "transitions.csv"):
        if row["from"]:
            move = (row["to"], int(row["time_ns"]) / 1e9)
            states.setdefault(int(row["replica"]), []).append(move)
    return states


@pytest.mark.parametrize("shape", ["tensor_parallel", "pipeline_parallel"])
@pytest.mark.parametrize("gpu", [2, 3])
def test_a_rank_takes_its_whole_replica_down_and_nobody_else(
    tmp_path: Path, shape: str, gpu: int
) -> None:
    """Four replicas of two GPUs; GPUs 2 and 3 are replica 1."""
    fault = {"at_s": 0.3, "kind": "gpu_crash", "gpu": gpu, "duration_s": 0.5}
    states = struck(tmp_path, [fault], [{"count": 4, shape: 2}])
    assert list(states) == [1]
    assert states[1][:3] == [("failed", 0.3), ("inactive", 0.8), ("loading_colocated", 0.8)]
    assert any(row["retries"] == "1" for row in rows_of(tmp_path))
    assert marks(tmp_path, "fault")[0]["target"] == f"GPU {gpu} (replica 1)"


def test_neighbours_with_a_gpu_of_their_own_live_on(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "gpu_crash", "gpu": 5, "duration_s": 0.5}
    assert list(struck(tmp_path, [fault], [{"count": 8}])) == [5]


def test_experts_that_are_gone_stop_the_whole_group(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "gpu_crash", "gpu": 1, "duration_s": 0.1}
    model = {"name": "mistralai/Mixtral-8x7B-v0.1"}
    group = {"count": 4, "data_parallel_group": "A", "expert_parallel": 4}
    states = struck(
        tmp_path, [fault], [group, {"count": 1}], {"gpu": "H200-SXM-141GB"}, model=model
    )
    assert sorted(states) == [0, 1, 2, 3]
    assert {moves[0] for moves in states.values()} == {("failed", 0.3)}


def test_a_dead_machine_takes_its_replicas_and_its_memory(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "node_crash", "node": 0, "duration_s": 0.5}
    states = struck(tmp_path, [fault], [{"count": 8}])
    assert sorted(states) == [0, 1, 2, 3]
    causes = [row["cause"] for row in rows_of(tmp_path, "transitions.csv")]
    assert causes.count("weights come by disk") == 1, "the first to load there fills the memory"
    assert causes.count("weights come by host") == 3


def test_nothing_comes_back_before_its_gpu(tmp_path: Path) -> None:
    """The process would be back after 0.1 s; one of two GPUs is not."""
    faults: list[Fault] = [
        {"at_s": 0.2, "kind": "gpu_crash", "gpu": 3, "duration_s": 0.7},
        {"at_s": 0.25, "kind": "gpu_crash", "gpu": 2, "duration_s": 0.2},
    ]
    states = struck(tmp_path, faults, [{"count": 2, "tensor_parallel": 2}])
    assert states[1][:2] == [("failed", 0.2), ("inactive", pytest.approx(0.9))]


def test_a_dead_gpu_stays_dead(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "gpu_crash", "gpu": 1}
    assert struck(tmp_path, [fault], [{"count": 4}]) == {1: [("failed", 0.3)]}


def test_a_spare_takes_the_role_and_the_other_becomes_the_spare(tmp_path: Path) -> None:
    faults: list[Fault] = [{"at_s": 0.3, "kind": "gpu_crash", "gpu": 1, "duration_s": 0.8}]
    states = struck(tmp_path, faults, [{"count": 4}, {"role": "inactive", "count": 2}])
    assert states[4][0] == ("loading_colocated", 0.5)
    assert states[4][1][0] == "colocated"
    assert [to for to, _ in states[1]] == ["failed", "inactive"]
    assert 5 not in states


@pytest.mark.parametrize(
    "why",
    [
        {"recovery": {"replace": False}},
        {"replicas": [{"count": 4}, {"role": "inactive", "count": 1, "tensor_parallel": 2}]},
    ],
)
def test_no_spare_that_may_or_can(tmp_path: Path, why: dict[str, Any]) -> None:
    replicas = why.pop("replicas", [{"count": 4}, {"role": "inactive", "count": 2}])
    fault = {"at_s": 0.3, "kind": "gpu_crash", "gpu": 1}
    assert list(struck(tmp_path, [fault], replicas, **why)) == [1]


def test_a_planner_places_elsewhere_by_itself(tmp_path: Path) -> None:
    """The only replica dies for good; a spare on the other machine is loaded."""
    fault = {"at_s": 0.3, "kind": "gpu_crash", "gpu": 0}
    states = struck(
        tmp_path,
        [fault],
        [{"count": 1}, {"role": "inactive", "count": 3}],
        {"gpus": 1, "count": 4},
        autoscale={"planner": "hpa", "target_value": 100.0, "tick_ms": 10.0},
    )
    assert states[0] == [("failed", 0.3)]
    assert [to for to, _ in states[1]][:2] == ["loading_colocated", "colocated"]


def test_a_spare_on_a_dead_gpu_is_no_spare(tmp_path: Path) -> None:
    faults: list[Fault] = [
        {"at_s": 0.1, "kind": "gpu_crash", "gpu": 4},
        {"at_s": 0.3, "kind": "gpu_crash", "gpu": 1},
    ]
    states = struck(tmp_path, faults, [{"count": 4}, {"role": "inactive", "count": 2}])
    assert states[4] == [("failed", 0.1)]
    assert states[5][0] == ("loading_colocated", 0.5)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "straggler", "magnitude": 3.0, "duration_s": 0.2},
        {"kind": "freeze", "duration_s": 0.05},
    ],
)
def test_one_slow_gpu_slows_its_replica(tmp_path: Path, fault: Fault) -> None:
    struck(tmp_path, [{"at_s": 0.3, "gpu": 3, **fault}], [{"count": 4, "tensor_parallel": 2}])
    assert [mark["target"] for mark in marks(tmp_path, "fault")] == ["replica 1"]


def test_the_links_of_one_gpu(tmp_path: Path) -> None:
    fault = {"at_s": 0.3, "kind": "link_down", "gpu": 3, "duration_s": 0.2}
    struck(tmp_path, [fault], [{"count": 4}])
    assert [mark["target"] for mark in marks(tmp_path, "fault")] == ["GPU 3"]


def test_a_gpu_that_nobody_uses_is_missed(tmp_path: Path) -> None:
    faults = [{"at_s": 0.3, "kind": kind, "gpu": 7} for kind in ("gpu_crash", "freeze")]
    assert struck(tmp_path, faults, [{"count": 4}]) == {}
    assert summary_of(tmp_path)["faults_missed"] == {"gpu_crash": 1, "freeze": 1}


def test_a_gpu_that_is_not_there_is_refused() -> None:
    fault = {"at_s": 1.0, "kind": "gpu_crash", "gpu": 8}
    with pytest.raises(InputError, match=r"faults\.0\.gpu: expected an index from 0 to 7, got 8"):
        config_from_dict({"nodes": [{"gpus": 8}], "replicas": [{}], "faults": [fault]})
