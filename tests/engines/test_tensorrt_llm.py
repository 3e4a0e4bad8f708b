"""TensorRT-LLM as an engine: what its versions take when nothing is said, and runs with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.plan import ReplicaPlan, make_plan
from emu.config.load import config_from_dict, config_from_text, effective_dict
from emu.config.schema import TensorrtLlmTable
from emu.engines.registry import engine_named, nearest_version
from emu.errors import InputError
from emu.kv.memory import Demand, engine_plan
from emu.latency.base import BatchShape
from emu.latency.coefficients import kernels_of
from emu.latency.engine import is_captured, padded
from emu.latency.kernels.operations import Ops
from emu.latency.make_roofline import engine_steps
from emu.runs.run_json import with_limits
from emu.runs.runner import execute
from emu.units import GIB

TRTLLM, VLLM = engine_named("tensorrt-llm"), engine_named("vllm")


def replica(ranks: int = 1, version: str = "", **scheduler: object) -> ReplicaPlan:
    tables: dict[str, Any] = {
        "engine": {"name": "tensorrt-llm", "version": version},
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8}],
        "replicas": [{"tensor_parallel": ranks}],
    }
    if scheduler:
        tables["scheduler"] = scheduler
    return make_plan(config_from_dict(tables)).replicas[0]


def table_of(one: ReplicaPlan) -> TensorrtLlmTable:
    assert isinstance(one.scheduler, TensorrtLlmTable)
    return one.scheduler


@pytest.mark.parametrize(
    ("version", "sizes", "known"),
    [
        ("1.0", "tensorrt-llm", "off"),
        ("1.2", "tensorrt-llm", "off"),
        ("", "tensorrt-llm-1.3", "on"),
    ],
)
def test_a_server_takes_the_same_on_all_gpus_and_versions_differ(
    version: str, sizes: str, known: str
) -> None:
    one = replica(version=version)
    table = table_of(one)
    assert (table.max_batch_size, table.max_num_tokens, table.tokens_per_block) == (2048, 8192, 32)
    assert (table.block_size, table.gpu_memory_utilization) == (32, 0.9)
    assert table.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert table.length_ends_known == known
    assert one.engine is not None
    assert (one.engine.graph_tokens_max, one.engine.graph_padding) == (128, False)
    assert one.engine.graph_sizes == sizes
    assert one.engine_label == f"tensorrt-llm-{version or '1.3'}"
    assert one.schedules_ahead
    assert one.front_end


def test_a_smaller_step_has_fewer_requests() -> None:
    table = table_of(replica(max_num_tokens=512))
    assert (table.max_batch_size, table.max_num_tokens) == (512, 512)


def test_other_programs_name_versions_in_full() -> None:
    assert engine_named("TRTLLM 1.2.0rc6.post1").label == "tensorrt-llm-1.2"
    assert engine_named("trtllm").label == "tensorrt-llm-1.3"
    assert [nearest_version("tensorrt-llm", one) for one in ("0.20", "1.1", "1.4")] == [
        *("1.0", "1.1", "1.3")
    ]


# --- memory ---------------------------------------------------------------------------------------
def test_kv_is_a_part_of_what_is_free_at_the_peak() -> None:
    one = replica(free_gpu_memory_fraction=0.8)
    memory = one.memory
    free = int(one.gpu.reported_gib * GIB) - memory.weight_bytes_rank - memory.reserve_bytes
    assert memory.kv_bytes_rank == int(free * 0.8)
    assert memory.num_blocks == memory.kv_bytes_rank // (32 * (128 << 10))
    vllm = make_plan(config_from_dict({"nodes": [{"gpu": "H100-SXM5-80GB"}]})).replicas[0]
    assert memory.weight_bytes_rank == vllm.memory.weight_bytes_rank


def test_blocks_of_a_published_log() -> None:
    """DeepSeek's shape, TP 8 on H200: a peak of 91.46 GiB leaves 41.11 GiB at 0.85."""
    spec = lookup_model("deepseek-ai/DeepSeek-V3")
    weights = engine_plan(spec, 200.0, Demand(tp=8, exact_weights=True)).weight_bytes_rank
    demand = Demand(
        tp=8,
        kv_cache_dtype="fp8",
        block_size=32,
        utilization=0.85,
        reserve_bytes=int(91.46 * GIB) - weights,
        exact_weights=True,
        of_free=True,
    )
    plan = engine_plan(spec, 139.81, demand)
    assert plan.kv_bytes_token_rank == 35_136
    assert plan.kv_bytes_rank / GIB == pytest.approx(41.11, rel=0.02)


# --- graphs ---------------------------------------------------------------------------------------
def test_graphs_have_holes_without_padding() -> None:
    asked = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
    assert [is_captured(one, 128) for one in asked] == [
        *(True, True, True, False, False, True, False, False, True, False)
    ]
    assert is_captured(200, 200)
    asked = (3, 9, 33, 127, 129, 200, 300, 500, 513)
    assert [padded(one, 512, "tensorrt-llm") for one in asked] == [
        *(4, 16, 40, 128, 256, 256, 512, 512, 513)
    ]
    assert [padded(one, 500, "tensorrt-llm-1.3") for one in asked] == [
        *(4, 16, 40, 128, 192, 256, 320, 500, 513)
    ]


def decode(count: int) -> BatchShape:
    return BatchShape(None, None, count, 500 * count, 500, 500, count)


@pytest.mark.parametrize(
    ("keys", "eager"),
    [
        ({}, [False, True, False, True, True]),
        ({"cuda_graph_padding": True}, [False, False, False, False, True]),
        (
            {"cuda_graph_padding": True, "cuda_graph_max_batch_size": 256},
            [False, False, False, False, False],
        ),
    ],
)
def test_what_is_not_captured_is_launched_kernel_by_kernel(
    keys: dict[str, object], eager: list[bool]
) -> None:
    one = replica(**keys)
    config = config_from_dict({"engine": {"name": "tensorrt-llm"}})
    steps = engine_steps(one.latency_context(config))
    assert steps is not None
    assert one.engine is not None
    launches_ns = 32 * 9 * one.engine.eager_call_ns
    found = []
    for count in (31, 33, 64, 100, 200):
        least_ns, _ = steps.host_bounds_ns(decode(count))
        host_ns = one.engine.host_step_ns + count * one.engine.host_sequence_ns
        found.append(least_ns - host_ns == launches_ns)
    assert found == eager
    mixed = BatchShape([100], [0], 3, 90, 30, 30, 4)
    assert steps.host_bounds_ns(mixed)[0] >= launches_ns
    assert steps.tokens(103, has_prompts=True) == 103


# --- what is refused ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("block_size = 16", '; "tensorrt-llm" has tokens_per_block'),
        ("gpu_memory_utilization = 0.8", '; "tensorrt-llm" has free_gpu_memory_fraction'),
        ("max_num_seqs = 3", '; "tensorrt-llm" has max_batch_size'),
        ("order = 'fair'", 'order: means nothing with policy = "tensorrt-llm"'),
        ("mem_fraction_static = 0.8", 'it is a key of policy = "sglang"'),
        ("policy = 'vllm'", '"vllm" is the scheduler of engine vllm; tensorrt-llm has "tens'),
        ("attention_dp_config = 3", "unknown key"),
        ("context_chunking_policy = 'EQUAL_PROGRESS'", "with enable_chunked_prefill = false"),
    ],
)
def test_keys_of_others_are_refused(keys: str, problem: str) -> None:
    text = f'[engine]\nname = "tensorrt-llm"\n[scheduler]\n{keys}\n'
    with pytest.raises(InputError) as refused:
        config_from_text(text, "c.toml")
    assert str(refused.value).startswith("c.toml:4: scheduler.")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"replicas": [{"pipeline_parallel": 2}]}, "knows one stage"),
        ({"network": {"tiers": ["cpu"]}}, 'not with policy "tensorrt-llm"'),
        (
            {
                "scheduler": {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.5},
                "replicas": [{"count": 2, "data_parallel_group": "a"}],
            },
            "batch_wait_timeout_iters: means nothing in a data_parallel_group",
        ),
        ({"scheduler": {"tokens_per_block": 24}}, "tokens_per_block: expected a power of two"),
        ({"scheduler": {"max_num_tokens": 16}}, "max_num_tokens: 16 is less than"),
        (
            {"scheduler": {"max_num_tokens": 64, "max_batch_size": 65}},
            "scheduler.max_num_tokens: 64 is less than max_batch_size",
        ),
    ],
)
def test_what_its_scheduler_does_not_know_is_refused(tables: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make_plan(config_from_dict({"engine": {"name": "tensorrt-llm"}, **tables}))


def test_a_run_is_told_what_was_filled_in() -> None:
    for scheduler in ({}, {"disable_overlap_scheduler": True}):
        config = config_from_dict({"engine": {"name": "tensorrt-llm"}, "scheduler": scheduler})
        plan = make_plan(config)
        again = config_from_dict(effective_dict(with_limits(config, plan)))
        assert make_plan(again).replicas[0].scheduler == plan.replicas[0].scheduler


# --- runs -----------------------------------------------------------------------------------------
CONFIG = """\
[engine]
name = "tensorrt-llm"
version = "{version}"
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = 4
{replicas}
[scheduler]
num_blocks = {blocks}
capacity_scheduler_policy = "{policy}"
enable_chunked_prefill = {chunked}
disable_overlap_scheduler = {late}
max_num_tokens = 2048
[workload.synthetic]
requests = 100
{prefix}
arrivals = {{ process = "gamma", rate_per_s = {rate}, cv = 2.0 }}
prompt = {{ median = 300.0, sigma = 1.0, max = 1500 }}
output = {{ median = 60.0, sigma = 0.8, max = 200 }}
"""
COLOCATED = "[[replicas]]"
SPLIT = '[[replicas]]\nrole = "prefill"\ncount = 2\n[[replicas]]\nrole = "decode"\ncount = 2'
GROUP = '[[replicas]]\ncount = 2\ndata_parallel_group = "A"'
SHARED = "prefix_groups = 3\nprefix_tokens = 75"


@pytest.mark.parametrize(
    ("version", "policy", "chunked", "late", "replicas", "blocks", "prefix", "rate"),
    [
        ("1.3", "GUARANTEED_NO_EVICT", "false", "false", COLOCATED, 250, SHARED, 60.0),
        ("1.2", "MAX_UTILIZATION", "true", "false", COLOCATED, 150, SHARED, 90.0),
        ("1.1", "MAX_UTILIZATION", "true", "true", COLOCATED, 150, "", 90.0),
        ("1.0", "STATIC_BATCH", "false", "false", COLOCATED, 4000, "", 30.0),
        ("1.3", "GUARANTEED_NO_EVICT", "false", "false", SPLIT, 300, SHARED, 40.0),
        ("1.3", "GUARANTEED_NO_EVICT", "false", "false", GROUP, 300, "", 40.0),
    ],
)
def test_a_run_with_leaps_is_one_without(
    tmp_path: Path,
    version: str,
    policy: str,
    chunked: str,
    late: str,
    replicas: str,
    blocks: int,
    prefix: str,
    rate: float,
) -> None:
    text = CONFIG.format(
        version=version,
        policy=policy,
        chunked=chunked,
        late=late,
        replicas=replicas,
        blocks=blocks,
        prefix=prefix,
        rate=rate,
    )
    found = []
    for leap in ("true", "false"):
        out = tmp_path / leap
        keys = [f"scheduler.leap={leap}", f"output.dir={out}"]
        execute(config_from_text(text, "c.toml", keys), "c.toml", report=False)
        names = ("requests.csv", "summary.json", "timeseries.csv")
        found.append([(out / name).read_bytes() for name in names])
    assert found[0] == found[1]
    assert found[0][0].count(b"completed") == 100


def test_static_scales_of_8_bits_cost_no_kernel() -> None:
    gpu = lookup_gpu("H200-SXM-141GB")
    llama = lookup_model("meta-llama/Llama-3.3-70B-Instruct")
    rows, shape = 4, (2 * llama.ffn, llama.hidden)
    ours = Ops(gpu, TRTLLM.kernels(TRTLLM.model).coefficients(gpu), 2)
    vllms = Ops(gpu, VLLM.kernels(VLLM.model).coefficients(gpu), 2)
    assert ours.gemm_s(rows, *shape, "fp8") < 0.95 * vllms.gemm_s(rows, *shape, "fp8")
    # Per-tensor scales do not touch products that are scaled block by block.
    plain = Ops(gpu, kernels_of(gpu, "tensorrt-llm"), 2)
    assert ours.gemm_s(rows, *shape, "fp8_block") == plain.gemm_s(rows, *shape, "fp8_block")


def test_buffers_of_collectives_grow_with_the_ranks() -> None:
    """Those of eight ranks take four times as much of each as those of two."""
    model = lookup_model("meta-llama/Llama-3.1-8B", "test", "model")

    def context_bytes(ranks: int) -> int:
        memory = TRTLLM.memory(TRTLLM.model)
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
        return memory.kept(model, tp=ranks, element_bytes=2, **limits).context_bytes

    alone = context_bytes(1)
    of_two = context_bytes(2) - alone
    assert of_two > GIB
    assert [context_bytes(ranks) - alone for ranks in (4, 8)] == [2 * of_two, 4 * of_two]


@pytest.mark.parametrize(
    ("model", "gpu", "problem"),
    [
        ("nvidia/Qwen3-32B-NVFP4", "H100", r"model\.dtype: tensorrt-llm runs no nvfp4 on H100"),
        ("nvidia/Qwen3-8B-FP8", "A100", r"model\.dtype: tensorrt-llm runs no fp8 on A100"),
        ("nvidia/Qwen3-32B-NVFP4", "B200", ""),
        ("nvidia/Qwen3-8B-FP8", "L40S", ""),
        ("openai/gpt-oss-20b", "H100", ""),
        ("Qwen/Qwen3-8B-AWQ", "A100", ""),
    ],
)
def test_types_without_units_on_a_gpu_are_refused(model: str, gpu: str, problem: str) -> None:
    tables = {
        "model": {"name": model},
        "engine": {"name": "tensorrt-llm"},
        "nodes": [{"gpu": gpu}],
        "replicas": [{}],
    }
    if not problem:
        make_plan(config_from_dict(tables))
        return
    with pytest.raises(InputError, match=problem):
        make_plan(config_from_dict(tables))
    make_plan(config_from_dict({**tables, "engine": {"name": "vllm"}}))  # Marlin widens them
