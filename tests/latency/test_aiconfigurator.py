"""The aiconfigurator backend on a fabricated table: sampling, interpolation, saving, errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.backends.aiconfigurator.backend import AiconfiguratorBackend
from emu.backends.aiconfigurator.database import (
    CHUNKS,
    DECODES,
    covered_pairs,
    grid,
    hf_config,
    sample,
)
from emu.backends.aiconfigurator.saved import find_table, load_table, save_table, table_path
from emu.backends.aiconfigurator.table import SYSTEMS, WHEEL, Provenance, Wanted
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.backends import make_latency
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.latency.base import BatchShape, stepped_decode_run
from emu.latency.host_costs import ASYNC_SCHEDULING
from tests.latency.shapes import decodes

MODEL, GPU = "meta-llama/Llama-3.1-8B", "H100-SXM5-80GB"
PROVENANCE = Provenance(
    wheel="made up", model="toy", system="h100_sxm", engine="vllm", tensor_parallel=1
)


def forward_ms(point) -> float:
    """Bilinear in each pair of axes, so that interpolation is exact."""
    chunk, history, decodes, context = point
    return 4 + 0.02 * chunk + 1e-6 * chunk * history + 0.05 * decodes + 1e-5 * decodes * context


WANTED = Wanted(spec=lookup_model(MODEL), gpu=GPU)


def wanted(**changes) -> Wanted:
    return msgspec.structs.replace(WANTED, **changes)


TABLE = sample(forward_ms, PROVENANCE, MODEL)
BACKEND = AiconfiguratorBackend(TABLE, layers=32)


def test_the_grid_has_every_pair_of_chunk_and_decodes():
    points = list(grid())
    assert len(set(points)) == len(points) < 5_000
    pairs = {(chunk, count) for chunk, _, count, _ in points}
    assert pairs == {(c, d) for c in (0, *CHUNKS) for d in (0, *DECODES)} - {(0, 0)}


@pytest.mark.parametrize(
    ("shape", "ms"),
    [
        (BatchShape(prefill_new=[700], prefill_context=[1000], sequences=1), 4 + 14 + 0.7),
        (decodes(40, 3000), 4 + 2 + 1.2),
        (decodes(600, 700), 4 + 30 + 4.2),
    ],
)
def test_between_the_points(shape, ms):
    assert BACKEND.iteration_ns(shape) == pytest.approx(ms * 1e6, abs=2)


def test_host_time_is_added_and_nothing_taken_off():
    backend = AiconfiguratorBackend(TABLE, 32, ASYNC_SCHEDULING)
    shape = decodes(8, 512)
    more = backend.iteration_ns(shape) - BACKEND.iteration_ns(shape)
    assert more == 300_000 + 32 * 15_000 == backend.components_ns(shape)["cpu_overhead"]
    assert sum(backend.components_ns(shape).values()) == backend.iteration_ns(shape)
    assert backend.first_use_ns == ASYNC_SCHEDULING.first_use_ns


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9000), st.integers(1, 60), st.integers(0, 500))
def test_runs_equal_stepping(count, context, steps, longer):
    shape = decodes(count, context)
    if count > 1:
        shape.decode_context_max += longer
        shape.decode_context_sum += longer
    run = BACKEND.decode_run_ns(shape, steps)
    assert np.array_equal(run, stepped_decode_run(BACKEND, shape, steps))


def test_parts_of_the_layers_add_up():
    whole = decodes(8, 512)
    first, rest = decodes(8, 512), decodes(8, 512)
    first.layers, rest.start_layer = 10, 10
    parts = BACKEND.iteration_ns(first) + BACKEND.iteration_ns(rest)
    assert parts == BACKEND.iteration_ns(whole)


def test_a_saved_table_works_without_the_wheel(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    place = table_path(str(tmp_path), WANTED)
    assert place == tmp_path / "Llama-3.1-8B-h100_sxm-tp1-vllm-bfloat16-kv-bfloat16.json"
    save_table(place, TABLE)
    assert load_table(place) == TABLE
    assert find_table(str(tmp_path), WANTED) == TABLE
    with pytest.raises(InputError, match=rf"pip install 'emu-llm.aiconfigurator.' .{WHEEL}"):
        find_table(str(tmp_path), wanted(tensor_parallel=2))


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_parallel": 4},
        {"dtype": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"engine": "sglang"},
        {"engine": "vllm/next"},
        {"gpu": "L40S"},
        {"spec": lookup_model("Qwen3-8B")},
    ],
)
def test_a_table_for_something_else_is_refused_and_has_another_name(tmp_path: Path, change):
    file = tmp_path / "table.json"
    save_table(file, TABLE)
    other = wanted(**change)
    with pytest.raises(InputError, match=r"the table is for .*; wanted "):
        find_table(str(file), other)
    assert table_path(str(tmp_path), other) != table_path(str(tmp_path), WANTED)


def test_errors_name_what_is_wrong(tmp_path: Path):
    file = tmp_path / "table.json"
    file.write_text('{"format": "other"}')
    with pytest.raises(InputError, match=r"latency\.path: "):
        load_table(file)
    with pytest.raises(InputError, match="no data for V100-SXM2-32GB"):
        find_table("", wanted(gpu="V100-SXM2-32GB"))
    with pytest.raises(InputError, match=r"latency\.tables: 'tgi' is none of vllm"):
        find_table("", wanted(engine="tgi"))
    with pytest.raises(InputError, match="no tables of float32"):
        find_table("", wanted(dtype="float32"))


def test_released_eight_bit_checkpoints_are_scaled_by_blocks():
    deepseek = wanted(spec=lookup_model("DeepSeek-V3")).provenance()
    assert (deepseek.weight_dtype, deepseek.expert_dtype) == ("fp8_block", "fp8_block")
    assert wanted(dtype="fp8").provenance().weight_dtype == "fp8"
    gpt_oss = wanted(spec=lookup_model("gpt-oss-20b")).provenance()
    assert (gpt_oss.weight_dtype, gpt_oss.expert_dtype) == ("bfloat16", "w4a16_mxfp4")


def test_plain_architectures_have_a_config_and_others_are_refused():
    config = hf_config(lookup_model("CodeLlama-34b-Instruct-hf"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"]) == (8192, 48)
    mixtral = hf_config(lookup_model("Mixtral-8x7B-v0.1"))
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (8, 2)
    with pytest.raises(InputError, match="latent attention"):
        hf_config(lookup_model("DeepSeek-V2-Lite"))
    with pytest.raises(InputError, match="sliding windows"):
        hf_config(lookup_model("gemma-2-9b"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core"
)
def test_types_and_any_model_reach_the_database():
    def first(**changes) -> float:
        table = find_table("", wanted(**changes))
        return AiconfiguratorBackend(table, 32).iteration_ns(decodes(8, 8192))

    plain = first()
    assert first(dtype="fp8") < 0.85 * plain
    assert first(kv_cache_dtype="fp8") < 0.9 * plain
    assert first(engine="sglang") != plain
    assert first(spec=lookup_model("Llama-2-7b")) > plain  # KV of 32 heads; not in the wheel
    with pytest.raises(InputError, match=r"does not cover .*int4"):
        first(dtype="int4")


def test_every_system_is_a_gpu_of_the_catalogue():
    assert all(lookup_gpu(name).name == name for name in SYSTEMS)


def test_pairs_that_the_wheel_covers_come_from_its_own_matrix(tmp_path: Path, monkeypatch):
    folder = tmp_path / "aiconfigurator_core"
    matrix = folder / "systems" / "support_matrix" / "h100_sxm.csv"
    matrix.parent.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    rows = [
        "HuggingFaceID,Backend,Status",
        "a/One,vllm,PASS",
        "b/Two,vllm,FAIL",
        "c/Three,sglang,PASS",
    ]
    matrix.write_text("\n".join(rows) + "\n")
    monkeypatch.delitem(sys.modules, "aiconfigurator_core", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert covered_pairs() == {GPU: ["a/One"]}


def test_stages_are_refused_before_a_table_is_looked_for() -> None:
    tables = {
        "latency": {"backend": "aiconfigurator"},
        "nodes": [{"gpus": 2}],
        "replicas": [{"pipeline_parallel": 2}],
    }
    plan = make_plan(config_from_dict(tables))
    with pytest.raises(InputError, match="has no pipeline stages"):
        make_latency(plan.replicas[0].latency_context(plan.config))
