"""LLMServingSim's example runs, from its cluster files and measured layer times.

Ours has no idle clock of 1 ms steps and none of the start-up stagger between GPUs, and it counts
generated tokens in PIM attention. Everything else must agree; `emu/lab/parity/run.py` reproduces the
oddities too.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import load_config
from emu.runs.runner import adjust, execute
from tests.cluster.helpers import rows_of, summary_of
from tests.shared_data import SHARED, needs_shared

pytestmark = needs_shared


def run_example(directory: Path, cluster: str, *keys: str) -> list[dict[str, str]]:
    file = directory / "cluster.toml"
    clusters = SHARED / "llmservingsim-clusters"
    file.write_text(import_cluster(clusters / f"{cluster}.json", SHARED / "profiles"))
    requests = SHARED / "workloads" / "example_trace.jsonl"
    keys = (
        f'workload.path="{requests}"',
        "workload.limit=10",
        "latency.host_overhead=false",
        "output.report=false",
        *keys,
    )
    execute(adjust(load_config(file, keys), seed=None, output=directory / "run"), cluster)
    return rows_of(directory / "run")


def published(name: str) -> dict[str, dict[str, str]]:
    path = SHARED / "llmservingsim-outputs" / f"example_{name}_run.csv"
    with path.open(newline="") as file:
        return {row["request id"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("single_node_single_instance", "single"),
        ("single_node_power_instance", "power"),
        ("single_node_cxl_instance", "cxl"),
        ("single_node_dp_instance", "dp"),
        ("single_node_moe_single_instance", "moe"),
    ],
)
def test_every_request_to_the_nanosecond(tmp_path: Path, cluster: str, name: str) -> None:
    theirs = published(name)
    for row in run_example(tmp_path, cluster):
        other = theirs[row["request_id"]]
        assert (int(row["ttft_ns"]), int(row["latency_ns"]), int(row["last_token_ns"])) == (
            int(other["TTFT"]),
            int(other["latency"]),
            int(other["end_time"]),
        )


@pytest.mark.parametrize(
    ("cluster", "name", "keys", "end_permille", "latency_permille"),
    [
        ("single_node_multi_instance", "multi", (), 0.01, 1),
        (
            "single_node_multi_instance",
            "prefix_cpu_mem_pool",
            ('network.tiers=["cpu"]', "network.tier_shared=true"),
            0.01,
            1,
        ),
        ("single_node_pp_instance", "pp", (), 0.1, 1),
        ("single_node_tp_pp_instance", "tp_pp", (), 0.1, 1),
        ("single_node_pd_instance", "pd", (), 0.1, 1),
        ("single_node_moe_pp_instance", "moe_pp", (), 0.1, 1),
        ("single_node_pim_instance", "pim", ("latency.attention_offload=true",), 1, 40),
        (
            "single_node_pim_instance",
            "pim_sub_batch",
            ("latency.attention_offload=true", "latency.sub_batch_interleaving=true"),
            0.5,
            3,
        ),
    ],
)
def test_near_where_oddities_were_left_out(
    tmp_path: Path,
    cluster: str,
    name: str,
    keys: tuple[str, ...],
    end_permille: float,
    latency_permille: float,
) -> None:
    theirs = published(name)
    rows = run_example(tmp_path, cluster, *keys)
    end, their_end = (
        max(int(row[key]) for row in found)
        for found, key in ((rows, "last_token_ns"), (theirs.values(), "end_time"))
    )
    assert end == pytest.approx(their_end, rel=end_permille / 1000)
    for row in rows:
        latency = int(theirs[row["request_id"]]["latency"])
        assert int(row["latency_ns"]) == pytest.approx(latency, rel=latency_permille / 1000)


CLUSTERS = sorted(
    path.stem
    for path in (SHARED / "llmservingsim-clusters").glob("*.json")
    if "moe" in path.stem or path.stem in ("single_node_dp_instance", "single_node_tp_pp_instance")
)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_parallel_clusters_complete_everything(tmp_path: Path, cluster: str) -> None:
    """DP, EP, TP and PP in all combinations that the files have, no member left waiting."""
    run_example(tmp_path, cluster)
    assert summary_of(tmp_path / "run")["completed"] == 10


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B-Instruct-2507"])
@pytest.mark.parametrize("members", [1, 2])
def test_bundles_of_both_qwen_models(
    tmp_path: Path, model: str, tensor: int, pipeline: int, members: int
) -> None:
    experts = members * tensor if "A3B" in model else 0
    replicas = (
        f"replicas=[{{count={members}, tensor_parallel={tensor}, pipeline_parallel={pipeline}, "
        f'expert_parallel={experts}, data_parallel_group="A"}}]'
    )
    cluster = "single_node_moe_dp_tp_pp_instance"
    rows = run_example(tmp_path, cluster, f'model.name="{model}"', replicas)
    assert [row["status"] for row in rows] == ["completed"] * 10
