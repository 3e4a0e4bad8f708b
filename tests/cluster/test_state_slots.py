"""States beside a KV pool: what SGLang and TensorRT-LLM set aside, and what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.catalogue import sizes
from emu.catalogue.lookup import lookup_model
from emu.cluster.plan import ReplicaPlan, make_plan
from emu.cluster.state_slots import has_states, with_states_of
from emu.config.load import config_from_dict
from emu.config.schema import SglangTable
from emu.errors import InputError
from emu.runs.validate import facts
from tests.cluster.helpers import rows_of, run_config, summary_of

QWEN, LFM2 = "Qwen/Qwen3-Next-80B-A3B-Instruct", "LiquidAI/LFM2-2.6B"
NEMOTRON = "nvidia/Nemotron-H-8B-Base-8K"
SGLANG = {"policy": "sglang", "disable_radix_cache": True}
TENSORRT = {"policy": "tensorrt-llm", "enable_block_reuse": False}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "acceptance_rate": 0.7}


def tables(name: str, scheduler: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One replica on two H200."""
    return {
        "model": {"name": name, "max_model_tokens": 8192},
        "engine": {"name": scheduler["policy"]},
        "scheduler": scheduler,
        "nodes": [{"gpu": "H200-SXM-141GB", "gpus": 8}],
        "replicas": [{"tensor_parallel": 2}],
        **more,
    }


def plan(name: str, scheduler: dict[str, Any], **more: Any) -> ReplicaPlan:
    """The replica."""
    return make_plan(config_from_dict(tables(name, scheduler, **more)), "t").replicas[0]


def test_sglang_gives_states_a_part_of_what_kv_has() -> None:
    found = plan(QWEN, SGLANG)
    # Three quarters of the layers have states of 2 MiB in 32 bits, and a convolution in 16.
    assert found.state_bytes == sizes.state_bytes(found.model) == 77_266_944
    states = found.scheduler.requests_max * found.state_bytes / 2
    assert states / found.memory.kv_bytes_rank == pytest.approx(0.9, rel=0.003)  # whole states
    twice = plan(QWEN, SGLANG | {"mamba_full_memory_ratio": 1.8})
    assert twice.scheduler.requests_max > found.scheduler.requests_max
    assert twice.num_blocks < found.num_blocks


def test_a_third_of_the_states_may_run_beside_a_tree_of_them() -> None:
    found = plan(QWEN, {"policy": "sglang"})
    table = found.scheduler
    assert isinstance(table, SglangTable)
    assert table.requests_max == table.max_mamba_cache_size // 3
    assert (table.block_size, found.schedules_ahead) == (1, False)
    assert table.max_mamba_cache_size == plan(QWEN, SGLANG).scheduler.requests_max, "by the ratio"
    told = plan(QWEN, {"policy": "sglang", "max_running_requests": 4}).scheduler
    assert isinstance(told, SglangTable)
    assert told.requests_max == 4
    assert told.max_mamba_cache_size == table.max_mamba_cache_size


@pytest.mark.parametrize("key", ["max_running_requests", "max_mamba_cache_size"])
def test_sglang_has_as_many_states_as_it_is_told(key: str) -> None:
    found, by_ratio = plan(QWEN, SGLANG | {key: 64}), plan(QWEN, SGLANG)
    assert found.scheduler.requests_max == 64
    fewer = (by_ratio.scheduler.requests_max - 64) * found.state_bytes // 2
    more = found.memory.kv_bytes_rank - by_ratio.memory.kv_bytes_rank
    assert more == fewer


def test_states_are_as_wide_as_sglang_is_told() -> None:
    narrow = plan(QWEN, SGLANG | {"mamba_ssm_dtype": "bfloat16"})
    assert narrow.state_bytes == 39_518_208  # as vLLM's
    assert plan(QWEN, {"policy": "vllm"}).state_bytes == 39_518_208
    assert plan(NEMOTRON, SGLANG).state_bytes == sizes.state_bytes(lookup_model(NEMOTRON))


def test_tensorrt_llm_sets_a_state_aside_for_each_place_and_one_more() -> None:
    few, many = (plan(QWEN, TENSORRT | {"max_batch_size": size}) for size in (63, 127))
    assert few.state_bytes == 39_518_208
    # Its part for KV is one of what is left.
    lost = few.memory.kv_bytes_rank - many.memory.kv_bytes_rank
    assert lost == pytest.approx(0.9 * 64 * few.state_bytes / 2, abs=2)


@pytest.mark.parametrize("scheduler", [SGLANG, TENSORRT], ids=["sglang", "tensorrt-llm"])
def test_drafts_hold_states_of_their_own(scheduler: dict[str, Any]) -> None:
    limit = {"sglang": "max_running_requests", "tensorrt-llm": "max_batch_size"}
    limited = scheduler | {limit[str(scheduler["policy"])]: 32}
    plain, drafting = (plan(QWEN, limited | more) for more in ({}, {"speculative_config": MTP}))
    lost = plain.memory.kv_bytes_rank - drafting.memory.kv_bytes_rank
    assert lost > 3 * 32 * plain.state_bytes // 2 * 0.9


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": MTP}], ids=["plain", "drafts"])
@pytest.mark.parametrize("scheduler", [SGLANG, TENSORRT], ids=["sglang", "tensorrt-llm"])
def test_requests_run_and_leaps_do_not_show(
    tmp_path: Path, scheduler: dict[str, Any], drafts: dict[str, Any]
) -> None:
    synthetic = {
        "requests": 30,
        "arrivals": {"process": "poisson", "rate_per_s": 20.0},
        "prompt": {"median": 500.0, "max": 2000},
        "output": {"median": 60.0, "max": 200},
    }
    if scheduler == TENSORRT:
        scheduler = scheduler | {"max_batch_size": 64}
    made = tables(QWEN, scheduler | drafts, workload={"synthetic": synthetic})
    for leap in (True, False):
        made["scheduler"]["leap"] = leap
        run_config(tmp_path / str(leap), **made)
    assert rows_of(tmp_path / "True") == rows_of(tmp_path / "False")
    assert summary_of(tmp_path / "True")["completed"] == 30


def test_validate_tells_the_states_of_a_tree() -> None:
    (found,) = facts(make_plan(config_from_dict(tables(QWEN, {"policy": "sglang"})), "t")).values()
    assert found["states"] == "658 of requests and the prefix cache; 219 requests may run"
    assert found["KV blocks"].endswith("x 1 tokens")
    (plain,) = facts(make_plan(config_from_dict(tables(QWEN, SGLANG)), "t")).values()
    assert "states" not in plain


def test_states_leave_with_the_kv_of_a_prefill_server(tmp_path: Path) -> None:
    roles = [{"role": "prefill"}, {"role": "decode", "scheduler": {"disable_radix_cache": True}}]
    made = tables(
        LFM2,
        {"policy": "sglang"},
        replicas=roles,
        workload={"synthetic": {"requests": 20, "arrivals": {"process": "burst"}}},
    )
    run_config(tmp_path, **made)
    found = make_plan(config_from_dict(made), "t").replicas[1]
    assert summary_of(tmp_path)["completed"] == 20
    moved = summary_of(tmp_path)["kv_bytes_moved"]
    prompts = sum(int(row["prompt_toks"]) for row in rows_of(tmp_path))
    # The page of the token that is to come is one of its own.
    assert moved == (prompts + 20) * found.kv_bytes_per_token + 20 * found.state_bytes


def test_no_more_requests_run_than_there_are_states(tmp_path: Path) -> None:
    made = tables(
        LFM2,
        SGLANG | {"max_mamba_cache_size": 2},
        replicas=[{"count": 1}],
        workload={"synthetic": {"requests": 20, "arrivals": {"process": "burst"}}},
    )
    run_config(tmp_path, **made)
    assert summary_of(tmp_path)["completed"] == 20
    decoding = sorted(
        (int(row[key]), step)
        for row in rows_of(tmp_path)
        for key, step in (("first_token_ns", 1), ("last_token_ns", -1))
    )
    steps = [step for _, step in decoding]
    most = max(sum(steps[: at + 1]) for at in range(len(steps)))
    assert most == 2


@pytest.mark.parametrize(
    ("name", "scheduler", "more", "key"),
    [
        (QWEN, {"policy": "sglang", "speculative_config": MTP}, {}, "beside drafts"),
        (QWEN, {"policy": "sglang", "page_size": 16}, {}, "pages of one token"),
        (QWEN, {"policy": "sglang", "radix_eviction_policy": "fifo"}, {}, "one order, lru"),
        (
            QWEN,
            {"policy": "sglang"},
            {"replicas": [{"role": role, "tensor_parallel": 2} for role in ("prefill", "decode")]},
            "a decode server",
        ),
        (QWEN, {"policy": "tensorrt-llm"}, {}, "enable_block_reuse"),
        (LFM2, TENSORRT, {}, "does not keep"),
        (QWEN, {"policy": "fcfs"}, {"engine": {"name": "none"}}, "needs policy"),
        (
            QWEN,
            TENSORRT,
            {"replicas": [{"role": role, "tensor_parallel": 2} for role in ("prefill", "decode")]},
            "hand over",
        ),
        ("Qwen/Qwen3-8B", {"policy": "sglang", "mamba_ssm_dtype": "bfloat16"}, {}, "no layers"),
        (QWEN, SGLANG | {"mamba_full_memory_ratio": 0.0001}, {}, "states of 0 requests"),
        (QWEN, TENSORRT | {"speculative_config": MTP}, {}, "states of 2048 requests"),
    ],
)
def test_what_they_cannot_do_is_refused(
    name: str, scheduler: dict[str, Any], more: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError, match=key):
        plan(name, scheduler, **more)


def test_models_without_states_stay_as_they_are() -> None:
    model = lookup_model("meta-llama/Llama-3.1-8B")
    assert not has_states(model)
    assert with_states_of(SglangTable(), model) is model
