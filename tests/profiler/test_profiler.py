"""The profiler: grids, tables and files with a fake device; real kernels in miniature on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cli import main
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.latency.profile import ProfileBackend
from emu.latency.profile_bundle import read_bundle
from emu.latency.profile_rows import ProfileModel
from emu.profiler import bundle, session
from emu.profiler.__main__ import main as profiler_main
from emu.profiler.grid import COARSE, Limits, attention_points, in_levels, token_counts
from emu.profiler.session import Tables, hardware_name, measure
from emu.profiler.shapes import architecture, dense_layers, shapes_of

LLAMA = lookup_model("meta-llama/Llama-3.1-8B")
SMALL = Limits(max_tokens=64, max_sequences=8, max_context=256)

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}  # fmt: skip


class Device:
    """A timer and the operations at once: a call is its own duration in us."""

    def __init__(self) -> None:
        self.calls = 0

    def time_us(self, call):
        self.calls += 1
        return call()

    def layer(self, name, count):
        return lambda: len(name) + 0.5 * count

    def attention(self, point):
        chunk, history, decodes, context = point
        return lambda: 2 + chunk * (0.1 + 0.001 * history) + 0.01 * decodes * context

    def kv_tokens(self, point):
        chunk, history, decodes, context = point
        return (chunk + history if chunk else 0) + decodes * (context + 1)

    def reserve(self, tokens):
        self.reserved = tokens


def run(limits=SMALL, *, time_left=lambda: True, kv_tokens_max=10_000) -> tuple[Device, Tables]:
    device = Device()
    tables = measure(
        shapes_of(LLAMA, 1),
        device,
        device,
        limits,
        kv_tokens_max=kv_tokens_max,
        is_time_left=time_left,
    )
    return device, tables


def test_shapes_of_a_rank():
    whole, half = shapes_of(LLAMA, 1), shapes_of(LLAMA, 2)
    assert (whole.qkv_width, whole.up_width, whole.q_width) == (6144, 28672, 4096)
    assert (half.qkv_width, half.ffn, half.vocab) == (3072, 7168, 64128)
    assert half.whole_vocab == 128256
    assert shapes_of(LLAMA, 16).kv_heads == 1, "fewer key heads than ranks are repeated"
    assert "qk_norm" in dense_layers(shapes_of(lookup_model("Qwen/Qwen3-32B"), 1))


@pytest.mark.parametrize(
    ("name", "tp", "problem"),
    [
        ("Qwen/Qwen3-30B-A3B", 1, "has mixtures of experts"),
        ("meta-llama/Llama-3.1-8B", 3, "do not divide by 3"),
    ],
)
def test_models_that_cannot_be_profiled(name, tp, problem):
    with pytest.raises(InputError, match=problem):
        shapes_of(lookup_model(name), tp)


def test_every_point_is_measured_once_and_coarse_ones_first():
    points = list(in_levels(SMALL))
    assert len({(table, point) for _, table, point in points}) == len(points)
    levels = [level for level, _, _ in points]
    assert levels == sorted(levels)
    whole = Limits()
    assert set(token_counts(whole, COARSE)) <= set(token_counts(whole, 2))
    assert token_counts(whole, COARSE)[-1] == 2048
    for level in (0, 1, 2):
        axes = list(attention_points(whole, level))
        assert (2048, 0, 0, 0) in axes
        assert (0, 0, 256, 16384) in axes
        assert (0, 0, 0, 0) not in axes


def test_the_coarse_grid_is_measured_without_any_time():
    device, tables = run(time_left=lambda: False)
    coarse = {point for level, _, point in in_levels(SMALL) if level == COARSE}
    assert tables.level == COARSE
    assert set(tables.attention) == {point for point in coarse if isinstance(point, tuple)}
    whole, finest = run()
    assert finest.level == 2
    assert whole.calls > device.calls


def test_a_level_of_attention_that_is_cut_short_is_dropped():
    left = iter([True] * 120)
    _, tables = run(time_left=lambda: next(left, False))
    _, coarse = run(time_left=lambda: False)
    assert tables.level in (0, 1)
    assert len(tables.attention) in {
        len(coarse.attention),
        len([p for level, t, p in in_levels(SMALL) if level <= 1 and t == "attention"]),
    }


def test_points_that_do_not_fit_are_left_out_and_counted():
    _, tables = run(kv_tokens_max=1000)
    assert tables.left_out > 0
    assert max(Device().kv_tokens(point) for point in tables.attention) <= 1000


def test_tables_come_back_through_the_reader(tmp_path: Path):
    _, tables = run()
    shapes = shapes_of(LLAMA, 1)
    bundle.write_curves(tmp_path / "tp1" / "dense.csv", "tokens", tables.dense)
    bundle.write_curves(tmp_path / "tp1" / "per_sequence.csv", "sequences", tables.per_sequence)
    bundle.write_attention(tmp_path / "tp1" / "attention.csv", tables.attention)
    bundle.write_yaml(tmp_path / "architecture.yaml", architecture(shapes))
    bundle.write_yaml(
        tmp_path / "meta.yaml",
        {"hardware": "Fake", "model": "m", "variant": "bf16", "architecture": "llama"},
    )
    read = read_bundle(tmp_path, 1)
    assert read.dense["qkv_proj"].at(16) == 1000 * (len("qkv_proj") + 8)
    assert read.attention.at(32, 64, 4, 256) == round(1000 * (2 + 32 * 0.164 + 10.24))
    backend = ProfileBackend(read, ProfileModel(layers=2, hidden=64))
    one = backend.iteration_ns(BatchShape(prefill_new=[16], prefill_context=[0], sequences=1))
    names = ["layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj", "act_fn", "down_proj"]  # fmt: skip
    block = sum(map(len, names)) + 8 * 8 + 2 + 1.6
    head = len("embedding") + len("final_layernorm") + 16 + len("lm_head") + len("sampler") + 1
    assert one == round(1000 * (2 * block + head))


def test_names_of_devices():
    assert hardware_name("NVIDIA H200") == lookup_gpu("H200").name
    assert hardware_name("NVIDIA A100-SXM4-80GB") == lookup_gpu("A100-SXM4-80GB").name
    assert hardware_name("NVIDIA GeForce RTX 4090") == "RTX4090"
    assert hardware_name("NVIDIA Unheard-Of 9 GB") == "Unheard-Of-9-GB"


def test_without_torch_the_extra_is_named(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["profile", "--out", str(tmp_path)]) == 2
    assert "pip install 'emu[profiler]'" in capsys.readouterr().err
    assert profiler_main(["--tp", "x"]) == 2
    assert "--tp: expected numbers" in capsys.readouterr().err


def test_it_imports_little():
    """`python -m emu.profiler` runs where only torch, numpy, pyyaml and msgspec are installed."""
    code = (
        "import sys, emu.profiler.__main__; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"uvloop", "anyio", "cyclopts", "rich", "plotly"} & set(found.stdout.split())


def test_real_kernels_in_miniature(tmp_path: Path):
    pytest.importorskip("torch", reason="PyTorch is not installed (extra `profiler`)")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    directory = session.profile(
        session.ProfileOptions(
            model="tiny/Tiny",
            hf_config=str(config),
            out=str(tmp_path / "bundles"),
            tp=(1, 2),
            device="cpu",
            budget_s=0,
            repeats=1,
            limits=SMALL,
        )
    )
    assert directory == tmp_path / "bundles" / "CPU" / "tiny" / "Tiny" / "bf16"
    assert yaml.safe_load((directory / "meta.yaml").read_text())["tp_degrees"] == [1, 2]
    for tp in (1, 2):
        read = read_bundle(directory, tp)
        assert read.attention.at(64, 128, 4, 100) > 0
        assert read.dense["down_proj"].at(64) > 0
