"""What the name of a checkpoint says of its weights."""

import msgspec
import pytest

from emu.catalogue import from_hf_config, lookup_model, sizes
from emu.catalogue.checkpoints import check_dtype, weights_under
from emu.errors import InputError


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8_block"),
        ("Qwen3-30B-A3B-Instruct-2507-FP8", "fp8_block"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"),
        ("RedHatAI/Llama-3.1-8B-Instruct-FP8-dynamic", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "nvfp4"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "nvfp4"),
        ("RedHatAI/Llama-3.1-8B-Instruct-NVFP4A16", "nvfp4_wo"),
        ("amd/Llama-3.3-70B-Instruct-MXFP4", "mxfp4"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "int4"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8_wo"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "int4"),
        ("unsloth/gpt-oss-20b-BF16", "bfloat16"),
        ("deepseek-ai/DeepSeek-V3", "fp8_block"),
        ("meta-llama/Llama-3.1-8B", "bfloat16"),
    ],
)
def test_a_name_says_how_weights_are_stored(name, weights):
    spec = lookup_model(name)
    assert sizes.linear_dtype(spec, "auto") == weights
    if spec.experts is not None:
        assert sizes.expert_dtype(spec, "auto") == weights
    assert lookup_model(spec.name) == spec  # what is written of it is read as the same


def test_an_fp8_name_halves_the_weights_and_keeps_its_suffix():
    wide, narrow = lookup_model("Qwen/Qwen3-235B-A22B"), lookup_model("Qwen/Qwen3-235B-A22B-FP8")
    parts = [sum(sizes.stage_weight_bytes(spec, 8)) for spec in (wide, narrow)]
    assert parts[1] / parts[0] == pytest.approx(0.5, abs=0.01)
    assert narrow.name == "Qwen/Qwen3-235B-A22B-FP8"
    assert sizes.parameter_count(wide) == sizes.parameter_count(narrow)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("amd/Llama-3.1-8B-Instruct-FP8-KV", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "fp8"),
        ("nvidia/Qwen3-32B-NVFP4", "fp8"),
        ("nvidia/DeepSeek-R1-FP4", "fp8"),
        ("RedHatAI/Qwen3-32B-NVFP4", "bfloat16"),
        ("Llama-3.3-70B-Instruct-NVFP4", "bfloat16"),
    ],
)
def test_a_name_may_say_the_type_of_the_kv_cache(name, kept):
    assert sizes.kv_dtype(lookup_model(name), "auto", "auto") == kept


def test_a_suffix_of_releases_is_no_other_checkpoint():
    """Kimi-K2-Thinking was published in 4 bits, Kimi-K2-Instruct in 8."""
    spec = lookup_model("moonshotai/Kimi-K2-Thinking")
    assert spec.expert_dtype == "int4_g32"
    kept = frozenset(("mixer", "output", "mlp", "shared"))
    assert set(map(spec.kept_wide, range(spec.layers))) == {kept}
    assert sum(sizes.stage_weight_bytes(spec)) / 1e9 == pytest.approx(594.2, rel=0.002)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("TheBloke/Llama-2-7B-Chat-GPTQ", "does not know how -gptq stores weights"),
        ("x/Llama-3.1-8B-Instruct-GGUF", "does not know how -gguf stores weights"),
        ("unsloth/Llama-3.1-8B-bnb-4bit", "'meta-llama/Llama-3.1-8B' and set model.dtype"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "which of its matrices"),
        ("nvidia/DeepSeek-V3-FP4", "which of its matrices"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "give its config.json as model.hf_config"),
    ],
)
def test_a_name_that_says_too_little_is_refused_with_what_to_write(name, problem):
    with pytest.raises(InputError) as caught:
        lookup_model(name, "c.toml", "model.name")
    assert str(caught.value).startswith(f"c.toml: model.name: {name!r}")
    assert problem in str(caught.value)


def test_a_configured_type_may_not_contradict_the_name():
    spec = lookup_model("Qwen/Qwen3-32B-FP8")
    for dtype in ("auto", "fp8", "fp8_block"):
        check_dtype(spec, dtype, "c.toml")
    with pytest.raises(InputError, match=r"model\.dtype: bfloat16 contradicts .* fp8_block"):
        check_dtype(spec, "bfloat16", "c.toml")
    check_dtype(lookup_model("DeepSeek-V3"), "nvfp4", "c.toml")


def test_the_type_of_a_servers_activations_leaves_narrow_weights_as_they_are():
    assert weights_under(lookup_model("Qwen/Qwen3-32B-FP8"), "bfloat16") == "auto"
    assert weights_under(lookup_model("Qwen/Qwen3-32B"), "bfloat16") == "bfloat16"


def group(bits, kind, activations, targets=("Linear",), **more):
    weights = {"num_bits": bits, "type": kind, "group_size": 16 if kind == "float" else None}
    found = {"weights": weights | more, "input_activations": activations}
    found["targets"] = list(targets)
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": found}}


NARROW = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("stored", "weights"),
    [
        ({"quant_method": "gptq", "bits": 8}, "int8_wo"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4_wo"),
        (group(8, "int", None), "int8_wo"),
        (group(8, "int", {"num_bits": 8, "type": "int"}), "int8"),
        (group(4, "float", None), "nvfp4_wo"),
        (group(4, "float", {"num_bits": 4, "type": "float"}), "nvfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
    ],
)
def test_weights_with_wide_activations_are_told_from_those_with_narrow_ones(stored, weights):
    assert stored_so(stored).linear_dtype == weights


def stored_so(stored, key="quantization_config", **more):
    config = {
        "model_type": "mixtral",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1000,
        key: stored,
        **more,
    }
    return from_hf_config(config, "x", "config.json")


@pytest.mark.parametrize(
    ("stored", "first", "second"),
    [
        # AWQ and bitsandbytes name the end of a path, or one layer's part.
        (
            {"quant_method": "awq", "modules_to_not_convert": ["self_attn"]},
            ["mixer", "output"],
            ["mixer", "output"],
        ),
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp.gate", "visual"]}, [], []),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "llm_int8_skip_modules": ["lm_head", "model.layers.1.self_attn"],
            },
            [],
            ["mixer", "output"],
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*\.1\.self_attn.*": {}}},
            [],
            ["mixer", "output"],
        ),
        # What no target names is not quantized.
        (
            group(4, "int", None, ["re:.*mlp.*"]),
            ["mixer", "output"],
            ["mixer", "output"],
        ),
        (
            group(8, "float", NARROW, ["re:.*layers.1.self_attn.*"]),
            ["experts", "mixer", "mlp", "output", "shared"],
            ["experts", "mlp", "shared"],
        ),
    ],
)
def test_what_a_checkpoint_keeps_wide_is_found_by_every_way_of_saying_it(stored, first, second):
    spec = stored_so(stored)
    assert [sorted(spec.kept_wide(0)), sorted(spec.kept_wide(1))] == [first, second]


def test_the_older_name_of_the_table_is_read_too():
    stored = group(8, "int", {"num_bits": 8, "type": "int"})
    assert stored_so(stored, "compression_config").linear_dtype == "int8"


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "load_in_4bit: neither 4 nor 8 bits"),
        ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic: '+:.*down.*'"),
        ({"quant_method": "fp8", "quant_algo": "MIXED_PRECISION"}, "matrices of several types"),
        (group(8, "float", None), "fp8 with 16-bit activations is not modeled"),
        (group(8, "float", NARROW, strategy="group"), "unknown type: 8 bits, 'float'"),
        (group(4, "int", NARROW), "int4 with narrow activations is not modeled"),
        ({**group(4, "int", None), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
            "a KV cache of 'NVFP4' is not modeled",
        ),
        (
            {**group(8, "float", NARROW), "kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "a KV cache of 4 bits is not modeled",
        ),
        ("fp8", "expected a table, got 'fp8'"),
        ({"quant_method": "awq", "modules_to_not_convert": ["re:("]}, "a wrong expression"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": 5}},
            "config_groups.g.weights: expected a table",
        ),
    ],
)
def test_a_scheme_that_emu_cannot_size_is_refused(stored, problem):
    with pytest.raises(InputError) as caught:
        stored_so(stored)
    assert problem in str(caught.value)


def test_a_name_with_narrow_weights_needs_a_configuration_that_has_them():
    spec = msgspec.structs.replace(lookup_model("Llama-3.1-8B"), name="Llama-3.1-8B-NVFP4")
    with pytest.raises(InputError, match=r"hf_quant_config\.json belongs beside it"):
        check_dtype(spec, "auto", "c.toml")
    check_dtype(spec, "nvfp4", "c.toml")
    check_dtype(msgspec.structs.replace(spec, name="Llama-3.1-8B-BF16"), "auto", "c.toml")
