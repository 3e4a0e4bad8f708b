"""The examples of configs/plugins: short, they run, and do what their pages say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.config.schema import OwnSchedulerTable
from emu.request import Request
from emu.scheduling.base import ReplicaLimits

PLUGINS = Path(__file__).resolve().parents[2] / "configs" / "plugins"
LINEAR = {"backend": "linear", "base_us": 4000.0, "per_token_us": 20.0}


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", PLUGINS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def world(**tables: Any) -> dict[str, Any]:
    arrivals = {"process": "burst", "rate_per_s": 5.0, "burst_rate_per_s": 60.0}
    arrivals |= {"burst_every_s": 20.0, "burst_length_s": 6.0}
    return {
        "latency": LINEAR,
        "nodes": [{"gpus": 8}],
        "slo": {"ttft_ms": 500.0, "tpot_ms": 50.0},
        "workload": {
            "synthetic": {
                "requests": 500,
                "arrivals": arrivals,
                "prefix_groups": 8,
                "prefix_tokens": 600,
                "tenants": 2,
            }
        },
        **tables,
    }


def run(tmp_path: Path, **tables: Any) -> emu.Result:
    result = emu.run(world(**tables), output=tmp_path / "out", report=False)
    assert result.summary  # read now: the next run takes its place
    return result


@pytest.mark.parametrize("path", sorted(PLUGINS.glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_less_than_a_hundred_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100


def test_scorers_find_prefixes_that_load_alone_does_not(tmp_path: Path) -> None:
    hits = {}
    for policy in ("round_robin", f"{PLUGINS}/llmd_scorers.py:WeightedScorers"):
        result = run(tmp_path, replicas=[{"count": 4}], router={"policy": policy})
        hits[policy] = result.summary.prefix_hit_rate
    first, second = hits.values()
    assert second > first


def test_scores_are_those_of_the_scorers() -> None:
    from emu.routing.signal import Signal

    found = example("llmd_scorers")
    scorers, weights = found.WeightedScorers, found.Weights()
    signals = [Signal(i, waiting, 0, 0, 10 * i, 100, 256) for i, waiting in enumerate((4, 0, 2))]
    assert scorers._queue(signals) == [0.0, 1.0, 0.5]
    assert scorers._queue(signals[:1]) == [1.0]

    class Sees:
        def prefix_tokens(self, replica_id: int, request: Any) -> int:
            return (300, 0, 0)[replica_id]

        rng = np.random.default_rng(0)

    request = type("R", (), {"prompt_tokens": 300})()
    # 2 x 1 + 0 + 1 = 3; 0 + 1 + 0.9; 0 + 0.5 + 0.8
    assert scorers(Sees(), weights).choose(request, signals) == 0
    # Without the prefix, the shortest queue.
    Sees.prefix_tokens = lambda *_: 0  # type: ignore[assignment, method-assign]
    assert scorers(Sees(), weights).choose(request, signals) == 1


SPLIT = [
    {"count": 1, "role": "prefill"},
    {"count": 1, "role": "decode"},
    {"count": 6, "role": "inactive"},
]
LOADS = {"executor": "serverless", "loader": "delay", "load_delay_ms": 500.0}


def test_the_sla_planner_scales_both_roles(tmp_path: Path) -> None:
    planner = f"{PLUGINS}/sla_planner.py:SlaPlanner"
    bounds = {"max_prefill": 4, "max_decode": 4}
    scaled = run(
        tmp_path,
        replicas=SPLIT,
        autoscale={"planner": planner, "tick_ms": 2000.0, **LOADS, **bounds},
    )
    assert scaled.summary.scale_ups > 0
    static = run(tmp_path, replicas=SPLIT[:2])
    assert scaled.summary.p99_ttft_ms < static.summary.p99_ttft_ms


def test_the_predictive_planner_follows_the_load_up_and_down(tmp_path: Path) -> None:
    planner = f"{PLUGINS}/predictive_planner.py:Predictive"
    replicas = [{"count": 1}, {"count": 7, "role": "inactive"}]
    workload: dict[str, Any] = world()["workload"]
    workload["synthetic"] |= {"requests": 900}
    workload["synthetic"]["arrivals"] |= {"burst_every_s": 60.0}
    scaling = {"planner": planner, "tick_ms": 1000.0, **LOADS}
    scaled = run(tmp_path, replicas=replicas, workload=workload, autoscale=scaling)
    static = run(tmp_path, replicas=[{"count": 1}], workload=workload)
    assert scaled.summary.scale_ups > 0 and scaled.summary.scale_downs > 0
    assert scaled.summary.p99_ttft_ms < static.summary.p99_ttft_ms


def test_admission_keeps_the_objective_of_what_it_admits(tmp_path: Path) -> None:
    admission = f"{PLUGINS}/slo_admission.py:SloAdmission"
    admitted = run(tmp_path, replicas=[{"count": 1}], router={"admission": admission})
    free = run(tmp_path, replicas=[{"count": 1}])
    assert free.summary.p99_ttft_ms > 500
    assert 0 < admitted.summary.rejected < 400
    assert admitted.summary.p99_ttft_ms < free.summary.p99_ttft_ms / 2


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_of_virtual_token_count_holds(seed: int) -> None:
    """While two tenants wait, their service differs by 2 max(L_prompt, 2 M) at most (theorem 4.4)."""
    vtc = example("vtc")
    rng = np.random.default_rng(seed)
    blocks, size = 120, 16
    table = OwnSchedulerTable(policy="vtc", max_num_seqs=32, max_num_batched_tokens=512)
    limits = ReplicaLimits(num_blocks=blocks, block_size=size, max_model_tokens=4096)
    scheduler = vtc.VirtualTokenCount(table, limits)
    longest = 200
    bound = 2 * max(vtc.PROMPT_WEIGHT * longest, vtc.OUTPUT_WEIGHT * blocks * size)
    served = {"a": 0, "b": 0}
    least: dict[str, int] = {}
    now_ns, next_id = 0, 0

    def submit(tenant: str, prompt: int, output: int) -> None:
        nonlocal next_id
        request = Request(
            request_id=next_id,
            arrival_ns=now_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            max_output_tokens=output,
            tenant=tenant,
        )
        next_id += 1
        scheduler.enqueue(request, now_ns)

    both_since: tuple[int, int] | None = None
    widest = 0
    for _ in range(1500):
        waiting = [request.tenant for request in scheduler.waiting()]
        for tenant, mean in (("a", 150), ("b", 20)):
            idles = tenant == "b" and (now_ns // 300_000) % 3 == 0
            if waiting.count(tenant) < 3 and not idles:
                submit(
                    tenant, int(rng.integers(1, min(longest, 2 * mean))), int(rng.integers(1, 80))
                )
        waiting = [request.tenant for request in scheduler.waiting()]
        if {"a", "b"} <= set(waiting):
            if both_since is None:
                both_since = (served["a"], served["b"])
            gained = [served[t] - s for t, s in zip("ab", both_since, strict=True)]
            widest = max(widest, abs(gained[0] - gained[1]))
            assert abs(gained[0] - gained[1]) <= bound
            least[str(len(least))] = gained[0]
        else:
            both_since = None
        before = dict(scheduler.counters)
        batch = scheduler.schedule(now_ns)
        for tenant, counter in scheduler.counters.items():
            served[tenant] += counter - before.get(tenant, 0)
        now_ns += 1000
        if batch is not None:
            scheduler.complete(batch, 1, now_ns, 1000)
        assert not scheduler.recount()
    assert len(least) > 300 and widest > 0
