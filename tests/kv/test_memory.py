"""The memory planner against LLMServingSim's capacities and Vidur's 288 cases."""

import json
from pathlib import Path

import pytest

from emu.catalogue import lookup_model
from emu.errors import InputError
from emu.kv.memory import engine_plan, engine_weight_bytes
from emu.kv.vidur_memory import vidur_layer_params, vidur_plan
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
    plan = engine_plan(
        lookup_model(model), memory_gib, tp=tp, pp=pp, ep=ep, utilization=utilization
    )
    assert plan.weight_bytes_rank == weights
    assert plan.kv_bytes_token_rank == per_token
    assert plan.num_blocks == blocks
    assert plan.kv_tokens == 16 * blocks


def test_the_charge_bounds_the_physical_weights_but_for_norms_and_biases():
    for model in (LLAMA, QWEN, MOE, "Mixtral-8x7B", "Llama-2-70b"):
        spec = lookup_model(model)
        for tp, pp in ((1, 1), (2, 1), (4, 2), (8, 4)):
            plan = engine_plan(spec, 4096, tp=tp, pp=pp)
            small = spec.layers * 4 * (spec.hidden + 2 * spec.head_dim)
            assert plan.weight_bytes_rank >= max(plan.physical_weight_bytes) - small


def test_kv_heads_are_replicated_beyond_their_number():
    spec = lookup_model(MOE)  # four KV heads
    four, eight = (engine_plan(spec, 96, tp=tp) for tp in (4, 8))
    assert four.kv_bytes_token_rank == eight.kv_bytes_token_rank == 98_304 // 4


def test_latent_kv_is_held_by_every_rank():
    spec = lookup_model("DeepSeek-V3")
    plan = engine_plan(spec, 141, tp=8)
    assert plan.kv_bytes_token_rank == plan.kv_bytes_token == 61 * (512 + 64) * 2


def test_narrow_kv_doubles_the_tokens():
    spec = lookup_model(LLAMA)
    wide, narrow = (engine_plan(spec, 80, kv_cache_dtype=t) for t in ("auto", "fp8"))
    assert narrow.kv_bytes_token_rank * 2 == wide.kv_bytes_token_rank
    assert narrow.num_blocks // 2 == wide.num_blocks


def test_uneven_pipeline_is_judged_by_its_fullest_stage():
    spec = lookup_model(LLAMA)
    assert engine_plan(spec, 80, pp=3).kv_bytes_token_rank == 11 * 4096
    assert engine_weight_bytes(spec, pp=3) > engine_weight_bytes(spec, pp=4)


def test_weights_that_do_not_fit_are_named():
    with pytest.raises(InputError, match=r"Llama-3.1-70B needs 131.4 GiB on each of 1 GPUs"):
        engine_plan(lookup_model("Llama-3.1-70B"), 80)


def test_no_block_left_is_an_input_error():
    with pytest.raises(InputError, match="no block fits"):
        engine_plan(lookup_model(LLAMA), 16, utilization=0.9)
    with pytest.raises(InputError, match="no block fits"):
        engine_plan(lookup_model(LLAMA), 24, reserve_bytes=8 * GIB)


def test_vidur_rule_worked_example():
    # 4096*128*(2*32+2*32) + 3*4096*11008 = 202,375,168 parameters a layer, 2 GiB a request
    spec = lookup_model("Llama-2-7b")
    assert vidur_layer_params(spec) == 202_375_168
    plan = vidur_plan(spec, 80, max_tokens=4096)
    assert (plan.request_slots, plan.num_blocks) == (29, 7424)
    assert plan.kv_bytes_token_rank * 4096 == 2 * GIB


def test_vidur_rule_refuses_what_it_does_not_know():
    with pytest.raises(InputError, match="dense models only"):
        vidur_plan(lookup_model(MOE), 80)


@pytest.mark.shared
@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared/data/vidur-cases")
def test_vidur_rule_gives_all_cases():
    memory_gib = {"a40": 45, "a100": 80, "h100": 80}
    cases = json.loads(CASES.read_text())["cases"]
    assert len(cases) == 288
    for case in cases:
        spec = lookup_model(case["model"])
        tp, pp = case["tensor_parallel"], case["pipeline_stages"]
        assert vidur_layer_params(spec, tp) == case["params_per_layer_per_device"], case
        arguments = {
            "tp": tp,
            "pp": pp,
            "max_tokens": case["max_tokens"],
            "margin": case["memory_margin_fraction"],
        }
        if case["num_blocks_bs16"] is None:
            with pytest.raises(InputError):
                vidur_plan(spec, memory_gib[case["device"]], **arguments)
            continue
        plan = vidur_plan(spec, memory_gib[case["device"]], **arguments)
        assert plan.weight_bytes_rank == 2 * case["params_per_device"], case
        assert plan.kv_bytes_token_rank * case["max_tokens"] == case["kv_bytes_per_request"], case
        assert plan.request_slots == case["request_slots"], case
        assert plan.num_blocks == case["num_blocks_bs16"], case
