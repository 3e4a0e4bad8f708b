"""KV in host or CXL memory that is lost: it is not found, and what is being read is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_faults import marks
from tests.cluster.helpers import rows_of, run_config, summary_of
from tests.cluster.test_tiers import CHUNK_BYTES, ask, cluster, node

FIRST_NS = 5_000_000 + 512 * 50_000
"""A prompt of 512 tokens, all of it computed."""
REST_NS = 5_000_000 + 256 * 50_000 + 256 * 1_000
"""Half of it computed, after the half that is recalled."""
LOST = {"cpu": "host_cache_lost", "cxl": "cxl_lost"}


def struck(tmp_path: Path, tier: str, at_s: float, **tables: Any) -> list[dict[str, str]]:
    """Two replicas on a machine each, or `nodes`; the prompt comes at 0 s and again at 5 s."""
    slow = {"cxl_gib": 64, "cxl_gbytes_per_s": 1, "pcie_gbps": 8}  # 1 GB/s: recalls take 34 ms
    fault = {"at_s": at_s, "kind": LOST[tier], "node": tables.pop("node", 0)}
    network = {"tiers": [tier], "tier_shared": True}
    rows = [ask(0, 512, 2), ask(5, 512, 2)]
    base = {"nodes": [node(**slow)], "network": network, "faults": [fault]}
    run_config(tmp_path / "run", **cluster(tmp_path / "w.jsonl", rows, **(base | tables)))
    found = rows_of(tmp_path / "run")
    assert [row["status"] for row in found] == ["completed"] * 2
    return found


@pytest.mark.parametrize("tier", ["cpu", "cxl"])
def test_what_is_lost_is_not_found(tmp_path: Path, tier: str) -> None:
    first, second = struck(tmp_path, tier, 4.0)
    assert int(first["ttft_ns"]) == int(second["ttft_ns"]) == FIRST_NS
    assert second["storage_cache_hit"] == "0"
    assert "kv_recall" not in summary_of(tmp_path / "run")["bytes_moved"]


@pytest.mark.parametrize("tier", ["cpu", "cxl"])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_being_read_is_computed_instead(tmp_path: Path, tier: str, stages: int) -> None:
    replicas = [{"count": 2, "pipeline_parallel": stages}]
    nodes = [node(gpus=2 * stages, cxl_gib=64, cxl_gbytes_per_s=1, pcie_gbps=8)]
    first, second = struck(tmp_path, tier, 5.01, nodes=nodes, replicas=replicas)
    assert int(second["ttft_ns"]) == 10_000_000 + int(first["ttft_ns"])
    hits = [second[key] for key in ("prefix_hit_len", "npu_cache_hit", "storage_cache_hit")]
    assert hits == ["0", "0", "0"]
    assert second["recomputed_toks"] == "256"
    assert [mark["target"] for mark in marks(tmp_path / "run", "recall lost")] == ["replica 1"]


def test_what_has_been_read_stays(tmp_path: Path) -> None:
    _, second = struck(tmp_path, "cxl", 5.04)
    assert int(second["ttft_ns"]) == pytest.approx(CHUNK_BYTES + REST_NS, rel=1e-3)
    assert second["storage_cache_hit"] == "256"


def test_a_pool_is_lost_for_all_who_use_it(tmp_path: Path) -> None:
    """Two machines name the same CXL pool; the fault names the other one."""
    nodes = [node(count=2, gpus=1, cxl_gib=64, cxl_gbytes_per_s=1)]
    _, second = struck(tmp_path, "cxl", 4.0, nodes=nodes, node=1)
    assert second["storage_cache_hit"] == "0"
    _, kept = struck(tmp_path, "cpu", 4.0, nodes=nodes, node=1)
    assert kept["storage_cache_hit"] == "0", "the memory of machine 0 was never shared"


def test_the_memory_of_another_machine_is_not(tmp_path: Path) -> None:
    nodes = [node(count=2, gpus=2)]
    _, second = struck(tmp_path, "cpu", 4.0, nodes=nodes, node=1)
    assert second["storage_cache_hit"] == "256"


def test_the_other_tier_is_not(tmp_path: Path) -> None:
    network = {"tiers": ["cpu", "cxl"], "tier_shared": True}
    _, second = struck(tmp_path, "cxl", 4.0, network=network)
    assert second["storage_cache_hit"] == "256"


def test_without_such_a_tier_there_is_nothing_to_lose(tmp_path: Path) -> None:
    struck(tmp_path, "cxl", 4.0, network={})
    assert summary_of(tmp_path / "run")["faults_missed"] == {"cxl_lost": 1}
