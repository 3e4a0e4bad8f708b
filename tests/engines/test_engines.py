"""Engines by name and version: what a configuration may say, and what a run is bound to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.catalogue.model import ModelSpec
from emu.cluster.plan import ReplicaPlan, make_plan
from emu.config.engine_words import ENGINES, EngineWords, engine_words
from emu.config.load import config_from_dict, config_from_text, effective_dict
from emu.config.schema import SchedulerTable
from emu.engines.bundle import Engine, Server
from emu.engines.registry import (
    BUNDLES,
    engine_named,
    engine_text,
    find_engine,
    model_from_file,
    nearest_version,
)
from emu.errors import InputError
from emu.kv.engine_memory import EngineMemory, MemoryRule
from emu.latency.coefficients import is_measured, kernels_of
from emu.latency.context import KernelPaths, PlainKernels
from emu.latency.engine import EngineModel
from emu.latency.posterior import PARAMETERS
from emu.runs.run_json import with_limits

ENGINE = BUNDLES["vllm-0.15"].model


def replica(text: str, place: Path = Path(), *overrides: str) -> ReplicaPlan:
    """The first replica of a configuration without a workload."""
    whole = f"[workload.synthetic]\nrequests = 1\n{text}"
    return make_plan(config_from_text(whole, "c.toml", overrides, place), "c.toml").replicas[0]


@pytest.mark.parametrize("without", ['[engine]\nname = "none"', "[latency]\nhost_overhead = false"])
@pytest.mark.parametrize(
    ("latency", "engine", "problem"),
    [
        ("prompt_token_us = 0", "", "prompt_token_us: needs an engine, whose front end encodes"),
        ("prompt_token_us = 0.5", "", "prompt_token_us: needs an engine, whose front end encodes"),
        ("enforce_eager = true", "", "enforce_eager: needs an engine that launches kernels"),
        ("", "stream_interval = 2", "stream_interval: needs an engine, whose front end sends"),
        ("", "stream_interval = 1", ""),
        ("prompt_token_us = -1", "", ""),
    ],
)
def test_what_only_an_engine_does_is_refused_without_one(
    without: str, latency: str, engine: str, problem: str
) -> None:
    has_latency = without.startswith("[latency]")
    text = without + f"\n{latency if has_latency else engine}\n"
    text += f"[engine]\n{engine}\n" if has_latency else f"[latency]\n{latency}\n"
    if problem:
        with pytest.raises(InputError, match=problem):
            replica(text)
    else:
        assert replica(text).bound is None


# --- names ----------------------------------------------------------------------------------------
def test_the_configuration_knows_the_engines_that_there_are() -> None:
    said = {(name, version) for name, words in ENGINES.items() for version in words.versions}
    assert said == {(engine.name, engine.version) for engine in BUNDLES.values()}
    for name, words in ENGINES.items():
        assert words.default == words.versions[-1], "the newest"
        assert find_engine(name).version == words.default
        assert all(label == engine.label == engine.model.name for label, engine in BUNDLES.items())


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            'name = "vlm"',
            ':4: engine.name: expected one of vllm, sglang, tensorrt-llm, none; got "vl',
        ),
        (
            'name = "trt"',
            ':4: engine.name: expected one of vllm, sglang, tensorrt-llm, none; got "tr',
        ),
        (
            'name = "trtllm"',
            ':4: engine.name: expected one of vllm, sglang, tensorrt-llm, none; got "trtllm"; did you mean tensorrt-llm?',
        ),
        (
            'version = "0.12"',
            ':4: engine.version: vllm "0.12" is not modeled; modeled are 0.11, 0.1',
        ),
        ('name = "none"\nversion = "0.15"', ":5: engine.version: engine none has no versions"),
        ('name = "none"\nlearned = "c.toml"', ":5: engine.learned: engine none has no constants"),
        ('learned = "missing.toml"', ":4: engine.learned: no such file"),
        ("nmae = 1", ":4: engine.nmae: unknown key; did you mean name?"),
    ],
)
def test_an_engine_that_is_not_modeled_is_refused(tmp_path: Path, table: str, problem: str) -> None:
    (tmp_path / "c.toml").write_text("")
    with pytest.raises(InputError) as refused:
        replica(f"[engine]\n{table}\n", tmp_path)
    assert str(refused.value).startswith(f"c.toml{problem}")


@pytest.mark.parametrize(
    ("value", "now"),
    [
        ("vllm-0.15", 'name = "vllm", version = "0.15"'),
        ("none", 'name = "none"'),
        ("mine.toml", 'learned = "mine.toml"'),
        ("vllm-9", "name, version, learned"),
    ],
)
def test_the_key_of_before_is_refused_with_the_new_spelling(value: str, now: str) -> None:
    told = f"engines have a table of their own now: [engine] {now}"
    with pytest.raises(InputError) as refused:
        replica(f'[latency]\nengine = "{value}"\n')
    assert str(refused.value) == f"c.toml:4: latency.engine: {told}"
    with pytest.raises(InputError, match=r"--set: latency\.engine: engines have a table"):
        replica("", Path(), f"latency.engine={value}")
    with pytest.raises(InputError, match=r"replicas\.0\.latency\.engine: engines have a table"):
        replica(f'[[replicas]]\nlatency = {{ engine = "{value}" }}\n')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm-0.15", ("vllm", "0.15")),
        ("vLLM 0.15.1", ("vllm", "0.15")),
        ("vllm==0.19.0rc1", ("vllm", "0.19")),
        ("vllm/v0.11.2", ("vllm", "0.11")),
        ("VLLM", ("vllm", "")),
        ("0.15.1", ("", "0.15")),
        ("TRTLLM", ("tensorrt-llm", "")),
        ("trtllm 1.1.0", ("tensorrt-llm", "1.1")),
        ("TensorRT-LLM-1.0", ("tensorrt-llm", "1.0")),
        ("SGLang v0.5.4", ("sglang", "0.5.4")),
        ("none", ("none", "")),
        ("", ("", "")),
    ],
)
def test_readers_accept_the_spellings_of_other_programs(text: str, words: tuple[str, str]) -> None:
    assert engine_words(text) == words


def test_a_server_of_another_version_is_learned_from_the_nearest_older_one() -> None:
    asked = ("0.9", "0.11", "0.14", "0.15", "0.18", "0.30")
    assert [nearest_version("vllm", v) for v in asked] == [
        *("0.11", "0.11", "0.11", "0.15", "0.15", "0.19")
    ]


# --- what a replica is bound to -------------------------------------------------------------------
def test_the_version_stands_in_the_configuration_of_a_run() -> None:
    config = config_from_dict({})
    assert config.engine.version == ENGINES["vllm"].default
    assert config_from_dict({"engine": {"version": "0.11"}}).engine.label == "vllm-0.11"
    assert config_from_dict({"engine": {"name": "none"}}).engine.label == "none"


def test_a_group_may_have_another_engine_than_the_rest() -> None:
    tables: dict[str, Any] = {
        "engine": {"version": "0.11"},
        "replicas": [{}, {"engine": {"version": "0.19"}}, {"engine": {"name": "none"}}],
    }
    found = make_plan(config_from_dict(tables)).replicas
    assert [one.engine_label for one in found] == ["vllm-0.11", "vllm-0.19", "none"]
    assert [one.front_end is not None for one in found] == [True, True, False]


def test_a_models_replicas_have_its_engine() -> None:
    tables = {"models": [{"colocated": 1, "engine": {"version": "0.11"}}]}
    assert make_plan(config_from_dict(tables)).replicas[0].engine_label == "vllm-0.11"


def test_a_server_sends_tokens_in_groups() -> None:
    one = replica('[engine]\nname = "tensorrt-llm"\nstream_interval = 20')
    assert one.engine is not None
    assert one.engine.stream_interval == 20
    assert one.bound is not None
    assert one.bound.constants.stream_interval == 1


@pytest.mark.parametrize(
    "text",
    [
        '[engine]\nname = "none"\nstream_interval = 20',
        "[engine]\nstream_interval = 20\n[latency]\nfront_end = false",
        "[engine]\nstream_interval = 20\n[latency]\nhost_overhead = false",
    ],
)
def test_groups_of_tokens_without_a_front_end_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="stream_interval"):
        replica(text)


def test_simulators_schedulers_go_with_any_engine() -> None:
    for policy in ("vllm_v0", "sarathi", "orca", "lightllm", "faster_transformer", "fcfs"):
        one = replica(f'[scheduler]\npolicy = "{policy}"\n')
        assert one.engine_label.startswith("vllm")
        assert not one.runs_own_scheduler
        assert not one.front_end, "the API server belongs to the engine's own scheduler"
    assert replica('[engine]\nname = "none"\n').scheduler.policy == "vllm"


# --- limits that are not given --------------------------------------------------------------------
@pytest.mark.parametrize("version", ENGINES["vllm"].versions)
@pytest.mark.parametrize(
    ("gpu", "limits"),
    [
        ("H100-SXM5-80GB", (1024, 8192)),
        ("MI300X", (1024, 8192)),
        ("A800-SXM4-80GB", (1024, 8192)),
        ("A100-SXM4-80GB", (256, 2048)),
        ("A100-SXM4-40GB", (256, 2048)),
        ("L40S", (256, 2048)),
    ],
)
def test_limits_are_those_of_the_server_on_the_gpu(
    version: str, gpu: str, limits: tuple[int, int]
) -> None:
    tables: dict[str, Any] = {
        "engine": {"version": version},
        "nodes": [{"gpu": gpu, "gpus": 2}],
        "replicas": [{"role": "prefill"}, {"role": "decode"}],
    }
    found = make_plan(config_from_dict(tables)).replicas
    assert [limits_of(one) for one in found] == [limits, limits]


@pytest.mark.parametrize(("gib", "limits"), [(70.71, (1024, 8192)), (70.70, (256, 2048))])
def test_what_the_driver_reports_counts(gib: float, limits: tuple[int, int]) -> None:
    # Of a GPU without a known figure, 99 % is reported.
    gpu = {"name": "mine", "memory_gib": gib, "memory_gbytes_per_s": 2000, "tflops_fp16": 300}
    tables: dict[str, Any] = {"nodes": [{"gpu": gpu, "gpus": 1}]}
    assert limits_of(make_plan(config_from_dict(tables)).replicas[0]) == limits
    gpu["name"] = "NVIDIA A100 of mine"
    assert limits_of(make_plan(config_from_dict(tables)).replicas[0]) == (256, 2048)


def gpu_of(**figures: object) -> GpuSpec:
    """A GPU that a configuration describes."""
    gpu = {"memory_gib": 90, "memory_gbytes_per_s": 2000, "tflops_fp16": 300, **figures}
    return make_plan(config_from_dict({"nodes": [{"gpu": gpu, "gpus": 1}]})).replicas[0].gpu


def test_a_gpu_like_another_has_its_kernels_host_and_other_figures() -> None:
    other, mine = lookup_gpu("GB300"), gpu_of(like="gb300", name="mine", tflops_fp8=700)
    assert (mine.name, mine.kind, mine.architecture) == ("mine", "GB300", "blackwell")
    assert (mine.memory_gbytes_per_s, mine.tflops_fp8) == (2000, 700)
    assert (mine.tflops_fp4, mine.tdp_w) == (other.tflops_fp4, other.tdp_w)
    assert mine.reported_gib == pytest.approx(other.reported_gib * 90 / other.memory_gib)
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        assert kernels_of(mine, engine).surfaces == kernels_of(other, engine).surfaces
        assert is_measured(other, engine) and not is_measured(mine, engine)
    bare = gpu_of(like="GB300", nvlink_gbps=0, tflops_fp8=0, tflops_fp4=0, sm_count=0)
    assert (bare.nvlink_gbps, bare.tflops_fp8, bare.tflops_fp4, bare.sm_count) == (0, 0, 0, 0)
    assert (mine.nvlink_gbps, mine.pcie_gbps) == (other.nvlink_gbps, other.pcie_gbps)
    with pytest.raises(InputError, match=r"tflops_fp4: H100-SXM5-80GB, .* no kernels of 4 bits"):
        gpu_of(like="H100", tflops_fp4=800)
    alone = gpu_of(name="GB300")
    assert (alone.nvlink_gbps, alone.pcie_gbps, alone.tflops_fp4) == (0, 256, 0)
    assert not kernels_of(alone, "vllm").surfaces.startswith("H"), "nothing of another architecture"
    with pytest.raises(InputError, match=r"nodes\.0\.gpu\.like: .*did you mean"):
        gpu_of(like="GB30")


@pytest.mark.parametrize(
    ("engine", "line", "problem"),
    [
        ("vllm", "output_event_ns = -54000", "output_event_ns: expected 0 to 1e"),
        ("vllm", "weights_time = nan", "weights_time: expected 0.2 to 5"),
        ("sglang", "beside_prompts = inf", "beside_prompts: expected 0.01 to 100"),
        ("sglang", "output_id_ns = -20000000", "output_id_ns: expected 0"),
        ("vllm", "beside_prompts = 2.0", "a constant of sglang, not of vllm"),
        ("vllm", "grace_calls = 2.0", "a constant of sglang and tensorrt-llm, not of vllm"),
        ("tensorrt-llm", "output_id_ns = 1", "a constant of sglang, not of tensorrt-llm"),
    ],
)
def test_a_learned_constant_is_one_of_the_engine_within_its_bounds(
    engine: str, line: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{engine_named(engine).label}"\n{line}\n', encoding="utf-8")
    with pytest.raises(InputError) as refused:
        model_from_file(path)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_may_be_learned_may_be_read(tmp_path: Path) -> None:
    for number, parameter in enumerate(PARAMETERS):
        for value in (parameter.least, parameter.most):
            path = tmp_path / f"{number}{value}.toml"
            told = round(value) if parameter.is_whole else value
            path.write_text(f"{parameter.name} = {told}\n", encoding="utf-8")
            assert msgspec.structs.asdict(model_from_file(path))[parameter.name] == told


@pytest.mark.parametrize("engine", ["sglang-0.5.6", "tensorrt-llm-1.0"])
def test_learned_constants_leave_a_version_its_kernels(engine: str, tmp_path: Path) -> None:
    known = engine_named(engine)
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{engine}"\noutput_event_ns = 70000\n', encoding="utf-8")
    learned = model_from_file(path)
    assert learned.name == "mine"
    gpu = lookup_gpu("H200" if known.name == "sglang" else "B200")
    found = [known.kernels(model).coefficients(gpu).surfaces for model in (known.model, learned)]
    assert found[0] == found[1]
    assert known.version in found[0] or "1.1" in found[0]


@pytest.mark.parametrize(
    ("keys", "longest", "limits"),
    [
        ({"max_num_seqs": 64}, 0, (64, 8192)),
        ({"max_num_batched_tokens": 512}, 0, (512, 512)),
        ({"max_num_seqs": 2}, 100, (2, 200)),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 100}, 0, (300, 100)),
        ({"chunked_prefill": False}, 0, (1024, 131_072)),
        ({"chunked_prefill": False}, 4000, (1024, 8192)),
    ],
)
def test_a_given_limit_stands_and_bounds_the_other(
    keys: dict[str, Any], longest: int, limits: tuple[int, int]
) -> None:
    tables: dict[str, Any] = {"nodes": [{"gpu": "H200", "gpus": 1}], "scheduler": keys}
    tables["model"] = {"max_model_tokens": longest}
    assert limits_of(make_plan(config_from_dict(tables)).replicas[0]) == limits


def limits_of(one: ReplicaPlan) -> tuple[int, int]:
    return one.scheduler.requests_max, one.scheduler.tokens_max


def test_the_configuration_of_a_run_tells_the_limits() -> None:
    large, small = {"gpu": "H100", "gpus": 1}, {"gpu": "L40S", "gpus": 1}
    one = with_its_limits({"nodes": [large]})
    assert one["scheduler"]["max_num_seqs"] == 1024
    assert one["replicas"][0]["scheduler"] == {}
    apart = with_its_limits({"nodes": [large, small], "replicas": [{}, {}]})
    assert apart["scheduler"]["max_num_seqs"] == 0
    found = [group["scheduler"] for group in apart["replicas"]]
    assert found == [
        {"max_num_seqs": 1024, "max_num_batched_tokens": 8192},
        {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
    ]
    # Machines of both kinds under one table: it cannot say, and is the same again anyway.
    mixed = with_its_limits({"nodes": [large, small], "replicas": [{"count": 2}]})
    assert mixed["replicas"][0]["scheduler"] == {}


@pytest.mark.parametrize("policy", ["vllm", "fcfs"])
def test_a_group_of_another_policy_keeps_its_keys(policy: str) -> None:
    other = {"scheduler": {"policy": "fcfs" if policy == "vllm" else "vllm"}}
    tables = {"nodes": [{"gpu": "H100", "gpus": 2}], "replicas": [{}, other]}
    told = with_its_limits({**tables, "scheduler": {"policy": policy}})
    full = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    found = [group["scheduler"] for group in told["replicas"]]
    assert found == [full, other["scheduler"]] if policy == "vllm" else [{}, full | found[1]]
    again = make_plan(config_from_dict(told)).replicas
    assert [one.scheduler.policy for one in again] == [policy, other["scheduler"]["policy"]]


def with_its_limits(tables: dict[str, Any]) -> dict[str, Any]:
    """The configuration as run.json has it; a plan of it is the plan."""
    config = config_from_dict(tables)
    plan = make_plan(config)
    told = effective_dict(with_limits(config, plan))
    again = make_plan(config_from_dict(effective_dict(with_limits(config, plan))))
    assert again.replicas == plan.replicas
    return told


# --- constants in a file --------------------------------------------------------------------------
def test_an_engine_comes_back_from_its_file(tmp_path: Path) -> None:
    changed = msgspec.structs.replace(ENGINE, step_ns=123, sampler="triton")
    path = tmp_path / "mine.toml"
    path.write_text(engine_text(changed, "vllm-0.15"))
    assert model_from_file(path) == msgspec.structs.replace(changed, name="mine")
    one = replica('[engine]\nlearned = "mine.toml"\n', tmp_path)
    assert one.engine_label == "vllm-0.15, mine"
    assert one.engine is not None
    assert one.engine.step_ns == 123


def test_a_file_belongs_to_the_version_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(engine_text(ENGINE, "vllm-0.15"))
    table = '[engine]\nlearned = "mine.toml"\nversion = "{}"\n'
    assert replica(table.format("0.15"), tmp_path).engine_label == "vllm-0.15, mine"
    with pytest.raises(InputError, match=r"engine\.learned: .*mine.toml changes vllm-0.15, not v"):
        replica(table.format("0.19"), tmp_path)


def test_a_file_that_names_no_engine_changes_the_configured_one(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("step_ns = 1\n")
    one = replica('[engine]\nlearned = "mine.toml"\nversion = "0.11"\n', tmp_path)
    assert one.engine == msgspec.structs.replace(BUNDLES["vllm-0.11"].model, name="mine", step_ns=1)


@pytest.mark.parametrize(
    "text", ["step_ns = 'x'", "stepp_ns = 1", "base = 'vllm'", "base = 1", "["]
)
def test_a_wrong_engine_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(InputError, match=r"wrong\.toml"):
        replica('[engine]\nlearned = "wrong.toml"\n', tmp_path)


# --- another engine: one module, one entry ----------------------------------------------
class ToyMemory(msgspec.Struct, frozen=True):
    """Keeps a gigabyte, and the first three blocks."""

    null_blocks: int = 3
    shares_free: bool = False

    def kept(
        self,
        spec: ModelSpec,
        *,
        tp: int,
        element_bytes: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> EngineMemory:
        return EngineMemory(rotary_bytes=0, layers_bytes=0, sampler_bytes=0, context_bytes=1 << 30)


def toy_memory(model: EngineModel) -> MemoryRule:
    return ToyMemory()


def toy_kernels(model: EngineModel) -> KernelPaths:
    return PlainKernels()


def toy_defaults(table: SchedulerTable, server: Server) -> SchedulerTable:
    gpu: GpuSpec = server.gpu
    changes = {"batch_size_cap": int(gpu.memory_gib)}
    return msgspec.structs.replace(table, **changes)


TOY = (
    Engine(
        name="toy",
        model=msgspec.structs.replace(ENGINE, name="toy-1.0", host_step_ns=9_000_000),
        memory=toy_memory,
        kernels=toy_kernels,
        defaults=toy_defaults,
    ),
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setitem(ENGINES, "toy", EngineWords(("1.0",), ("orca",), f"{__name__}:TOY"))
    return TOY[0]


def test_another_engine_brings_scheduler_memory_kernels_and_defaults(toy: Engine) -> None:
    one = replica('[engine]\nname = "toy"\n')
    assert one.engine_label == "toy-1.0"
    assert one.scheduler.policy == "orca", "its own scheduler, without being told"
    assert one.runs_own_scheduler
    assert one.front_end
    assert one.memory.reserve_bytes == 1 << 30
    assert one.num_blocks == one.memory.num_blocks - 3
    assert one.engine is not None
    assert one.engine.host_step_ns == 9_000_000


def test_the_scheduler_of_another_engine_is_refused(toy: Engine) -> None:
    for engine, policy in (("toy", "vllm"), ("vllm", "orca")):
        owner = {"vllm": "vllm", "orca": "toy"}[policy]
        told = f'"{policy}" is the scheduler of engine {owner}; {engine} has'
        with pytest.raises(InputError, match=rf"^c.toml:6: scheduler.policy: {told}"):
            replica(f'[engine]\nname = "{engine}"\n[scheduler]\npolicy = "{policy}"\n')
    with pytest.raises(InputError, match=r"replicas.0.scheduler.policy: "):
        replica('[[replicas]]\nscheduler = { policy = "orca" }\n')
    assert replica('[engine]\nname = "none"\n[scheduler]\npolicy = "orca"\n').bound is None
