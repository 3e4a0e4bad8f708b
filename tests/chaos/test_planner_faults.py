"""Metrics that reach the planner late or not at all: what it decides, and what watches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.apps.chaos.judge import Judge
from emu.apps.chaos.plan_watch import PlanWatch
from emu.config.schema import AutoscaleTable, BlitzTable, HpaTable
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

ROWS = [
    {"input_toks": 200, "output_toks": 100, "arrival_time_ns": 1_000_000_000 + i * 5_000_000}
    for i in range(60)
]


def scaled(
    tmp_path: Path, faults: list[dict[str, Any]] | None = None, **autoscale: Any
) -> list[float]:
    """One colocated replica and three spares meet a burst after 1 s; when plans were made, in s."""
    table = {"planner": "hpa", "target_value": 4.0, "tick_ms": 10.0, **autoscale}
    run_config(
        tmp_path,
        nodes=[{"gpus": 4}],
        replicas=[{"count": 1}, {"role": "inactive", "count": 3}],
        latency=LINEAR,
        autoscale={"scale_down_stabilization_s": 1.0, **table},
        workload={"path": workload(tmp_path / "w.jsonl", ROWS)},
        faults=faults or [],
        output={"events": True},
    )
    assert summary_of(tmp_path)["completed"] == len(ROWS)
    marks = rows_of(tmp_path, "marks.csv")
    return [int(row["time_ns"]) / 1e9 for row in marks if row["kind"] == "plan"]


def test_a_planner_whose_metrics_are_late_is_late(tmp_path: Path) -> None:
    calm = scaled(tmp_path)
    late = scaled(tmp_path, metrics_delay_ms=300.0)
    assert calm[0] == pytest.approx(1.03, abs=0.03)
    assert late[0] == pytest.approx(calm[0] + 0.3, abs=0.02)


def test_a_fault_makes_them_late_for_a_time(tmp_path: Path) -> None:
    fault = {"at_s": 0.5, "kind": "metrics_delayed", "magnitude": 400.0, "duration_s": 5.0}
    plans = scaled(tmp_path, [fault])
    assert plans[0] == pytest.approx(1.43, abs=0.03)
    assert summary_of(tmp_path)["faults"] == {"metrics_delayed": 1}


def test_a_delay_that_ends_lets_it_see_the_present(tmp_path: Path) -> None:
    fault = {"at_s": 0.5, "kind": "metrics_delayed", "magnitude": 9000.0, "duration_s": 0.7}
    assert scaled(tmp_path, [fault])[0] == pytest.approx(1.2, abs=0.02)


def test_without_metrics_it_holds(tmp_path: Path) -> None:
    fault = {"at_s": 0.5, "kind": "metrics_lost", "duration_s": 0.8}
    assert scaled(tmp_path, [fault])[0] == pytest.approx(1.3, abs=0.02)


def test_without_metrics_for_ever_nothing_is_scaled(tmp_path: Path) -> None:
    assert scaled(tmp_path, [{"at_s": 0.5, "kind": "metrics_lost"}]) == []
    assert summary_of(tmp_path)["scale_ups"] == 0


# --- what watches ----------------------------------------------------------------------------------
HPA = HpaTable(max_replicas=4, scale_down_stabilization_s=1.0)
ROLES = BlitzTable(min_prefill=2, max_prefill=4, max_decode=4)
PODS = "ready=3, loading=0, load=9, wanted="
SPLIT = "P=3, P_min=1, P_max=1, D=3, D_min=1, D_max=1"


@pytest.mark.parametrize(
    ("table", "plans", "what"),
    [
        (HPA, [f"colocated -1, {PODS}2; shut 1"], ""),
        (HPA, [f"colocated +2, {PODS}5; load host 3:colocated"], "bounds are 1 and 4"),
        (HPA, [f"colocated +1, {PODS}4; shut 0", f"colocated -1, {PODS}2; shut 1"], "were wanted"),
        (ROLES, [f"prefill -1, decode +0, {SPLIT}; shut 1"], ""),
        (ROLES, [f"prefill +0, decode -2, {SPLIT}; shut 1; shut 2"], "-2 decode replicas at once"),
        (ROLES, [f"prefill +2, decode +0, {SPLIT}; load p2p 1 -> 3:prefill"], "3+2 prefill"),
        (ROLES, [f"prefill +1, decode +0, {SPLIT}; load p2p 7 -> 3:prefill"], "dead"),
    ],
)
def test_the_watch_sees(table: AutoscaleTable, plans: list[str], what: str) -> None:
    watch = PlanWatch(table)
    found = [line for i, text in enumerate(plans) for line in watch.judge(i, text, {7: "failed"})]
    assert [what in line for line in found] == [True] * bool(what)


def test_the_judge_sees_a_decision_without_metrics() -> None:
    judge = Judge({"": HPA})
    plan = {"at_ns": 1, "event": "plan", "target": ""}
    plan["text"] = f"colocated +1, {PODS}4; load host 3:colocated"
    lost = {"at_ns": 1, "event": "fault", "kind": "metrics_lost", "target": "planner"}
    judge.read([plan, lost, {**lost, "event": "fault_over"}, plan])
    assert judge.problems == []
    judge.read([lost, plan])
    assert len(judge.problems) == 1
    assert "no metrics" in judge.problems[0]
