"""Models of 2024 to 2026: parameters, KV and state bytes against published figures; refusals.

`configs/` holds the keys of each published config.json that size and speed follow from. The
figures: parameters of the language model in 1e9 as the published checkpoints have them (without
vision tower and multi-token prediction), KV bytes of a token in layers that keep every token, KV
bytes of a token in layers with a window or chunk by its length, bytes of a sequence's states.
"""

import json
from pathlib import Path

import pytest

from emu.catalogue import from_hf_config, lookup_model, model_from_file, sizes
from emu.errors import InputError

CONFIGS = Path(__file__).parent / "configs"

KNOWN = [
    ("Apertus-70B-Instruct", 70.600, 327_680, {}, 0),
    ("Bamba-9B-v2", 9.780, 12_288, {}, 29 * 2_147_840),
    ("DeepSeek-V2-Lite", 15.706, 31_104, {}, 0),
    ("DeepSeek-V3", 671.026, 70_272, {}, 0),
    ("DeepSeek-V3.2", 671.878, 78_324, {}, 0),
    ("ERNIE-4.5-21B-A3B-PT", 21.825, 57_344, {}, 0),
    ("EXAONE-4.0-32B", 32.003, 65_536, {4096: 196_608}, 0),
    ("Falcon-H1-34B-Base", 33.642, 147_456, {}, 72 * 2_127_872),
    ("GLM-4.5", 352.798, 376_832, {}, 0),
    ("GLM-4.5-Air", 106.852, 188_416, {}, 0),
    ("GLM-5", 743.911, 100_152, {}, 0),
    ("GLM-5.2", 743.377, 92_628, {}, 0),
    ("GLM-5.2-FP8", 743.377, 92_628, {}, 0),
    ("Granite-4.0-H-Small", 32.207, 16_384, {}, 36 * 2_147_840),
    ("Hunyuan-A13B-Instruct", 80.393, 131_072, {}, 0),
    ("Jamba-v0.1", 51.570, 16_384, {}, 28 * 311_296),
    ("Kimi-K2-Instruct", 1026.408, 70_272, {}, 0),
    ("Kimi-K2.5", 1026.408, 70_272, {}, 0),
    ("Kimi-Linear-48B-A3B-Instruct", 49.123, 8_064, {}, 20 * 2_170_880),
    ("LFM2-2.6B", 2.569, 16_384, {}, 22 * 8_192),
    ("Llama-4-Maverick-17B-128E-Instruct", 400.712, 49_152, {8192: 147_456}, 0),
    ("Llama-4-Scout-17B-16E-Instruct", 107.770, 49_152, {8192: 147_456}, 0),
    ("MiMo-V2-Flash", 308.779, 23_040, {128: 199_680}, 0),
    ("MiniMax-M2.5", 228.690, 253_952, {}, 0),
    ("MiniMax-M2.7", 228.690, 253_952, {}, 0),
    ("MiniMax-Text-01", 456.090, 40_960, {}, 70 * 2_097_152),
    ("Mistral-7B-v0.1", 7.242, 0, {4096: 131_072}, 0),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.578, 6_144, {}, 23 * 2_134_016),
    ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 120.669, 8_192, {}, 40 * 4_255_744),
    ("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 549.309, 12_288, {}, 48 * 8_499_200),
    ("Nemotron-H-56B-Base-8K", 56.324, 40_960, {}, 54 * 16_900_096),
    ("Nemotron-H-8B-Base-8K", 8.101, 16_384, {}, 24 * 4_255_744),
    ("Olmo-3-32B", 32.234, 65_536, {4096: 196_608}, 0),
    ("Qwen3-32B-FP8", 32.762, 262_144, {}, 0),
    ("Qwen3-Coder-480B-A35B-Instruct", 480.155, 253_952, {}, 0),
    ("Qwen3-Next-80B-A3B-Instruct", 79.674, 24_576, {}, 36 * 1_097_728),
    ("Qwen3-VL-30B-A3B-Instruct", 30.532, 98_304, {}, 0),
    ("Qwen3.5-27B", 26.896, 65_536, {}, 48 * 3_207_168),
    ("Qwen3.5-35B-A3B", 34.661, 20_480, {}, 30 * 2_146_304),
    ("Qwen3.5-397B-A17B", 396.346, 30_720, {}, 45 * 4_268_032),
    ("Seed-OSS-36B-Instruct", 36.151, 262_144, {}, 0),
    ("SmolLM3-3B", 3.075, 73_728, {}, 0),
    ("Step-3.7-Flash", 195.84, 49_152, {512: 135_168}, 0),
    ("c4ai-command-a-03-2025", 111.058, 65_536, {4096: 196_608}, 0),
    ("dbrx-instruct", 131.597, 163_840, {}, 0),
    ("gemma-2-9b", 9.242, 172_032, {4096: 172_032}, 0),
    ("gemma-3-27b-it", 27.009, 81_920, {1024: 425_984}, 0),
    ("gemma-4-26B-A4B", 25.233, 20_480, {1024: 204_800}, 0),
    ("gpt-oss-120b", 116.829, 36_864, {128: 36_864}, 0),
    ("gpt-oss-20b", 20.915, 24_576, {128: 24_576}, 0),
    ("phi-4", 14.660, 204_800, {}, 0),
]


def kv_by_reach(spec):
    """Tokens that a layer looks back on (0: all) -> KV bytes of one token in all such layers."""
    found = {0: 0}
    for layer in map(spec.layer, range(spec.layers)):
        seen = layer.attention
        reach = (seen.window_tokens or seen.chunk_tokens) if seen is not None else 0
        found[reach] = found.get(reach, 0) + sizes.layer_kv_bytes_per_token(layer, "bfloat16")
    return found


def state_bytes(spec, tp=1):
    """Of one sequence on one rank, in all layers."""
    layers = map(spec.layer, range(spec.layers))
    return sum(sizes.layer_state_bytes(spec, layer, tp=tp) for layer in layers)


@pytest.mark.parametrize(("name", "billions", "kept", "windows", "state"), KNOWN)
def test_parameters_kv_and_state_are_the_published_ones(name, billions, kept, windows, state):
    spec = model_from_file(CONFIGS / f"{name}.json")
    assert sizes.parameter_count(spec) / 1e9 == pytest.approx(billions, rel=2e-4)
    assert kv_by_reach(spec) == {0: kept, **windows}
    assert state_bytes(spec) == state
    assert sizes.kv_bytes_per_token(spec, "bfloat16") == kept + sum(windows.values())


def test_every_configuration_has_figures_to_compare_with():
    assert {path.stem for path in CONFIGS.glob("*.json")} == {row[0] for row in KNOWN}


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        # Sums of the published safetensors files, without multi-token prediction.
        ("DeepSeek-V3", 673.15),
        ("gpt-oss-120b", 65.25),
        ("gpt-oss-20b", 13.76),
        ("Kimi-K2-Instruct", 1029.2),
        ("Kimi-K2.5", 594.2),  # only routed experts are int4
        ("MiniMax-M2.5", 230.0),
    ],
)
def test_quantized_checkpoints_take_their_published_bytes(name, gigabytes):
    spec = model_from_file(CONFIGS / f"{name}.json")
    tower_bytes = 2 * spec.tower_params
    held_bytes = sum(sizes.stage_weight_bytes(spec)) - tower_bytes
    assert held_bytes / 1e9 == pytest.approx(gigabytes, rel=0.002)


def test_tensor_parallel_ranks_share_states_and_replicate_latent_kv():
    hybrid = model_from_file(CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json")
    assert state_bytes(hybrid, tp=2) * 2 == state_bytes(hybrid)
    latent = model_from_file(CONFIGS / "DeepSeek-V3.2.json")
    one, eight = (sizes.kv_bytes_per_token_rank(latent, "bfloat16", tp) for tp in (1, 8))
    assert one == eight


def test_speculation_lengthens_the_convolution_of_a_state():
    spec = model_from_file(CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json")
    layer = spec.layer(0)
    assert sizes.layer_state_bytes(spec, layer) == 1_097_728
    assert sizes.layer_state_bytes(spec, layer, draft_tokens=2) == 1_130_496


def llama(**keys):
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        **keys,
    }


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"model_type": "bert"}, "model_type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type"),
        ({"model_type": "brand_new_moe"}, "model_type"),
        ({"model_type": "deepseek_v4", "compress_ratios": [4, 128]}, "model_type"),
        ({"model_type": "nemotron-nas", "block_configs": [{}]}, "model_type"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"index_topk": 2048}, "index_topk"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"linear_attn_config": {"full_attn_layers": [1]}}, "linear_attn_config"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"use_cla": True}, "use_cla"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "telepathy"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"intermediate_size": [128, 256]}, "intermediate_size"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "quantization_config.bits",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
            "quantization_config.quant_algo",
        ),
    ],
)
def test_what_emu_does_not_know_is_refused_by_its_key(keys, field):
    with pytest.raises(InputError) as caught:
        from_hf_config(llama(**keys), "mine", "config.json")
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_an_unknown_type_can_be_assumed_to_be_plain():
    keys = llama(model_type="brand_new", mamba_d_state=16)
    spec = from_hf_config(keys, "mine", "config.json", assume="llama")
    assert spec.model_type == "llama"
    with pytest.raises(InputError, match=r"model\.assume: 'jamba' is no plain model type"):
        from_hf_config(keys, "mine", "config.json", assume="jamba")


def test_a_guarded_key_that_is_off_is_no_obstacle():
    keys = llama(use_cla=False, num_kv_shared_layers=0, index_topk=None, attention_chunk_size=None)
    assert from_hf_config(keys, "mine", "config.json").layers == 2


def test_a_qwen_window_counts_only_when_it_is_switched_on():
    keys = llama(model_type="qwen2", sliding_window=16, max_window_layers=1)
    assert from_hf_config(keys, "mine", "config.json").window_layers == ()
    keys["use_sliding_window"] = True
    assert from_hf_config(keys, "mine", "config.json").window_layers == (False, True)


def test_the_quantization_file_beside_a_configuration_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": "FP8",
                    "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
                }
            }
        )
    )
    spec = model_from_file(tmp_path)
    assert (spec.linear_dtype, spec.published_kv_dtype) == ("nvfp4", "fp8")
    assert [spec.layer(index).unquantized for index in (0, 1)] == [{"mixer", "output"}, frozenset()]


def test_catalogue_models_have_the_layers_of_their_fields():
    for name in ("Llama-3.1-8B", "gpt-oss-20b", "DeepSeek-V3"):
        spec = lookup_model(name)
        kinds = {spec.layer(index).kind for index in range(spec.layers)}
        expected = {"Llama-3.1-8B": {"full"}, "gpt-oss-20b": {"full", "window"}}
        assert kinds == expected.get(name, {"latent"})
