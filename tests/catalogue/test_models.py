"""Sizes of models against published figures; reading of config.json."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.catalogue import from_hf_config, list_models, lookup_model, model_from_file, sizes
from emu.errors import InputError

CONFIGS = Path(__file__).parents[3] / "shared/data/model-configs"

# Sums of the tensors in the published safetensors files (the figure on the model's page), except
# DeepSeek-V3 and Kimi-K2: their papers' 671B and 1.04T without the multi-token-prediction layer.
PUBLISHED_PARAMETERS = {
    "meta-llama/Llama-2-7b": 6_738_415_616,
    "meta-llama/Llama-2-13b": 13_015_864_320,
    "meta-llama/Llama-2-70b": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "codellama/CodeLlama-34b-Instruct-hf": 33_743_970_304,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "microsoft/phi-2": 2_779_683_840,
    "facebook/opt-13b": 12_853_473_280,
    "google/gemma-2-9b": 9_241_705_984,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_parameter_count_is_the_published_one(name, parameters):
    assert sizes.parameter_count(lookup_model(name)) == parameters


@pytest.mark.parametrize(
    ("name", "total_billion", "active_billion"),
    [
        ("DeepSeek-V3", 671.0, 37.5),  # DeepSeek-V3 technical report: 671B, 37B
        ("Kimi-K2-Instruct", 1026.4, 32.9),  # model page: 1T, 32B
        ("Mixtral-8x7B", 46.7, 12.9),  # Mistral's announcement: 46.7B, 12.9B
        ("Qwen3-30B-A3B", 30.5, 3.4),  # Qwen3 technical report: 30.5B, 3.3B
        ("Qwen3-235B-A22B", 235.1, 22.2),  # 235B, 22B
        ("Phi-mini-MoE", 7.6, 2.4),  # model page: 7.6B, 2.4B
        ("DeepSeek-V2-Lite", 15.7, 2.7),  # model page: 15.7B, 2.4B without embeddings
        ("Llama-4-Scout-17B-16E", 107.8, 17.2),  # 109B with the vision tower, 17B
    ],
)
def test_experts_count_and_active_parameters(name, total_billion, active_billion):
    spec = lookup_model(name)
    assert sizes.parameter_count(spec) / 1e9 == pytest.approx(total_billion, abs=0.06)
    assert sizes.active_parameter_count(spec) / 1e9 == pytest.approx(active_billion, abs=0.06)


@pytest.mark.parametrize(
    ("name", "total", "active_billion", "checkpoint_gib"),
    [
        # gpt-oss model card, table 1: 20.91B/3.61B and 116.83B/5.13B, 12.8 and 60.8 GiB. It does
        # not count the input embedding as active.
        ("gpt-oss-20b", 20_914_757_184, 3.61, 12.8),
        ("gpt-oss-120b", 116_829_156_672, 5.13, 60.8),
    ],
)
def test_gpt_oss_as_its_model_card_says(name, total, active_billion, checkpoint_gib):
    spec = lookup_model(name)
    assert sizes.parameter_count(spec) == total
    active = sizes.active_parameter_count(spec) - sizes.embedding_params(spec)
    assert active / 1e9 == pytest.approx(active_billion, abs=0.006)
    held = sum(sizes.stage_weight_bytes(spec))
    assert held / 2**30 == pytest.approx(checkpoint_gib, abs=0.06)
    assert spec.window == 128
    assert sum(spec.window_layers) == spec.layers // 2


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("llama2_7b", 512),
        ("llama3_8b", 128),
        ("mistral_24b", 160),
        ("qwen_72b", 320),
        ("Llama-3.1-405B", 504),
        ("DeepSeek-V3", 70_272 / 1024),  # technical report of V2/V3: (512 + 64) * 61 elements
    ],
)
def test_kv_bytes_per_token(name, kib):
    assert sizes.kv_bytes_per_token(lookup_model(name), "bfloat16") == kib * 1024


@pytest.mark.parametrize(
    ("name", "embedding", "layer", "head", "total"),
    [
        ("llama2_7b", 0.26, 0.405, 0.26, 13.5),
        ("llama3_8b", 1.05, 0.436, 1.05, 16.1),
        ("mistral_24b", 1.34, 1.11, 1.34, 47.1),
        ("qwen_72b", 2.49, 1.76, 2.49, 145),
    ],
)
def test_segments_as_blitzscale_states_them(name, embedding, layer, head, total):
    segments = [size / 1e9 for size in sizes.weight_segments(lookup_model(name))]
    assert segments[0] == pytest.approx(embedding, abs=0.006)
    assert segments[1] == pytest.approx(layer, abs=0.006)
    assert segments[-1] == pytest.approx(head, abs=0.006)
    assert sum(segments) == pytest.approx(total, rel=0.005)


def test_fp8_checkpoint_takes_a_byte_for_a_weight():
    spec = lookup_model("DeepSeek-V3")
    plain = 2 * 129_280 * 7168  # embedding and head stay bfloat16
    scales = 671.03 * 4 / 128**2  # 32 bits for each block of 128 x 128
    expected = 671.03 + scales + plain / 1e9
    assert sum(sizes.stage_weight_bytes(spec)) / 1e9 == pytest.approx(expected, abs=0.2)


def test_every_model_of_the_catalogue_is_sound():
    names = list_models()
    assert len(names) >= 50
    for name in names:
        spec = lookup_model(name)
        assert spec.name == name
        assert sizes.active_parameter_count(spec) <= sizes.parameter_count(spec)
        one = sizes.weight_segments(spec)
        assert len(one) == spec.layers + 2
        assert sum(one) == sum(sizes.stage_weight_bytes(spec))
        assert spec.qkv_bias or not spec.name.startswith("Qwen/Qwen2.5")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list_models()),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 4),
)
def test_ranks_hold_at_least_the_whole_model(name, tp, pp):
    spec = lookup_model(name)
    stages = sizes.stage_weight_bytes(spec, tp, pp)
    whole = sum(sizes.stage_weight_bytes(spec))
    assert sum(stages) * tp >= whole
    assert sizes.weight_bytes_per_rank(spec, tp, pp) == max(stages)
    layers = [index for stage in sizes.stage_layers(spec, pp) for index in stage]
    assert layers == list(range(spec.layers))


def test_uneven_rest_goes_before_the_last_stage():
    assert [len(s) for s in sizes.stage_layers(lookup_model("DeepSeek-V3"), 8)] == [
        7, 7, 8, 8, 8, 8, 8, 7,
    ]  # fmt: skip


MINIMAL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def test_a_hand_computed_model():
    spec = from_hf_config(MINIMAL, "tiny", "config.json")
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert sizes.parameter_count(spec) == 2 * 1000 * 64 + 2 * layer + 64
    assert sizes.layer_weight_bytes(spec, 0) == 2 * layer
    assert sizes.layer_weight_bytes(spec, 0, dtype="fp8") == layer - 128 + 2 * 128


def test_qwen_has_qkv_biases_and_mistral_a_window():
    qwen = from_hf_config({**MINIMAL, "model_type": "qwen2"}, "q", "c")
    assert qwen.qkv_bias
    assert not qwen.o_bias
    mistral = from_hf_config({**MINIMAL, "sliding_window": 4096}, "m", "c")
    assert (mistral.window, sum(mistral.window_layers)) == (4096, 2)
    listed = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    assert from_hf_config({**MINIMAL, **listed}, "m", "c").window_layers == (True, False)


@pytest.mark.parametrize("key", sorted(MINIMAL))
def test_missing_keys_are_named(key):
    config = {k: v for k, v in MINIMAL.items() if k != key}
    with pytest.raises(InputError) as caught:
        from_hf_config(config, "tiny", "some/config.json")
    assert str(caught.value).startswith(f"some/config.json: {key}: the key is missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size: expected a whole number, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must not be 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1 is out of range"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 64"),
        ({"num_experts": 8}, "num_experts_per_tok: the key is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 is more than 4 experts"),
        ({"sliding_window": 8, "layer_types": ["x"]}, "layer_types: 1 entries for 2 layers"),
    ],
)
def test_impossible_figures_are_input_errors(change, message):
    with pytest.raises(InputError) as caught:
        from_hf_config({**MINIMAL, **change}, "tiny", "c.json")
    assert message in str(caught.value)


def test_files_are_read_or_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    assert model_from_file(tmp_path).hidden == 64
    assert model_from_file(tmp_path / "config.json", "mine").name == "mine"
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        model_from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"bad\.json"):
        model_from_file(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InputError, match="expected an object"):
        model_from_file(tmp_path / "list.json")


def test_text_part_of_a_multimodal_config_counts():
    spec = from_hf_config({"model_type": "gemma3", "text_config": MINIMAL}, "g", "c")
    assert spec.hidden == 64


@pytest.mark.shared
@pytest.mark.skipif(not CONFIGS.exists(), reason="needs ../shared/data/model-configs")
def test_catalogue_agrees_with_the_published_configs():
    files = sorted(CONFIGS.rglob("*.json"))
    assert files
    for file in files:
        name = file.relative_to(CONFIGS).with_suffix("").as_posix()
        theirs = model_from_file(file, name)
        ours = lookup_model(name)
        assert sizes.parameter_count(theirs) == sizes.parameter_count(ours), name
        assert theirs.window_layers == ours.window_layers
        for field in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "experts", "max_position"):
            assert getattr(theirs, field) == getattr(ours, field), (name, field)
