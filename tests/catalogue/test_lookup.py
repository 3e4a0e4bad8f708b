"""Names of models and GPUs; figures of GPUs."""

import tomllib
from pathlib import Path

import pytest

from emu.catalogue import list_gpus, list_models, lookup, lookup_gpu, lookup_model
from emu.errors import InputError


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b"),
        ("someone/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("llama3_8b", "meta-llama/Meta-Llama-3-8B"),
        ("mistral_24b", "mistralai/Mistral-Small-24B-Base-2501"),
        ("qwen_72b", "Qwen/Qwen2.5-72B"),
        ("Qwen/Qwen-72B", "Qwen/Qwen-72B"),
        ("GPT-OSS-120B", "openai/gpt-oss-120b"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    ],
)
def test_models_are_found_by_any_usual_name(written, found):
    assert lookup_model(written).name == found


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("A100", "A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("h100_sxm", "H100-SXM5-80GB"),
        ("H100", "H100-SXM5-80GB"),
        ("RTX4090", "RTX4090"),
        ("RTXPRO6000", "RTXPRO6000"),
        ("b200", "B200-SXM-180GB"),
    ],
)
def test_gpus_are_found_by_any_usual_name(written, found):
    assert lookup_gpu(written).name == found


@pytest.mark.parametrize("file", ["models.toml", "gpus.toml"])
def test_tables_are_cut_out_of_the_text_as_they_stand_in_it(file):
    whole = tomllib.loads(Path(lookup.__file__).with_name(file).read_text("utf-8"))
    cut = lookup._tables(file)
    assert {name: tomllib.loads(text) for name, text in cut.items()} == whole
    for name, text in cut.items():
        assert lookup._aliases(text) == whole[name].get("aliases", [])


def test_no_name_is_taken_twice():
    for name in list_models():
        assert lookup_model(name).name == name
        assert lookup_model(name.upper()).name == name
    for name in list_gpus():
        assert lookup_gpu(name).name == name


def test_a_typo_is_answered_with_the_nearest_names():
    with pytest.raises(InputError) as caught:
        lookup_model("Lama-3.1-8B", "cluster.toml", "model.name")
    text = str(caught.value)
    assert text.startswith("cluster.toml: model.name: unknown model 'Lama-3.1-8B'; did you mean")
    assert "'meta-llama/Llama-3.1-8B'" in text
    with pytest.raises(InputError, match="did you mean 'H100-SXM5-80GB'"):
        lookup_gpu("H1000")
    with pytest.raises(InputError, match=r"the catalogue has \d+ \(`emu models` lists them\)"):
        lookup_model("???")


def test_gpu_figures_are_plausible_and_sourced():
    assert len(list_gpus()) >= 15
    for name in list_gpus():
        gpu = lookup_gpu(name)
        assert gpu.source
        # Bytes and operations of one generation keep a ratio: a misplaced digit would show.
        assert 30 < gpu.tflops_fp16 * 1000 / gpu.memory_gbytes_per_s < 500, name
        assert gpu.tflops_fp8 in (0.0, pytest.approx(2 * gpu.tflops_fp16, rel=0.02)), name
        assert 0 < gpu.idle_w < gpu.tdp_w / 4, name
        assert gpu.memory_bytes == gpu.memory_gib * 2**30


def test_narrow_weights_run_at_half_precision_where_units_are_missing():
    a100, h100 = lookup_gpu("A100"), lookup_gpu("H100")
    assert a100.peak_flops("fp8") == a100.peak_flops("bfloat16") == 312e12
    assert a100.peak_flops("int8") == 624e12
    assert h100.peak_flops("fp8") == 1978.9e12
    assert h100.peak_flops("mxfp4") == h100.peak_flops("float16")
    assert h100.peak_flops("fp8_block") == h100.peak_flops("fp8")
    b200 = lookup_gpu("B200")
    assert b200.peak_flops("nvfp4") == b200.peak_flops("mxfp4") == 9000e12
    assert b200.peak_flops("nvfp4_wo") == b200.peak_flops("int4") == 2250e12
    assert (h100.units("nvfp4"), b200.units("nvfp4")) == ("half", "fp4")
