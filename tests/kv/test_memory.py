"""The memory planner against LLMServingSim's capacities and Vidur's 288 cases."""

import json
from pathlib import Path

import pytest

from emu.catalogue import lookup_model
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.kv.memory import Demand, engine_plan, engine_weight_bytes
from emu.kv.vidur_memory import vidur_plan
from emu.units import GIB

CASES = Path(__file__).parents[3] / "shared/data/vidur-cases/unit_memory_planner.json"

LLAMA, QWEN, MOE = "Llama-3.1-8B", "Qwen3-32B", "Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("model", "tp", "pp", "ep", "memory_gib", "utilization", "weights", "per_token", "blocks"),
    [
        (LLAMA, 1, 1, 1, 24, 0.833919, 16_060_522_496, 131_072, 2_588),
        (LLAMA, 1, 1, 1, 24, 0.9, 16_060_522_496, 131_072, 3_400),
        (LLAMA, 1, 1, 1, 96, 0.9, 16_060_522_496, 131_072, 36_578),
        (LLAMA, 2, 1, 2, 96, 0.9, 8_030_527_488, 65_536, 80_815),
        (LLAMA, 2, 2, 2, 96, 0.9, 4_540_604_416, 32_768, 168_286),
        (LLAMA, 1, 4, 1, 96, 0.9, 5_591_146_496, 32_768, 166_282),
        (QWEN, 2, 1, 0, 96, 0.9, 32_762_767_360, 131_072, 28_614),
        (MOE, 1, 1, 2, 96, 0.9, 32_073_191_424, 98_304, 38_590),
        (MOE, 2, 1, 2, 96, 0.9, 30_544_891_904, 49_152, 79_124),
    ],
)
def test_engine_rule_gives_llmservingsim_capacities(
    model, tp, pp, ep, memory_gib, utilization, weights, per_token, blocks
):
    demand = Demand(tp=tp, pp=pp, ep=ep, utilization=utilization)
    plan = engine_plan(lookup_model(model), memory_gib, demand)
    assert plan.weight_bytes_rank == weights
    assert plan.kv_bytes_token_rank == per_token
    assert plan.num_blocks == blocks
    assert plan.kv_tokens == 16 * blocks


def test_the_charge_bounds_the_physical_weights_but_for_norms_and_biases():
    for model in (LLAMA, QWEN, MOE, "Mixtral-8x7B", "Llama-2-70b"):
        spec = lookup_model(model)
        for tp, pp in ((1, 1), (2, 1), (4, 2), (8, 4)):
            plan = engine_plan(spec, 4096, Demand(tp=tp, pp=pp))
            small = spec.layers * 4 * (spec.hidden + 2 * spec.head_dim)
            assert plan.weight_bytes_rank >= max(plan.physical_weight_bytes) - small


def test_kv_heads_are_replicated_beyond_their_number():
    spec = lookup_model(MOE)  # four KV heads
    four, eight = (engine_plan(spec, 96, Demand(tp=tp)) for tp in (4, 8))
    assert four.kv_bytes_token_rank == eight.kv_bytes_token_rank == 98_304 // 4


def test_latent_kv_is_held_by_every_rank():
    spec = lookup_model("DeepSeek-V3")
    plan = engine_plan(spec, 141, Demand(tp=8))
    assert plan.kv_bytes_token_rank == plan.kv_bytes_token == 61 * (512 + 64) * 2


def test_narrow_kv_doubles_the_tokens():
    spec = lookup_model(LLAMA)
    wide, narrow = (engine_plan(spec, 80, Demand(kv_cache_dtype=t)) for t in ("auto", "fp8"))
    assert narrow.kv_bytes_token_rank * 2 == wide.kv_bytes_token_rank
    assert narrow.num_blocks // 2 == wide.num_blocks


def test_uneven_pipeline_is_judged_by_its_fullest_stage():
    spec = lookup_model(LLAMA)
    assert engine_plan(spec, 80, Demand(pp=3)).kv_bytes_token_rank == 11 * 4096
    assert engine_weight_bytes(spec, pp=3) > engine_weight_bytes(spec, pp=4)


def test_weights_that_do_not_fit_are_named():
    with pytest.raises(InputError, match=r"Llama-3.1-70B needs 131.4 GiB on each of 1 GPUs"):
        engine_plan(lookup_model("Llama-3.1-70B"), 80)


def test_no_block_left_is_an_input_error():
    with pytest.raises(InputError, match="no block fits"):
        engine_plan(lookup_model(LLAMA), 16, Demand(utilization=0.9))
    with pytest.raises(InputError, match="no block fits"):
        engine_plan(lookup_model(LLAMA), 24, Demand(reserve_bytes=8 * GIB))


def planned(policy: str, margin: float, **keys):
    scheduler = {"policy": policy, "memory_margin_fraction": margin, **keys}
    tables = {
        "model": {"name": "Llama-2-7b", "max_model_tokens": 4096},
        "nodes": [{"gpu": "A100-SXM4-80GB"}],
        "replicas": [{}],
        "scheduler": scheduler,
        "latency": {"backend": "linear"},
        "workload": {"synthetic": {"requests": 1}},
    }
    return make_plan(config_from_dict(tables), "config").replicas[0]


def test_vidurs_planner_gives_blocks_and_cap_of_a_configuration():
    """2 GiB of KV a request of 4,096 tokens beside 12 GiB of weights: 29 slots, 7,424 blocks."""
    orca = planned("orca", 0.1, max_tokens=4096)
    assert (orca.num_blocks, orca.scheduler.batch_size_cap) == (7424, 29)
    assert planned("orca", 0.1, max_tokens=4096, batch_size_cap=8).scheduler.batch_size_cap == 8
    sarathi = planned("sarathi", 0.1)
    assert (sarathi.num_blocks, sarathi.scheduler.batch_size_cap) == (7424, 128)
    assert planned("sarathi", 0.5).num_blocks < 7424 == planned("sarathi", 0.1).num_blocks
    with pytest.raises(InputError, match="no request of 4096 tokens fits"):
        planned("sarathi", 0.85)


def test_vidurs_rule_refuses_what_it_does_not_know():
    with pytest.raises(InputError, match="dense models only"):
        vidur_plan(lookup_model(MOE), 80)


@pytest.mark.shared
@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared/data/vidur-cases")
def test_vidurs_rule_gives_all_cases():
    memory_gib = {"a40": 45, "a100": 80, "h100": 80}
    cases = json.loads(CASES.read_text())["cases"]
    assert len(cases) == 288
    for case in cases:
        asked = Demand(
            tp=case["tensor_parallel"],
            pp=case["pipeline_stages"],
            utilization=1 - case["memory_margin_fraction"],
        )
        spec, gib = lookup_model(case["model"]), memory_gib[case["device"]]
        if case["num_blocks_bs16"] is None:
            with pytest.raises(InputError):
                vidur_plan(spec, gib, asked, case["max_tokens"])
            continue
        plan, batch = vidur_plan(spec, gib, asked, case["max_tokens"])
        assert plan.weight_bytes_rank == 2 * case["params_per_device"], case
        assert batch * case["pipeline_stages"] == case["request_slots"], case
        assert plan.num_blocks == case["num_blocks_bs16"], case


def test_one_table_serves_both_ends_of_a_model_on_one_stage_alone() -> None:
    """The head of a tied model is its embedding, unless they are on different stages."""
    spec = lookup_model("meta-llama/Llama-3.2-1B")
    assert spec.tied_embeddings
    table = spec.vocab * spec.hidden * 2
    layers = engine_weight_bytes(spec, pp=2) - 2 * table
    assert engine_weight_bytes(spec) - table == pytest.approx(2 * layers, rel=0.001)
