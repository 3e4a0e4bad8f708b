"""Models with states in roles, pipelines, live migration and tiers: what moves, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emu.catalogue import sizes
from emu.catalogue.lookup import list_models, lookup_model
from emu.cluster.plan import make_plan
from emu.cluster.state_slots import has_states
from emu.config.load import config_from_dict
from emu.kv.groups import kv_layout
from tests.cluster.helpers import rows_of, run_config, summary_of

NAME = "Qwen/Qwen3-Next-80B-A3B-Instruct"
CONFIGS = Path(__file__).parents[1] / "catalogue" / "configs"
STATES = [name for name in list_models() if has_states(lookup_model(name))]
PUBLISHED = [
    *("Bamba-9B-v2", "Falcon-H1-34B-Base", "Granite-4.0-H-Small", "Jamba-v0.1"),
    *("Kimi-Linear-48B-A3B-Instruct", "MiniMax-Text-01", "Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B"),
    *("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-3-Super-120B-A12B-FP8"),
]
"""Configurations of checkpoints that the catalogue has no name for."""
TABLES: dict[str, Any] = {
    "model": {"name": NAME, "max_model_tokens": 8192},
    "nodes": [{"gpu": "H200-SXM-141GB", "gpus": 8}],
    "workload": {
        "synthetic": {
            "requests": 20,
            "arrivals": {"process": "poisson", "rate_per_s": 20.0},
            "prompt": {"median": 500.0, "max": 2000},
            "output": {"median": 60.0, "max": 200},
        }
    },
}
SPLIT = [
    {"role": "prefill", "tensor_parallel": 2},
    {"role": "decode", "count": 3, "tensor_parallel": 2},
]
REBALANCED = {"rebalance": True, "rebalance_gap": 0.001, "rebalance_period_ms": 50.0}
SHAPES: dict[str, dict[str, Any]] = {
    "roles": {"replicas": SPLIT},
    "roles of a pipeline": {
        "replicas": [{"role": "prefill", "pipeline_parallel": 2}, SPLIT[1] | {"count": 1}]
    },
    "groups": {
        "replicas": [
            {"role": role, "count": 2, "expert_parallel": 2, "data_parallel_group": role}
            for role in ("prefill", "decode")
        ]
    },
    "pipeline": {"replicas": [{"pipeline_parallel": 2, "count": 2}]},
    "live migration": {"replicas": SPLIT, "migration": REBALANCED},
}


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_leaps_do_not_show(tmp_path: Path, shape: str, caches: bool) -> None:
    tables = {**TABLES, **SHAPES[shape]}
    for leap in (True, False):
        scheduler = {"prefix_caching": caches, "leap": leap}
        run_config(tmp_path / str(leap), **tables, scheduler=scheduler)
    assert rows_of(tmp_path / "True") == rows_of(tmp_path / "False")
    assert summary_of(tmp_path / "True")["completed"] == 20


def test_a_hand_over_moves_whole_pages_and_one_state(tmp_path: Path) -> None:
    run_config(tmp_path, **TABLES, replicas=SPLIT)
    model = lookup_model(NAME)
    layout = kv_layout(model, "bfloat16", tp=2)
    page = layout.block_tokens
    token = sizes.kv_bytes_per_token(model, "bfloat16")
    state = sizes.state_bytes(model)
    # large-moe: 39.5 MB in bf16, worth 1,608 tokens of KV.
    assert state == 39_518_208
    assert token == 24_576
    moved = [row for row in rows_of(tmp_path) if row["migrations"] != "0"]
    pages = sum(-(-(int(row["prompt_toks"]) + 1) // page) for row in moved)
    assert summary_of(tmp_path)["bytes_moved"]["kv"] == pages * page * token + len(moved) * state


def test_a_live_move_brings_the_states_once(tmp_path: Path) -> None:
    run_config(tmp_path / "still", **TABLES, replicas=SPLIT)
    run_config(tmp_path / "moves", **TABLES, **SHAPES["live migration"])
    still, moves = (summary_of(tmp_path / one) for one in ("still", "moves"))
    more = moves["bytes_moved"]["kv"] - still["bytes_moved"]["kv"]
    state = sizes.state_bytes(lookup_model(NAME))
    page = kv_layout(lookup_model(NAME), "bfloat16", tp=2).block_tokens * 24_576
    counts = [int(row["migrations"]) for row in rows_of(tmp_path / "moves")]
    lives = sum(count - 1 for count in counts if count)
    assert lives > 0
    assert more >= lives * (state + page)
    assert (more - lives * state) % page == 0


@pytest.mark.parametrize("name", [*STATES, *PUBLISHED])
def test_each_hybrid_goes_everywhere(name: str) -> None:
    model = {"hf_config": str(CONFIGS / f"{name}.json")} if name in PUBLISHED else {"name": name}
    ranks = {"tensor_parallel": 8 if name in ("MiniMax-Text-01", "Qwen3.5-397B-A17B") else 4}
    shapes: list[list[dict[str, Any]]] = [
        [{"role": "prefill", **ranks}, {"role": "decode", **ranks}],
        [{"count": 2, "data_parallel_group": "a", **ranks}],
        [{"pipeline_parallel": 2, **ranks}],
    ]
    for replicas in shapes:
        config = config_from_dict(
            {
                "model": {**model, "max_model_tokens": 4096},
                "nodes": [{"gpu": "GB200", "gpus": 16}],
                "replicas": replicas,
            }
        )
        for replica in make_plan(config, "test").replicas:
            assert replica.kv_layout is not None
            states = [layer.state for layer in replica.model.special_layers if layer.state]
            own = sum(
                one.state_bytes(2, 4 if one.state_dtype == "float32" else 2) for one in states
            )
            assert replica.state_bytes == own > 0


def test_a_rank_of_a_pipeline_has_pages_for_its_own_layers() -> None:
    model = lookup_model(NAME)
    one, two = (kv_layout(model, "bfloat16", stages=stages) for stages in (1, 2))
    assert [group.keeps for group in one.groups] == [group.keeps for group in two.groups]
    assert one.block_bytes == 2 * two.block_bytes  # 48 layers, each kind at even distances


def turns(path: Path) -> str:
    """Eight conversations of six turns: each turn repeats what came before it."""
    lines = [
        {
            "arrival_time_ns": (turn * 8 + one) * 60_000_000,
            "input_toks": 600 + 400 * turn + 37 * one,
            "output_toks": 5,
            "input_tok_ids": [one * 100_000 + at for at in range(600 + 400 * turn + 37 * one)],
        }
        for turn in range(6)
        for one in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def with_tiers(tmp_path: Path, tiers: list[str]) -> list[dict[str, str]]:
    """A pool that holds two or three of the conversations."""
    run_config(
        tmp_path / "out",
        model={"name": "LiquidAI/LFM2-2.6B", "max_model_tokens": 8192},
        nodes=[{"gpu": "H100-SXM5-80GB", "gpus": 1, "host_memory_gib": 64.0}],
        scheduler={"num_blocks": 600},
        network={"tiers": tiers},
        workload={"path": turns(tmp_path / "w.jsonl")},
    )
    return rows_of(tmp_path / "out")


def test_a_tier_brings_back_kv_and_the_state_at_its_end(tmp_path: Path) -> None:
    assert {row["storage_cache_hit"] for row in with_tiers(tmp_path, [])} == {"0"}
    rows = with_tiers(tmp_path, ["cpu"])
    hits = [int(row["storage_cache_hit"]) for row in rows if row["storage_cache_hit"] != "0"]
    assert len(hits) > 30
    model = lookup_model("LiquidAI/LFM2-2.6B")
    page = kv_layout(model, "bfloat16").block_tokens
    assert all(hit % page == 0 for hit in hits)
    moved = summary_of(tmp_path / "out")["bytes_moved"]
    token = sizes.kv_bytes_per_token(model, "bfloat16")
    assert moved["kv_recall"] == sum(hits) * token + len(hits) * sizes.state_bytes(model)
    # A state goes down only where a step ended: fewer than blocks of KV.
    blocks = sum((int(row["prompt_toks"]) + 4) // page for row in rows)
    assert moved["kv_offload"] < blocks * (page * token + sizes.state_bytes(model))
