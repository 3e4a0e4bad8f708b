"""KV tiers in a whole cluster: recalls take time on links, chunks are shared, books are written."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from emu.errors import InputError
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

CHUNK_BYTES = 256 * 131_072
"""256 tokens of Llama-3.1-8B in half precision."""


def node(**keys: Any) -> dict[str, Any]:
    return {"gpus": 2, "pcie_gbps": 80, "host_memory_gbytes_per_s": 256, **keys}


def cluster(path: Path, rows: list[dict[str, Any]], **tables: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "nodes": [node()],
        "replicas": [{"count": 2}],
        "router": {"policy": "round_robin"},
        "latency": LINEAR,
        "network": {"tiers": ["cpu"], "tier_shared": True},
        "workload": {"path": workload(path, rows)},
    }
    content.update(tables)
    return content


def ask(at_s: float, prompt: int, output: int, first: int = 0) -> dict[str, Any]:
    return {
        "input_toks": prompt,
        "output_toks": output,
        "arrival_time_ns": round(at_s * 1e9),
        "input_tok_ids": list(range(first, first + prompt)),
        "output_tok_ids": list(range(900_000, 900_000 + output)),
    }


def test_recall_from_a_shared_tier_takes_the_time_of_its_links(tmp_path: Path) -> None:
    tables = cluster(tmp_path / "w.jsonl", [ask(0, 512, 2), ask(5, 512, 2)])
    run_config(tmp_path / "run", **tables)
    first, second = rows_of(tmp_path / "run")
    assert int(first["ttft_ns"]) == 5_000_000 + 512 * 50_000
    # One chunk is found (a token is always left to compute); PCIe carries 10 GB/s.
    recall_ns = -(-CHUNK_BYTES // 10)
    rest_ns = 5_000_000 + 256 * 50_000 + 256 * 1_000
    assert int(second["ttft_ns"]) == recall_ns + rest_ns
    hits = [second[key] for key in ("prefix_hit_len", "npu_cache_hit", "storage_cache_hit")]
    assert hits == ["256", "0", "256"]
    moved = summary_of(tmp_path / "run")["bytes_moved"]
    # Both chunks were written once, by the first; the second found them there.
    assert moved == {"kv_recall": CHUNK_BYTES, "kv_offload": 2 * CHUNK_BYTES}


def test_recalls_of_two_replicas_share_the_host(tmp_path: Path) -> None:
    """Host memory of 10 GB/s serves two GPUs whose links could carry as much each."""
    rows = [ask(0, 512, 2), ask(0, 300, 2, first=5000), ask(5, 512, 2), ask(5, 512, 2)]
    nodes = [{**node(), "gpus": 4, "host_memory_gbytes_per_s": 10}]
    tables = cluster(
        tmp_path / "w.jsonl", rows, nodes=nodes, replicas=[{"count": 4, "tensor_parallel": 1}]
    )
    run_config(tmp_path / "run", **tables)
    compute_ns = 5_000_000 + 256 * 50_000 + 256 * 1_000
    for row in rows_of(tmp_path / "run")[2:]:
        assert int(row["ttft_ns"]) == pytest.approx(2 * CHUNK_BYTES / 10 + compute_ns, abs=2)


def test_tensor_parallel_ranks_recall_their_parts_side_by_side(tmp_path: Path) -> None:
    tables = cluster(
        tmp_path / "w.jsonl",
        [ask(0, 512, 2), ask(5, 512, 2)],
        nodes=[{**node(), "gpus": 4}],
        replicas=[{"count": 2, "tensor_parallel": 2}],
    )
    run_config(tmp_path / "run", **tables)
    compute_ns = 5_000_000 + 256 * 50_000 + 256 * 1_000
    ttft_ns = int(rows_of(tmp_path / "run")[1]["ttft_ns"])
    assert ttft_ns == pytest.approx(CHUNK_BYTES / 20 + compute_ns, abs=2)


def test_cxl_has_its_own_rate_and_latency(tmp_path: Path) -> None:
    nodes = [node(cxl_gib=64, cxl_gbytes_per_s=2, cxl_devices=2, cxl_latency_ns=700)]
    tables = cluster(
        tmp_path / "w.jsonl",
        [ask(0, 512, 2), ask(5, 512, 2)],
        nodes=nodes,
        network={"tiers": ["cxl"], "tier_shared": True},
    )
    run_config(tmp_path / "run", **tables)
    compute_ns = 5_000_000 + 256 * 50_000 + 256 * 1_000
    ttft_ns = int(rows_of(tmp_path / "run")[1]["ttft_ns"])
    assert ttft_ns == pytest.approx(CHUNK_BYTES / 4 + 700 + compute_ns, abs=2)


def test_private_tiers_are_not_seen_by_others(tmp_path: Path) -> None:
    tables = cluster(
        tmp_path / "w.jsonl", [ask(0, 512, 2), ask(5, 512, 2)], network={"tiers": ["cpu"]}
    )
    run_config(tmp_path / "run", **tables)
    assert [row["prefix_hit_len"] for row in rows_of(tmp_path / "run")] == ["0", "0"]


def test_gpu_pool_is_asked_before_the_tier(tmp_path: Path) -> None:
    """42 blocks on the GPU: a third prompt pushes the first one out, the tier still has it."""
    rows = [ask(0, 512, 2), ask(5, 512, 2), ask(10, 660, 2, first=7000), ask(15, 512, 2)]
    tables = cluster(
        tmp_path / "w.jsonl", rows, replicas=[{"count": 1}], scheduler={"num_blocks": 42}
    )
    run_config(tmp_path / "run", **tables)
    hits = [(r["npu_cache_hit"], r["storage_cache_hit"]) for r in rows_of(tmp_path / "run")]
    assert hits == [("0", "0"), ("496", "0"), ("0", "0"), ("0", "256")]


def test_a_tier_below_the_first_one_is_asked_next(tmp_path: Path) -> None:
    """Host memory for one chunk, CXL for many: what host memory forgets, CXL still has."""
    rows = [ask(0, 520, 2), ask(5, 560, 2, first=7000), ask(10, 520, 2)]
    nodes = [node(cxl_gib=64, cxl_gbytes_per_s=2, cxl_latency_ns=0)]
    tables = cluster(
        tmp_path / "w.jsonl",
        rows,
        nodes=nodes,
        replicas=[{"count": 1}],
        scheduler={"num_blocks": 36},
        network={"tiers": ["cpu", "cxl"], "cpu_tier_gib": CHUNK_BYTES / 2**30},
    )
    run_config(tmp_path / "run", **tables)
    last = rows_of(tmp_path / "run")[2]
    assert last["storage_cache_hit"] == "512"
    compute_ns = 5_000_000 + 8 * 50_000 + 512 * 1_000
    assert int(last["ttft_ns"]) == pytest.approx(2 * CHUNK_BYTES / 2 + compute_ns, abs=2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", ["round_robin", "prefix_aware", "load"])
@pytest.mark.parametrize("stages", [1, 2])
def test_leaps_give_the_same_files(tmp_path: Path, shared: bool, policy: str, stages: int) -> None:
    rows = [
        ask(0.11 * i, 300 + 37 * (i % 7), 40 + 61 * (i % 5), first=1000 * (i % 6))
        for i in range(40)
    ]
    for leap in (True, False):
        tables = cluster(
            tmp_path / "w.jsonl",
            rows,
            nodes=[node(host_memory_gbytes_per_s=12, gpus=4)],
            replicas=[{"count": 2, "pipeline_parallel": stages}],
            router={"policy": policy},
            network={"tiers": ["cpu"], "tier_shared": shared, "cpu_tier_gib": 0.5},
            scheduler={"leap": leap, "num_blocks": 60},
        )
        run_config(tmp_path / str(leap), **tables)
    for name in ("requests.csv", "summary.json", "timeseries.csv"):
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes()
    hits = summary_of(tmp_path / "True")["prefix_hit_tokens"]
    assert hits["npu"] > 0
    assert hits["storage"] > 0


def test_prefix_aware_router_sends_a_session_back_to_its_cache(tmp_path: Path) -> None:
    """Turns of four conversations: with affinity every later turn finds what came before."""
    rows = []
    for turn, talk in itertools.product(range(3), range(4)):
        request = ask(3 * turn + 0.5 * talk, 320 + 160 * turn, 16, first=10_000 * talk)
        rows.append(request)
    found = {}
    for policy in ("random", "prefix_aware"):
        tables = cluster(
            tmp_path / "w.jsonl",
            rows,
            nodes=[node(gpus=4)],
            replicas=[{"count": 4}],
            router={"policy": policy},
            network={},
        )
        run_config(tmp_path / policy, **tables)
        found[policy] = summary_of(tmp_path / policy)["prefix_hit_tokens"]["npu"]
    assert found["prefix_aware"] == 4 * (320 + 480)
    assert found["random"] < found["prefix_aware"]


def test_different_models_cannot_share_a_tier(tmp_path: Path) -> None:
    tables = cluster(
        tmp_path / "w.jsonl",
        [ask(0, 512, 2)],
        replicas=[{"count": 1}, {"count": 1, "scheduler": {"block_size": 32}}],
    )
    with pytest.raises(
        InputError,
        match=r"network\.tier_shared: replicas 0 and 1 share a tier but differ in block_size",
    ):
        run_config(tmp_path / "run", **tables)
