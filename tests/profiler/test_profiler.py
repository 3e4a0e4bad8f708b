"""The profiler: grids, tables and files with a fake device; real kernels in miniature on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from emu.apps.profiler import files
from emu.apps.profiler.__main__ import main as profiler_main
from emu.apps.profiler.grid import COARSE, Limits, attention_points, in_levels, token_counts
from emu.apps.profiler.measure import ProfileOptions, Tables, hardware_name, measure, profile
from emu.apps.profiler.shapes import architecture, dense_layers, shapes_of
from emu.apps.profiler.timers import CudaTimer
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cli import main
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.latency.profile.backend import ProfileBackend
from emu.latency.profile.bundle import read_bundle
from emu.latency.profile.rows import ProfileModel

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


def test_points_that_exhaust_the_memory_are_left_out(monkeypatch):
    _, whole = run()
    kept = Device.attention

    def attention(device, point):
        if point[0] == 64:
            raise MemoryError
        return kept(device, point)

    monkeypatch.setattr(Device, "attention", attention)
    _, tables = run()
    assert tables.left_out == sum(point[0] == 64 for point in whole.attention) > 0
    assert tables.attention == {p: us for p, us in whole.attention.items() if p[0] != 64}


class Stream:
    """A CUDA device as far as a timer sees it: a host that launches, a queue that runs behind it.

    Launching takes `launch_us`; what is launched runs when the one before it has ended.
    """

    def __init__(self, launch_us: float, write_us: float) -> None:
        self.launch_us, self.write_us = launch_us, write_us
        self.host_us = self.device_us = 0.0
        self.log: list[str] = []
        self.cuda = self

    def launch(self, name: str, us: float) -> None:
        self.host_us += self.launch_us
        self.device_us = max(self.device_us, self.host_us) + us
        self.log.append(name)

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.device_us)
        self.log.append("synchronize")

    def get_device_properties(self, device: int) -> object:
        return object()

    def empty(self, size: int, *, dtype: object, device: str) -> Stream:
        assert device == "cuda"
        return self

    int8 = "int8"

    def zero_(self) -> None:
        self.launch("write", self.write_us)

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at_us: float | None = None

    def record(self) -> None:
        self.stream.launch("event", 0.5)
        self.at_us = self.stream.device_us

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self.at_us is not None
        assert end.at_us is not None
        assert self.stream.log[-1] == "synchronize", "asked before the device was there"
        return (end.at_us - self.at_us) / 1000


@pytest.mark.parametrize("write_us", [20.0, 60.0, 500.0])
def test_a_call_is_timed_on_the_device_alone(monkeypatch, write_us: float):
    """Two kernels of 4 us, launched at 10 us each: the host's time is not in the figure."""
    monkeypatch.setattr("emu.apps.profiler.timers._AWAKE_S", 0.0)
    stream = Stream(launch_us=10.0, write_us=write_us)
    timer = CudaTimer(stream, 3)
    stream.log.clear()
    assert timer.time_us(lambda: [stream.launch("kernel", 4.0) for _ in range(2)]) == (
        pytest.approx(8.0)
    )
    assert stream.log[:4] == ["kernel"] * 4, "two calls warm up"
    assert stream.log[4] == "write", "the caches are cold"
    assert stream.log.count("event") == 6


@pytest.mark.parametrize("is_lower_right", [True, False])
def test_real_calls_of_a_cuda_device_on_a_cpu(tmp_path: Path, monkeypatch, is_lower_right: bool):
    """All that is asked of PyTorch on a GPU, with events and the flash kernel stood in for.

    A flash kernel that masks otherwise than engines do is not taken.
    """
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra `profiler`)")
    calls = []

    def flash(query, key, value, cum_q, cum_k, new, whole, dropout, is_causal, debug):
        assert (cum_q, cum_k, dropout, debug) == (None, None, 0.0, False)
        assert (query.shape[1], key.shape[1]) == (new, whole)
        calls.append((tuple(query.shape), tuple(key.shape), is_causal))
        repeats = query.shape[2] // key.shape[2]
        diagonal = whole - new if is_lower_right else 0
        seen = torch.ones(new, whole, dtype=torch.bool).tril(diagonal) if is_causal else None
        parts = [part.transpose(1, 2).repeat_interleave(repeats, 1) for part in (key, value)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return (attend(query.transpose(1, 2), *parts, attn_mask=seen).transpose(1, 2),)

    class Cuda(Stream):
        OutOfMemoryError = MemoryError

        def is_available(self) -> bool:
            return True

        def get_device_name(self, device: int) -> str:
            return "NVIDIA H200"

        def mem_get_info(self) -> tuple[int, int]:
            return 4_000_000, 8_000_000

        def empty_cache(self) -> None:
            self.log.append("empty_cache")

    class Torch:
        cuda = Cuda(launch_us=1.0, write_us=100.0)
        ops = SimpleNamespace(aten=SimpleNamespace(_flash_attention_forward=flash))

        def empty(self, size: int, **options: object) -> Cuda:
            return self.cuda

        def __getattr__(self, name: str):
            found = getattr(torch, name)
            if name not in ("randn", "randint", "ones"):
                return found
            return lambda *given, device, **options: found(*given, **options)

    monkeypatch.setattr("emu.apps.profiler.measure.import_torch", Torch)
    monkeypatch.setattr("emu.apps.profiler.timers._AWAKE_S", 0.0)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    options = ProfileOptions(
        model="tiny/Tiny", hf_config=str(config), out=str(tmp_path), tp=(1, 2), budget_s=0,
        repeats=1, limits=SMALL,
    )  # fmt: skip
    directory = profile(options)
    assert directory == tmp_path / lookup_gpu("H200").name / "tiny" / "Tiny" / "bf16"
    for tp in (1, 2):
        assert read_bundle(directory, tp).dense["down_proj"].at(64) > 0
    kernel = yaml.safe_load((directory / "meta.yaml").read_text())["kernels"]["attention"]
    if not is_lower_right:
        assert kernel.startswith("scaled_dot_product_attention")
        return
    assert kernel == "aten flash attention, grouped heads"
    assert ((1, 64, 4, 16), (1, 320, 2, 16), True) in calls, "64 tokens over 256"
    assert ((8, 1, 4, 16), (8, 257, 2, 16), False) in calls, "8 decodes over 256 and themselves"
    assert Torch.cuda.log.count("empty_cache") == 2


def test_tables_come_back_through_the_reader(tmp_path: Path):
    _, tables = run()
    shapes = shapes_of(LLAMA, 1)
    files.write_curves(tmp_path / "tp1" / "dense.csv", "tokens", tables.dense)
    files.write_curves(tmp_path / "tp1" / "per_sequence.csv", "sequences", tables.per_sequence)
    files.write_attention(tmp_path / "tp1" / "attention.csv", tables.attention)
    files.write_yaml(tmp_path / "architecture.yaml", architecture(shapes))
    files.write_yaml(
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
    assert hardware_name("NVIDIA H100 80GB HBM3") == lookup_gpu("H100").name
    assert hardware_name("NVIDIA H100 NVL") == lookup_gpu("H100-NVL").name
    assert lookup_gpu("H100-NVL").name != lookup_gpu("H100").name, "another chip"
    assert hardware_name("NVIDIA GeForce RTX 3090 Ti") == "RTX-3090-Ti"
    assert hardware_name("Graphics Device") == "GPU"


def test_without_torch_the_extra_is_named(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["profile", "--out", str(tmp_path)]) == 2
    assert "pip install 'emu-llm[profiler]'" in capsys.readouterr().err
    assert profiler_main(["--tp", "x"]) == 2
    assert "--tp: expected numbers" in capsys.readouterr().err


def test_it_imports_little():
    """`python -m emu.apps.profiler` runs where only torch, numpy, pyyaml and msgspec are installed."""
    code = "import sys, emu.apps.profiler.__main__; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"uvloop", "anyio", "cyclopts", "rich", "plotly"} & set(found.stdout.split())


def test_real_kernels_in_miniature(tmp_path: Path):
    pytest.importorskip("torch", reason="PyTorch is not installed (extra `profiler`)")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    directory = profile(
        ProfileOptions(
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
