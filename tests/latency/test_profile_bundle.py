"""Reading bundles from disk: what is found, what is inherited, and what every lack says."""

from __future__ import annotations

import re

import pytest

from emu.cli import main
from emu.errors import InputError
from emu.latency.profile.bundle import find_bundle, parse_architecture, read_bundle, variant_name
from tests.latency.profile_vectors import META, MOE_ARCHITECTURE, SKEW_META, write_bundle


def test_a_bundle_is_found_below_a_root_and_by_its_own_path(tmp_path):
    made = write_bundle(tmp_path)
    wanted = {"hardware": "Toy", "model": "toy/Model-1B", "variant": "bf16"}
    assert find_bundle(tmp_path, **wanted) == made
    assert find_bundle(made, **wanted) == made


def test_times_become_whole_nanoseconds(tmp_path):
    bundle = read_bundle(write_bundle(tmp_path), 1)
    assert bundle.dense["qkv_proj"].at(1) == 10_000
    assert bundle.dense["qkv_proj"].at(5) == 14_000
    assert bundle.per_sequence["lm_head"].at(8) == 107_000
    assert bundle.attention.at(16, 0, 0, 0) == 10_920
    assert (bundle.max_num_batched_tokens, bundle.max_num_seqs) == (64, 8)
    assert (bundle.hardware, bundle.model, bundle.variant) == ("Toy", "toy/Model-1B", "bf16")
    assert bundle.experts is None
    assert bundle.skew is None


def test_rounding_is_to_the_nearest_even_and_at_least_one(tmp_path):
    made = write_bundle(tmp_path)
    (made / "tp1" / "per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,1,0.0125\nlm_head,2,0.0135\nsampler,1,0\n"
    )
    bundle = read_bundle(made, 1)
    assert [bundle.per_sequence["lm_head"].at(n) for n in (1, 2)] == [12, 14]
    assert bundle.per_sequence["sampler"].at(1) == 1


def test_layers_that_do_not_depend_on_the_degree_come_from_tp1(tmp_path):
    bundle = read_bundle(write_bundle(tmp_path, tp2=True), 2)
    assert bundle.dense["layernorm"].at(1) == 2_000
    assert bundle.dense["qkv_proj"].at(1) == 5_000


def test_expert_tables_come_from_tp1(tmp_path):
    bundle = read_bundle(write_bundle(tmp_path, tp2=True, moe=True), 2)
    assert bundle.experts.at(64, 4) == 120_000


def test_skew_is_read_by_bucket_and_by_raw_key(tmp_path):
    made = write_bundle(tmp_path, skew=True)
    skew = read_bundle(made, 1).skew
    assert skew.alpha(0, 2, 0.9, 100, 0) == 0.5
    assert skew.alpha(16, 2, 0.1, 100, 7) == 0.9
    assert skew.alpha(16, 9, 0.1, 100, 7) == 0.25
    (made / "tp1" / "skew_fit.csv").write_text(
        "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,raw_key\n"
        "0,few,low,short,none,0.5,pc=0|few|high|short|none\n0,few,low,short,none,0.75,\n"
    )
    skew = read_bundle(made, 1).skew
    assert skew.alpha(0, 2, 0.9, 100, 0) == 0.5
    assert skew.alpha(0, 2, 0.1, 100, 0) == 0.75


def test_skew_may_stand_in_the_meta_file(tmp_path):
    made = write_bundle(tmp_path, skew=True)
    inline = "alpha_by_bucket: {'pc=0|few|high|short|none': 0.5}"
    (made / "meta.yaml").write_text(SKEW_META.replace("bucket_table: tp1/skew_fit.csv", inline))
    assert read_bundle(made, 1).skew.alpha(0, 2, 0.9, 100, 0) == 0.5


def test_skew_of_a_degree_that_was_not_fitted_is_no_correction(tmp_path):
    assert read_bundle(write_bundle(tmp_path, tp2=True, skew=True), 2).skew is None


def test_an_architecture_inside_the_bundle_goes_first(tmp_path):
    made = write_bundle(tmp_path, moe=True)
    (tmp_path / "architectures" / "toy.yaml").unlink()
    (made / "architecture.yaml").write_text(MOE_ARCHITECTURE)
    assert read_bundle(made, 1).architecture.sections["mlp_moe"] == ("moe",)


@pytest.mark.parametrize(
    ("dtype", "kv", "name"),
    [
        ("bfloat16", "bfloat16", "bf16"),
        ("float16", "float16", "fp16"),
        ("bfloat16", "fp8", "bf16-kvfp8"),
        ("float32", "float32", "fp32"),
        ("int8", "bfloat16", "int8"),
    ],
)
def test_variant_names(dtype, kv, name):
    assert variant_name(dtype, kv) == name


# ---------------------------------------------------------------------------- what is wrong


def refused(action) -> str:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"hardware": "H100"}, "latency.hardware: no bundle for 'H100'; there is Toy"),
        ({"model": "x/Y"}, "model.name: no bundle for 'x/Y' on Toy; there is toy/Model-1B"),
        ({"variant": "fp8"}, "no variant 'fp8' of toy/Model-1B on Toy; there is bf16"),
    ],
)
def test_what_a_root_lacks_is_named_with_what_it_has(tmp_path, asked, problem):
    write_bundle(tmp_path)
    wanted = {"hardware": "Toy", "model": "toy/Model-1B", "variant": "bf16", **asked}
    assert problem in refused(lambda: find_bundle(tmp_path, **wanted))


def test_roots_without_bundles_and_bundles_of_another_model(tmp_path):
    wanted = {"hardware": "Toy", "model": "toy/Model-1B", "variant": "bf16"}
    assert "no such directory" in refused(lambda: find_bundle(tmp_path / "nowhere", **wanted))
    assert "no bundle (meta.yaml)" in refused(lambda: find_bundle(tmp_path, **wanted))
    made = write_bundle(tmp_path)
    other = {**wanted, "model": "toy/Model-2B"}
    assert "for toy/Model-1B, not for toy/Model-2B" in refused(lambda: find_bundle(made, **other))


def test_a_missing_degree_is_named_with_what_there_is(tmp_path):
    made = write_bundle(tmp_path, tp2=True)
    line = refused(lambda: read_bundle(made, 4))
    assert line.endswith("tensor_parallel: no folder tp4; this bundle has tensor_parallel 1, 2")


@pytest.mark.parametrize("name", ["dense.csv", "per_sequence.csv", "attention.csv"])
def test_missing_tables_are_named(tmp_path, name):
    made = write_bundle(tmp_path)
    (made / "tp1" / name).unlink()
    line = refused(lambda: read_bundle(made, 1))
    assert re.search(rf"{name}: missing; the folder has \w+\.csv, \w+\.csv$", line)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("dense.csv", "", "dense.csv: the file is empty"),
        ("dense.csv", "layer,tokens,time_us\n", "dense.csv: no rows"),
        ("dense.csv", "layer,time_us\na,1\n", "dense.csv:1: tokens: missing column; the file has"),
        (
            "dense.csv",
            "layer,tokens,time_us\na,1\n",
            "dense.csv:2: row: 2 fields, the header has 3",
        ),
        (
            "dense.csv",
            "layer,tokens,time_us\na,1,2\n\na,x,3\n",
            "dense.csv:4: tokens: 'x' is not a count",
        ),
        ("dense.csv", "layer,tokens,time_us\na,-1,2\n", ":2: tokens: '-1' is not a count"),
        ("dense.csv", "layer,tokens,time_us\na,1,nan\n", ":2: time_us: 'nan' is not a time"),
        ("dense.csv", "layer,tokens,time_us\na,1,-2\n", ":2: time_us: '-2' is not a time"),
        ("dense.csv", "layer,tokens,time_us\nembedding,1,2\n", "layer: no rows for 'layernorm'"),
        ("skew_fit.csv", "pc,alpha\n0,1\n", "skew_fit.csv:1: n_label: missing column"),
    ],
)
def test_malformed_tables_name_file_line_and_field(tmp_path, name, text, problem):
    made = write_bundle(tmp_path, skew=True)
    (made / "tp1" / name).write_text(text)
    assert problem in refused(lambda: read_bundle(made, 1))


def test_bytes_that_are_not_text(tmp_path):
    made = write_bundle(tmp_path)
    (made / "tp1" / "dense.csv").write_bytes(b"layer,tokens,time_us\n\xff\xfe,1,2\n")
    assert "dense.csv: cannot be read" in refused(lambda: read_bundle(made, 1))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1\n", "meta.yaml:2: "),
        ("- 1\n", "meta.yaml: expected a mapping of keys"),
        ("variant: bf16\n", "meta.yaml: architecture: missing"),
        (META.replace("architecture: toy", "architecture: other"), "no architectures/other.yaml"),
        (META.replace("hardware: Toy", "hardware: 7"), "hardware: 7 is not a name"),
        (META.replace("8}", "many}"), "max_num_seqs: 'many' is not a count"),
        (SKEW_META.replace("0.25", "high"), "per_tp.1.alpha_default: 'high' is not a number"),
        (SKEW_META.replace("[0, 2, 8]", "[2, 0, 8]"), "bucket_axes.n_bins: expected rising edges"),
        (SKEW_META.replace("[0, 2, 8]", "[0, 8]"), "bucket_axes.n_bins: expected rising edges"),
        (SKEW_META.replace("n_bins: [0, 2, 8]", "other: 1"), "bucket_axes.n_bins: missing"),
        (
            SKEW_META.replace("bucket_table: tp1/skew_fit.csv", "alpha_by_bucket: {few: 1}"),
            "alpha_by_bucket: 'few' does not start with pc=N|",
        ),
    ],
)
def test_malformed_meta_files(tmp_path, text, problem):
    made = write_bundle(tmp_path, skew=True)
    (made / "meta.yaml").write_text(text)
    assert problem in refused(lambda: read_bundle(made, 1))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[layernorm, qkv_proj, attention]", "[typo]", "sequence.pre_attn: 'typo' is not in"),
        ("[layernorm, qkv_proj, attention]", "layernorm", "sequence.pre_attn: expected a list"),
        ("  post_attn:", "  after:", "sequence: unknown section 'after'; known: prologue,"),
        ("catalog:", "catalogue:", "catalog: missing"),
        ("    attention: {}", "    - attention", "catalog.attention: expected a mapping"),
    ],
)
def test_malformed_architectures(tmp_path, old, new, problem):
    write_bundle(tmp_path)
    path = tmp_path / "architectures" / "toy.yaml"
    path.write_text(path.read_text().replace(old, new))
    assert problem in refused(lambda: parse_architecture(path))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["replicas.0.tensor_parallel=2"], "no folder tp2"),
        (["model.dtype=float16"], "no variant 'fp16'"),
    ],
)
def test_validate_says_what_a_bundle_lacks(tmp_path, capsys, keys, problem):
    write_bundle(tmp_path / "bundles")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,'
        '"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,'
        '"vocab_size": 256, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}'
    )
    file = tmp_path / "c.toml"
    file.write_text(
        '[model]\nname = "toy/Model-1B"\nhf_config = "config.json"\n'
        "[[nodes]]\ngpus = 2\n"
        'gpu = { name = "Toy", memory_gib = 1, memory_gbytes_per_s = 10, tflops_fp16 = 1 }\n'
        "[[replicas]]\ncount = 1\n"
        '[latency]\nbackend = "profile"\npath = "bundles"\n'
    )
    assert main(["validate", str(file)]) == 0
    assert main(["validate", str(file), "--set", *keys]) == 2
    assert problem in capsys.readouterr().err
