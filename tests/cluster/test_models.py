"""Several models in one cluster: requests go to their own, GPUs and host memory are shared."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from emu.autoscale.host_cache import HostCache, HostMemory
from emu.config.load import config_from_dict
from emu.config.schema import BlitzTable
from emu.errors import InputError
from emu.rng import rng_stream
from emu.runs.runner import execute, prepare
from emu.workload.naming import Naming

LLAMA = "meta-llama/Llama-3.1-8B"


def fleet(**tables: Any) -> dict[str, Any]:
    """Three models on two machines of four GPUs; one of them needs a whole machine."""
    return {
        "nodes": [{"count": 2, "gpus": 4, "host_memory_gib": 64}],
        "models": [
            {"served_name": "a", "name": LLAMA, "prefill": 1, "decode": 1},
            {"served_name": "b", "name": LLAMA},
            {
                "served_name": "big",
                "name": "meta-llama/Llama-3.1-70B",
                "dtype": "fp8",
                "tensor_parallel": 4,
            },
        ],
        "scheduler": {"policy": "fcfs"},
        "autoscale": {
            "preset": "serverlessllm",
            "min_prefill": 0,
            "min_decode": 0,
            "idle_s": 2.0,
        },
        "workload": {
            "model_shares": {"a": 2, "b": 1, "big": 1},
            "synthetic": {
                "requests": 40,
                "arrivals": {"rate_per_s": 2.0},
                "prompt": {"max": 4000},
            },
        },
        **tables,
    }


def run(tables: dict[str, Any], out: Path) -> dict[str, Any]:
    """The summary of a run."""
    tables["output"] = {"dir": str(out), "report": False}
    execute(config_from_dict(tables), "test")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, models: list[str]) -> Path:
    lines = [
        {"arrival_time_ns": i * 10**8, "input_toks": 100, "output_toks": 5, "model": model}
        for i, model in enumerate(models)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("preset", ["blitzscale", "allcache", "serverlessllm"])
def test_gpus_are_given_from_model_to_model_and_never_shared(preset: str, tmp_path: Path) -> None:
    tables = fleet()
    tables["autoscale"]["preset"] = preset
    summary = run(tables, tmp_path / "out")
    assert summary["completed"] == 40
    assert sum(model["completed"] for model in summary["models"].values()) == 40
    assert summary["models"]["b"]["loads"]
    assert summary["models"]["big"]["loads"]
    tables["output"]["dir"] = str(tmp_path / "other")
    plan, _ = prepare(config_from_dict(tables), "test")
    owner: dict[int, int] = {}
    for row in rows(tmp_path / "out" / "transitions.csv"):
        replica = int(row["replica"])
        is_there = row["to"] not in ("inactive", "failed")
        for gpu in plan.replicas[replica].gpus:
            if is_there:
                assert owner.setdefault(gpu, replica) == replica, row
            elif owner.get(gpu) == replica:
                del owner[gpu]


def test_a_request_is_served_by_the_model_that_it_names(tmp_path: Path) -> None:
    tables = fleet()
    names = ["a", "b", "big", "gpt", "alias", ""]
    tables["workload"] = {
        "path": str(write(tmp_path / "w.jsonl", names)),
        "models": {"alias": "b"},
    }
    summary = run(tables, tmp_path / "out")
    assert (summary["completed"], summary["rejected"]) == (5, 1)
    assert summary["reasons"] == {"rejected: unknown_model": 1}
    found = rows(tmp_path / "out" / "requests.csv")
    assert [row["model"] for row in found] == ["a", "b", "big", "", "b", "a"]
    tables["output"]["dir"] = str(tmp_path / "other")
    plan, _ = prepare(config_from_dict(tables), "test")
    for row in found:
        if row["instance_id"]:
            assert plan.replicas[int(row["instance_id"])].served == row["model"]


def test_each_model_has_as_many_requests_in_the_system_as_it_may(tmp_path: Path) -> None:
    """Three come together to each, of which one may hold two; a second later one comes alone."""
    path = tmp_path / "w.jsonl"
    come = [(0, "a"), (0, "a"), (0, "a"), (0, "b"), (0, "b"), (0, "b"), (60, "a"), (60, "b")]
    lines = [
        {"arrival_time_ns": at * 10**9, "input_toks": 100, "output_toks": 5, "model": model}
        for at, model in come
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for bounded in ("a", "b"):
        models = [
            {"served_name": name, "name": LLAMA, "colocated": 1}
            | ({"max_outstanding": 2} if name == bounded else {})
            for name in ("a", "b")
        ]
        out = tmp_path / bounded
        run({"nodes": [{"gpus": 2}], "models": models, "workload": {"path": str(path)}}, out)
        refused = [
            row["model"] for row in rows(out / "requests.csv") if row["status"] == "rejected"
        ]
        assert refused == [bounded], "the last one of each came when nothing else was there"


def test_a_model_scales_to_zero_and_back(tmp_path: Path) -> None:
    tables = fleet()
    path = tmp_path / "w.jsonl"
    lines = [
        {"arrival_time_ns": at * 10**9, "input_toks": 100, "output_toks": 300, "model": "a"}
        for at in (0, 30)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables["workload"] = {"path": str(path)}
    summary = run(tables, tmp_path / "out")
    assert summary["completed"] == 2
    assert sum(summary["models"]["a"]["loads"].values()) == 2
    moves = rows(tmp_path / "out" / "transitions.csv")
    gone = [int(row["time_ns"]) for row in moves if row["to"] == "inactive" and row["from"]]
    assert len(gone) >= 2
    last_ns = int(rows(tmp_path / "out" / "requests.csv")[0]["last_token_ns"])
    assert last_ns + 2e9 <= min(gone) < 30e9  # it was idle since the look before, and went earlier


def test_requests_fail_whose_model_never_finds_gpus(tmp_path: Path) -> None:
    """The run deadlocked: what another model keeps as its minimum is on the GPUs."""
    tables = fleet(nodes=[{"count": 1, "gpus": 4, "host_memory_gib": 200}])
    tables["autoscale"] = {"preset": "serverlessllm"}
    names = ["a", "big", "a", "big"]
    tables["workload"] = {"path": str(write(tmp_path / "w.jsonl", names))}
    summary = run(tables, tmp_path / "out")
    assert (summary["completed"], summary["failed"]) == (2, 2)
    assert summary["reasons"] == {"failed: no_replica_left": 2}


def test_a_pool_that_begins_without_replicas_serves_whole_prompts_first_come(
    tmp_path: Path,
) -> None:
    """fcfs: its replicas, once loaded, have queues of their own, not one that only roles pull."""
    tables = {
        "nodes": [{"count": 1, "gpus": 2}],
        "scheduler": {"policy": "fcfs"},
        "models": [
            {"name": LLAMA, "served_name": "there", "colocated": 1},
            {"name": LLAMA, "served_name": "none"},
        ],
        "autoscale": {"preset": "hpa", "tick_ms": 100.0, "min_replicas": 0, "loader": "host"},
        "limits": {"simulated_s": 100.0},
        "workload": {"path": str(write(tmp_path / "w.jsonl", ["there", "none", "none"]))},
    }
    assert run(tables, tmp_path / "out")["models"]["none"]["completed"] == 2


def test_models_of_static_replicas_need_no_planner(tmp_path: Path) -> None:
    tables = {
        "nodes": [{"gpus": 2}],
        "replicas": [
            {"model": {"name": LLAMA, "served_name": "one"}},
            {"model": {"name": LLAMA, "served_name": "two"}},
        ],
        "workload": {"path": str(write(tmp_path / "w.jsonl", ["two", "two", "one", "three"]))},
    }
    summary = run(tables, tmp_path / "out")
    assert summary["models"]["two"]["completed"] == 2
    assert summary["models"]["one"]["completed"] == 1
    found = rows(tmp_path / "out" / "requests.csv")
    assert [row["instance_id"] for row in found] == ["1", "1", "0", ""]


def test_a_static_preset_deals_all_gpus_out(tmp_path: Path) -> None:
    tables = fleet()
    tables["nodes"][0]["count"] = 4
    tables["models"][0] |= {"prefill": 0, "decode": 0}
    tables["autoscale"] = {"preset": "distserve_full"}
    plan, _ = prepare(config_from_dict(tables), "test")
    gpus = [gpu for replica in plan.replicas for gpu in replica.gpus]
    assert sorted(gpus) == list(range(16))
    for name in plan.models:
        assert {r.role for r in plan.replicas if r.served == name} == {"prefill", "decode"}


def test_quotas_and_objectives_are_the_model_s_own(tmp_path: Path) -> None:
    tables = fleet()
    tables["models"][1] |= {"max_outstanding": 1, "slo": {"ttft_ms": 1.0}}
    path = tmp_path / "w.jsonl"
    lines = [{"arrival_time_ns": 0, "input_toks": 100, "output_toks": 5, "model": "b"}] * 3
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables["workload"] = {"path": str(path)}
    summary = run(tables, tmp_path / "out")
    assert summary["reasons"] == {"rejected: overloaded": 2}
    assert summary["models"]["b"]["slo_attainment"] == 0.0
    assert summary["models"]["a"]["slo_attainment"] is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"replicas": [{"count": 2}]}, "not both"),
        ({"autoscale": {"executor": "none"}}, "no planner ever starts one"),
        ({"migration": {"rebalance": True}}, "migration.rebalance"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        config_from_dict(fleet(**change))


def test_unknown_names_of_models_in_the_workload_are_refused() -> None:
    tables = fleet()
    tables["workload"]["model_shares"]["c"] = 1
    with pytest.raises(InputError, match="no model is served as 'c'"):
        config_from_dict(tables)


def caches(eviction: str, *sizes: int) -> tuple[HostMemory, list[HostCache]]:
    memory = HostMemory({0: 10}, eviction)  # type: ignore[arg-type]
    table = BlitzTable(executor="serverless", loader="cache", host_cache_ttl_s=1e6)
    return memory, [HostCache(table, [0], size, memory=memory) for size in sizes]


def test_a_full_memory_drops_the_copy_that_was_used_longest_ago() -> None:
    _, (one, two, three) = caches("use", 4, 4, 4)
    for at_ns, cache in enumerate((one, two, one, three), start=1):
        cache.loaded(0, at_ns, at_ns)
    assert [cache.holds(0, 9) for cache in (one, two, three)] == [True, False, True]
    assert two.evictions == 1


def test_size_and_use_keep_small_copies_that_are_used_often() -> None:
    _, (small, large, new) = caches("size_use", 2, 8, 2)
    small.loaded(0, 1, 1)
    large.loaded(0, 2, 2)
    new.loaded(0, 3, 3)
    assert [cache.holds(0, 9) for cache in (small, large, new)] == [True, False, True]


def test_what_fits_nowhere_evicts_nothing_and_is_not_kept() -> None:
    _, (one, giant) = caches("use", 4, 11)
    one.loaded(0, 1, 1)
    giant.loaded(0, 2, 2)
    assert [cache.holds(0, 9) for cache in (one, giant)] == [True, False]


def test_pinned_copies_stay() -> None:
    memory = HostMemory({0: 10})
    table = BlitzTable(executor="serverless", loader="cache")
    pinned = HostCache(table, [0], 8, memory=memory, is_pinned=True)
    other = HostCache(table, [0], 4, memory=memory)
    other.loaded(0, 1, 1)
    assert pinned.cached_machines(10**15) == (0,)
    assert not other.holds(0, 2)


def test_shares_deal_requests_out_in_proportion_and_in_runs() -> None:
    naming = Naming(["a", "b"], shares={"a": 3, "b": 1}, run=20, seed=1)
    drawn = [naming.of("") for _ in range(20_000)]
    assert drawn.count(0) / len(drawn) == pytest.approx(0.75, abs=0.05)
    changes = sum(x != y for x, y in itertools.pairwise(drawn))
    assert changes < len(drawn) / 20


def test_without_runs_each_request_draws_its_model_anew() -> None:
    """One number of the stream for each, whatever came before."""
    naming = Naming(["a", "b", "c"], shares={"a": 3, "b": 1, "c": 4}, seed=1)
    points = 8 * rng_stream(1, "workload models").random(500)
    assert [naming.of("") for _ in range(500)] == [(p >= 3) + (p >= 4) for p in points.tolist()]


def test_pooled_copies_are_dealt_to_machines_in_turn_or_to_the_one_with_most_room() -> None:
    table = BlitzTable(executor="serverless", loader="pool")
    free = HostMemory({})
    dealt = [HostCache(table, [0, 1, 2], 4, memory=free) for _ in range(4)]
    free.place_pool()
    assert [cache.home for cache in dealt] == [0, 1, 2, 0]
    limited = HostMemory({0: 5, 1: 12, 2: 9})
    small, large = (HostCache(table, [0, 1, 2], size, memory=limited) for size in (8, 10))
    limited.place_pool()
    assert large.home == 1
    assert small.home == 2
