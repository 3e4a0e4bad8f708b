"""Energy by part, against a run worked out by hand and the published one; expert loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.power import fitted, left_out_errors, read_loads
from emu.catalogue.lookup import lookup_gpu
from emu.cluster.energy import exchange_bytes_per_token
from emu.cluster.gpu_power import ARITHMETIC_PART, RUNNING_PART, running_w
from emu.config.load import config_from_dict
from emu.runs.runner import prepare
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload
from tests.cluster.test_published_examples import run_example
from tests.shared_data import SHARED, needs_shared

POWER = {
    "base_node_w": 60,
    "gpu_idle_w": 35,
    "gpu_standby_w": 300,
    "gpu_active_w": 600,
    "gpu_standby_s": 0.5,
    "cpu_idle_w": 10,
    "cpu_active_w": 200,
    "cpu_utilization": 0.15,
    "dram_idle_w_per_dimm": 2,
    "dram_dimm_gib": 32,
    "dram_pj_per_bit": 6,
    "link_idle_w": 5,
    "links": 1,
    "link_pj_per_bit": 4,
    "nic_idle_w": 20,
    "nics": 1,
    "storage_idle_w": 5,
    "storage_devices": 2,
}


def cluster(path: Path, rows: list[dict[str, Any]], **tables: Any) -> dict[str, Any]:
    return {
        "nodes": [{"gpus": 2, "host_memory_gib": 512}],
        "latency": LINEAR,
        "power": POWER,
        "workload": {"path": workload(path, rows)},
        **tables,
    }


def ask(at_s: float, prompt: int, output: int) -> dict[str, Any]:
    return {"input_toks": prompt, "output_toks": output, "arrival_time_ns": round(at_s * 1e9)}


@pytest.mark.parametrize("leap", [True, False])
def test_energy_by_hand(tmp_path: Path, leap: bool) -> None:
    """One of two GPUs runs 15 ms at 1 s (100 tokens, then one) and 15 ms at 3 s."""
    tables = cluster(
        tmp_path / "w.jsonl",
        [ask(1, 100, 2), ask(3, 100, 2)],
        scheduler={"leap": leap},
        replicas=[{"count": 1, "gpus": [0]}],
    )
    run_config(tmp_path / "run", **tables)
    busy_s = 2 * (0.010 + 0.005 + 0.000050 + 0.0001)
    end_s = 3 + busy_s / 2
    found = summary_of(tmp_path / "run")["energy_j"]
    assert found == pytest.approx(
        {
            "base": 60 * end_s,
            # Two idle GPUs; one is active, and once on standby for half a second.
            "gpu": 2 * 35 * end_s + 565 * busy_s + 265 * 0.5,
            "cpu": (10 + 190 * 0.15) * end_s + 190 * 0.55 * busy_s,
            "memory": 16 * 2 * end_s,
            "link": 5 * end_s,
            "nic": 20 * end_s,
            "storage": 10 * end_s,
        },
        abs=1e-5,
    )


def test_gpus_of_unmeasured_power_are_warned_about() -> None:
    measured = {"nodes": [{"gpu": "B200"}], "power": {}}
    for tables, count in (
        ({"power": {}}, 1),
        ({"power": {"gpu_active_w": 300}}, 0),
        (measured, 0),
    ):
        _, workload = prepare(config_from_dict(tables), "test")
        assert len(workload.notes.warnings) == count
    _, workload = prepare(config_from_dict({"power": {}}), "test")
    assert "A100-SXM4-80GB is unmeasured" in workload.notes.warnings[0]
    assert "its 400 W" in workload.notes.warnings[0]


def test_a_gpu_draws_by_its_load(tmp_path: Path) -> None:
    """A prompt of 1,000 tokens and one decode after it, 15 ms each, on one of two GPUs."""
    tables = cluster(
        tmp_path / "w.jsonl",
        [ask(0, 1000, 2)],
        nodes=[{"gpus": 2, "gpu": "B200"}],
        replicas=[{"count": 1, "gpus": [0]}],
        power={},
    )
    run_config(tmp_path / "run", **tables)
    summary = summary_of(tmp_path / "run")
    gpu, busy_s = lookup_gpu("B200"), summary["simulated_s"]
    done = summary["mfu"]["prompt_tflop"] + summary["mfu"]["output_tflop"]
    part = done / (gpu.tflops_fp16 * busy_s)
    due = gpu.idle_w * busy_s + running_w(gpu, part, gpu.idle_w) * busy_s
    assert summary["energy_j"]["gpu"] == pytest.approx(due, rel=1e-3)
    assert running_w(gpu, 0.0, gpu.idle_w) == pytest.approx(346, abs=1)
    assert running_w(gpu, 0.7, gpu.idle_w) == gpu.tdp_w, "a long prompt takes all that there is"


def test_energy_by_load_counts_every_token_once(tmp_path: Path) -> None:
    """Leaps, chunks and pipelines meter the same arithmetic as single steps."""
    found = []
    for number, changes in enumerate(({"leap": True}, {"leap": False})):
        tables = cluster(
            tmp_path / "w.jsonl",
            [ask(0, 3000, 40), ask(0.01, 500, 60)],
            scheduler={"max_num_batched_tokens": 512, **changes},
            power={},
        )
        run_config(tmp_path / f"run{number}", **tables)
        found.append(summary_of(tmp_path / f"run{number}")["energy_j"]["gpu"])
    assert found[0] == found[1]


@needs_shared
@pytest.mark.slow
def test_power_by_load_is_within_a_tenth_of_what_was_measured() -> None:
    """Eight B200 under nine loads of two models, each left out of the fit in turn."""
    loads = read_loads(SHARED / "silicon" / "b200-power.csv")
    assert len(loads) == 9
    assert max(abs(error) for error in left_out_errors(loads)) < 10
    idle_w, running_w, arithmetic_w = fitted(loads)
    gpu = lookup_gpu("B200")
    assert gpu.idle_w == pytest.approx(idle_w, rel=0.1)
    span_w = gpu.tdp_w - idle_w
    assert pytest.approx(running_w / span_w, rel=0.1) == RUNNING_PART
    assert pytest.approx(arithmetic_w / span_w, rel=0.1) == ARITHMETIC_PART


def test_exchanges_and_loads_cost_energy(tmp_path: Path) -> None:
    """103 tokens over two ranks of Llama-3.1-8B: 64 all-reduces of 2 x 1/2 x 8,192 B each."""
    rows = [ask(0, 100, 4)]
    replicas = [
        {
            "tensor_parallel": 2,
            "placement": {"tensors": {"o_proj": "cpu"}},
        }
    ]
    tables = cluster(tmp_path / "w.jsonl", rows, replicas=replicas)
    run_config(tmp_path / "run", **tables)
    end_s = int(rows_of(tmp_path / "run")[0]["last_token_ns"]) / 1e9
    found = summary_of(tmp_path / "run")["energy_j"]
    assert found["link"] == pytest.approx(5 * end_s + 103 * 64 * 8192 * 8 * 4e-12, abs=1e-5)
    loaded = 4 * 32 * 4096 * 4096 * 2  # four iterations
    assert found["memory"] == pytest.approx(32 * end_s + loaded * 8 * 6e-12, abs=1e-5)


@pytest.mark.parametrize(
    ("model", "replica", "per_token"),
    [
        # 32 layers of 4,096 elements of two bytes: two all-reduces each, of 2 x 3/4 of that; and
        # the way to the next of two stages.
        (
            "meta-llama/Llama-3.1-8B",
            {"tensor_parallel": 4, "pipeline_parallel": 2},
            64 * 2 * 3 / 4 * 8192 + 8192,
        ),
        ("meta-llama/Llama-3.1-8B", {"pipeline_parallel": 3}, 2 * 8192),
        # 48 layers of experts and 2,048 elements: one all-reduce each; three of four tokens are
        # another rank's, go there with the scores of 128 experts in four parts, and come back.
        (
            "Qwen/Qwen3-30B-A3B-Instruct-2507",
            {"tensor_parallel": 4, "expert_parallel": 4},
            48 * 2 * 3 / 4 * 4096 + 48 * 3 / 4 * ((4096 + 256) / 4 + 4096),
        ),
    ],
)
def test_bytes_between_ranks_for_a_token(
    model: str, replica: dict[str, Any], per_token: float
) -> None:
    tables = {
        "model": {"name": model},
        "nodes": [{"gpus": 8, "gpu": "H100-SXM5-80GB"}],
        "replicas": [replica],
    }
    plan, _ = prepare(config_from_dict(tables), "test")
    assert exchange_bytes_per_token(plan.replicas[0]) == pytest.approx(per_token, rel=1e-12)


def test_attention_in_memory_costs_energy_there(tmp_path: Path) -> None:
    """Three decodes after a prompt of 100, in 256 channels of LPDDR5."""
    node = {"gpus": 1, "host_memory_gib": 512, "pim": "LPDDR5_2GB_6400"}
    tables = cluster(tmp_path / "w.jsonl", [ask(0, 100, 4)], nodes=[node])
    tables["latency"] = {"attention_offload": True, "front_end": False}
    tables["power"] = POWER | {"dram_pj_per_bit": 6e4}
    run_config(tmp_path / "run", **tables)
    end_s = int(rows_of(tmp_path / "run")[0]["last_token_ns"]) / 1e9
    # Of Llama-3.1-8B: 32 layers, 32 query heads and 8 of keys, 128 elements of two bytes each.
    work_s = 32 * sum(282.4338 * context + 15996.7018 for context in (100, 101, 102)) / 1e9
    moved = 3 * 32 * (2 * 32 + 2 * 8) * 128 * 2
    expected = 256 * 0.071 * end_s + (0.877 - 0.071) * work_s + moved * 8 * 6e4 * 1e-12
    assert summary_of(tmp_path / "run")["energy_j"]["memory"] == pytest.approx(expected, abs=1e-5)


@needs_shared
def test_published_run(tmp_path: Path) -> None:
    run_example(tmp_path, "single_node_power_instance")
    found = summary_of(tmp_path / "run")["energy_j"]
    assert {part: round(joule, 2) for part, joule in found.items()} == {
        "base": 99.84,
        "gpu": 971.88,
        "cpu": 233.05,
        "memory": 53.25,
        "link": 8.32,
        "nic": 33.28,
        "storage": 16.64,
    }
    assert sum(found.values()) == pytest.approx(1420, rel=0.005)


@needs_shared
@pytest.mark.parametrize("gate", ["balanced", "round_robin", "random", "skewed"])
def test_loads_of_experts_are_written(tmp_path: Path, gate: str) -> None:
    run_example(tmp_path, "single_node_moe_single_instance", f'latency.expert_routing="{gate}"')
    if gate == "balanced":
        assert not (tmp_path / "run" / "experts.csv").exists()
        return
    rows = rows_of(tmp_path / "run", "experts.csv")
    assert len(rows) == 128
    # 120 prompt tokens, 591 output tokens of which 10 came with the prompts; 8 experts each.
    assert sum(int(row["tokens"]) for row in rows) == 8 * (120 + 591 - 10)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-4)


def test_loads_of_experts_are_written_without_a_profile(tmp_path: Path) -> None:
    """The roofline knows where a gate sends tokens, too."""
    tables: dict[str, Any] = {
        "nodes": [{"gpus": 2, "gpu": "H100-SXM5-80GB"}],
        "model": {"name": "mistralai/Mixtral-8x7B-v0.1"},
        "replicas": [{"tensor_parallel": 2, "expert_parallel": 2}],
        "latency": {"expert_routing": "skewed"},
        "workload": {"path": workload(tmp_path / "w.jsonl", [ask(0, 100, 3), ask(1, 100, 3)])},
    }
    run_config(tmp_path / "run", **tables)
    rows = rows_of(tmp_path / "run", "experts.csv")
    # 2 experts of each of 200 prompt tokens and 2 x 2 output tokens behind the first.
    assert len(rows) == 8 and sum(int(row["tokens"]) for row in rows) == 2 * (200 + 4)
    assert max(int(row["tokens"]) for row in rows) > 2 * min(int(row["tokens"]) for row in rows)


def test_cost_is_the_gpu_time_at_each_machines_price(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "nodes": [{"gpus": 2, "hourly_price": 3.6}, {"gpus": 2, "hourly_price": 36.0}],
        "latency": LINEAR,
        "workload": {"path": workload(tmp_path / "w.jsonl", [ask(0, 100, 2), ask(1, 100, 2)])},
        "replicas": [{"tensor_parallel": 2}, {"count": 1, "gpus": [2]}],
    }
    run_config(tmp_path / "run", **tables)
    summary = summary_of(tmp_path / "run")
    each_s = summary["simulated_s"]
    assert summary["cost"] == pytest.approx(each_s * (2 * 0.001 + 1 * 0.01), abs=1e-6)
    del tables["nodes"][0]["hourly_price"], tables["nodes"][1]["hourly_price"]
    run_config(tmp_path / "free", **tables)
    assert summary_of(tmp_path / "free")["cost"] is None


@pytest.mark.slow
def test_loads_of_experts_are_written_whatever_the_back_end(tmp_path: Path) -> None:
    """Also by the roofline: two of eight experts for every token of a forward pass."""
    rows = [ask(0.1 * index, 100 + index, 5) for index in range(6)]
    tables = {
        "model": {"name": "mistralai/Mixtral-8x7B-Instruct-v0.1"},
        "nodes": [{"gpus": 4, "gpu": "H100"}],
        "replicas": [{"tensor_parallel": 4, "expert_parallel": 4}],
        "latency": {"expert_routing": "skewed"},
        "workload": {"path": workload(tmp_path / "w.jsonl", rows)},
    }
    run_config(tmp_path / "run", **tables)
    found = rows_of(tmp_path / "run", "experts.csv")
    passed = sum(row["input_toks"] + row["output_toks"] - 1 for row in rows)
    assert len(found) == 8
    assert sum(int(row["tokens"]) for row in found) == 2 * passed
