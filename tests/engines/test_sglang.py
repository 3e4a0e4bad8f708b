"""SGLang as an engine: what its versions take when nothing is said, and runs with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.catalogue.lookup import lookup_gpu
from emu.cluster.plan import ReplicaPlan, make_plan
from emu.config.load import config_from_dict, config_from_text, effective_dict
from emu.config.schema import SglangTable
from emu.engines.bundle import Deployment, Server
from emu.engines.registry import engine_named, nearest_version
from emu.engines.sglang_prompts import captured_prompt_tokens
from emu.errors import InputError
from emu.latency.engine import ANY_TOKENS, padded, padded_prompts
from emu.runs.run_json import with_limits
from emu.runs.runner import execute


def replica(gpu: str, ranks: int = 1, version: str = "", **scheduler: object) -> ReplicaPlan:
    tables: dict[str, Any] = {
        "engine": {"name": "sglang", "version": version},
        "nodes": [{"gpu": gpu, "gpus": 8}],
        "replicas": [{"tensor_parallel": ranks}],
    }
    if scheduler:
        tables["scheduler"] = scheduler
    return make_plan(config_from_dict(tables)).replicas[0]


def table_of(one: ReplicaPlan) -> SglangTable:
    assert isinstance(one.scheduler, SglangTable)
    return one.scheduler


@pytest.mark.parametrize(
    ("gpu", "ranks", "chunk", "graph", "fraction", "page"),
    [
        ("L40S", 1, 4096, 32, 0.849, 1),
        ("A100-SXM4-80GB", 1, 8192, 256, 0.835, 1),
        ("H100-SXM5-80GB", 1, 8192, 256, 0.835, 1),
        ("H100-SXM5-80GB", 8, 8192, 512, 0.818, 1),
        ("H200-SXM-141GB", 1, 8192, 256, 0.907, 1),
        ("H200-SXM-141GB", 8, 8192, 512, 0.897, 1),
        ("B200", 1, 16_384, 512, 0.857, 64),
    ],
)
def test_a_server_takes_what_its_gpu_allows(
    gpu: str, ranks: int, chunk: int, graph: int, fraction: float, page: int
) -> None:
    one = replica(gpu, ranks)
    table = table_of(one)
    assert (table.chunked_prefill_size, table.page_size, table.block_size) == (chunk, page, page)
    assert table.mem_fraction_static == pytest.approx(fraction, abs=0.0015)
    assert table.gpu_memory_utilization == table.mem_fraction_static
    assert one.engine is not None
    assert one.engine.graph_tokens_max == graph
    assert one.schedules_ahead
    assert one.front_end


def test_the_largest_captured_batch_may_be_given() -> None:
    one = replica("B200", policy="sglang", cuda_graph_max_bs=1024)
    assert one.engine is not None
    assert one.engine.graph_tokens_max == 1024
    assert table_of(one).mem_fraction_static < table_of(replica("B200")).mem_fraction_static


def test_kv_is_what_the_weights_leave() -> None:
    one = replica("H100-SXM5-80GB", mem_fraction_static=0.8)
    usable = int(one.gpu.reported_gib * (1 << 30) * 0.8)
    kept = one.memory.reserve_bytes
    assert one.memory.num_blocks == (usable - one.memory.weight_bytes_rank - kept) // (128 << 10)
    assert kept == pytest.approx(0.9 * (512 << 20)), "one rank has no communicators"


def test_kv_tokens_of_a_published_log() -> None:
    """Qwen3-235B-A22B-FP8 on four H100: 367,404 tokens (vllm-project/vllm issue 21348)."""
    tables = {
        "engine": {"name": "sglang"},
        "model": {"name": "Qwen/Qwen3-235B-A22B-FP8"},
        "nodes": [{"gpu": "H100-SXM5-80GB"}],
        "replicas": [{"tensor_parallel": 4}],
        "scheduler": {"mem_fraction_static": 0.93},
    }
    memory = make_plan(config_from_dict(tables)).replicas[0].memory
    assert memory.kv_bytes_token_rank == 48_128
    assert memory.kv_tokens == pytest.approx(367_404, rel=0.02)


@pytest.mark.parametrize(
    ("version", "overhead", "stops"),
    [
        ("0.5.3", "off", "off"),
        ("0.5.9", "off", "on"),
        ("0.5.10", "taken", "off"),
        ("0.5.14", "on", "off"),
        ("", "on", "off"),
    ],
)
def test_versions_differ(version: str, overhead: str, stops: str) -> None:
    one = replica("H100-SXM5-80GB", version=version)
    table = table_of(one)
    assert (table.page_overhead, table.full_stops_chunks) == (overhead, stops)
    assert one.engine_label == f"sglang-{version or '0.5.23'}"
    given = table_of(replica("H100-SXM5-80GB", version=version, page_overhead="off"))
    assert given.page_overhead == "off"


LATENT, PLAIN, ALL = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-32B", ANY_TOKENS


@pytest.mark.parametrize(
    ("version", "model", "gpu", "more", "tokens"),
    [
        ("0.5.9", PLAIN, "H200-SXM-141GB", {}, 0),
        ("0.5.10", PLAIN, "H200-SXM-141GB", {}, ALL),
        ("0.5.10", LATENT, "H200-SXM-141GB", {}, 2048),
        ("0.5.14", LATENT, "H200-SXM-141GB", {}, 2048),
        ("0.5.23", LATENT, "H200-SXM-141GB", {}, 8192),
        ("0.5.10", LATENT, "B200", {}, 0),  # its experts run TensorRT-LLM's kernels
        ("0.5.14", LATENT, "B200", {}, 2048),
        ("0.5.23", LATENT, "B200", {}, 0),  # so does its attention
        ("0.5.10", "openai/gpt-oss-120b", "B200", {}, ALL),
        ("0.5.10", "Qwen/Qwen3-30B-A3B", "B200", {}, 0),
        ("0.5.10", "Qwen/Qwen3-30B-A3B", "H200-SXM-141GB", {}, ALL),
        ("0.5.10", "mistralai/Mixtral-8x7B-v0.1", "B200", {}, ALL),
        ("0.5.14", "Qwen/Qwen3-Next-80B-A3B-Instruct", "B200", {}, 0),
        ("0.5.23", "Qwen/Qwen3-Next-80B-A3B-Instruct", "B200", {}, ALL),
        ("0.5.23", "Qwen/Qwen3-VL-8B", "B200", {}, 0),
        ("0.5.14", "meta-llama/Llama-2-7b", "B200", {}, 4096),
        ("0.5.14", PLAIN, "B200", {"role": "prefill"}, 0),
        ("0.5.23", PLAIN, "B200", {"role": "prefill"}, ALL),
    ],
)
def test_prompts_are_captured_where_the_version_can(
    version: str, model: str, gpu: str, more: dict[str, object], tokens: int
) -> None:
    ranks = 8 if model == LATENT else 1
    one = {"tensor_parallel": ranks, **more}
    tables = {
        "model": {"name": model},
        "engine": {"name": "sglang", "version": version},
        "nodes": [{"gpu": gpu, "gpus": 8}],
        "replicas": [one, {**one, "role": "decode"}] if "role" in more else [one],
    }
    engine = make_plan(config_from_dict(tables)).replicas[0].engine
    assert engine is not None
    assert engine.prompt_graph_tokens_max == tokens


def test_drafts_overlap_from_0_5_14_on_or_where_the_server_is_told() -> None:
    server = Server(gpu=lookup_gpu("H200-SXM-141GB"), max_model_tokens=4096, drafts="mtp")
    for version, told, overlaps in (
        ("0.5.9", False, False),
        ("0.5.9", True, True),
        ("0.5.10", False, False),
        ("0.5.14", False, True),
    ):
        table = SglangTable(enable_spec_v2=told)
        filled = engine_named(f"sglang-{version}").defaults(table, server)
        assert filled.overlap == ("auto" if overlaps else "off")


def test_drafts_keep_prompts_out_of_graphs_before_the_newest_version() -> None:
    one = replica("H200-SXM-141GB")
    there = Deployment(gpu=one.gpu, model=one.model, ranks=1, drafts="mtp", scheduler=one.scheduler)
    assert captured_prompt_tokens("0.5.14", there) == 0
    assert captured_prompt_tokens("0.5.23", there) == ANY_TOKENS


def test_other_programs_name_versions_in_full() -> None:
    assert engine_named("SGLang v0.5.9.post1").label == "sglang-0.5.9"
    asked = ("0.4.9", "0.5.5", "0.5.9", "0.5.12", "0.6.0")
    assert [nearest_version("sglang", one) for one in asked] == [
        *("0.5.3", "0.5.3", "0.5.9", "0.5.10", "0.5.23")
    ]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("block_size = 16", 'block_size: means nothing with policy = "sglang"; "sglang" has page_'),
        ("gpu_memory_utilization = 0.8", '; "sglang" has mem_fraction_static'),
        ("async_scheduling = 'off'", '"vllm"; "sglang" has disable_overlap_schedule'),
        ("order = 'fair'", '; "sglang" has schedule_policy'),
        ("skip_blocked = true", 'skip_blocked: means nothing with policy = "sglang"'),
        ("ignore_eos = true", "means nothing with disable_radix_cache = false"),
        ("max_num_seqs = 3", 'it is a key of policy = "vllm"'),
        ("policy = 'vllm'", '"vllm" is the scheduler of engine vllm; sglang has "sglang"'),
    ],
)
def test_keys_of_others_are_refused(keys: str, problem: str) -> None:
    text = f'[engine]\nname = "sglang"\n[scheduler]\n{keys}\n'
    with pytest.raises(InputError) as refused:
        config_from_text(text, "c.toml")
    assert str(refused.value).startswith("c.toml:4: scheduler.")
    assert problem in str(refused.value)
    text = f'[[replicas]]\nscheduler = {{ policy = "sglang", {keys} }}\n'
    if "policy" not in keys:
        with pytest.raises(InputError):
            config_from_text(text, "c.toml")


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"replicas": [{"pipeline_parallel": 2}]}, "knows one stage"),
        ({"network": {"tiers": ["cpu"]}}, 'not with policy "sglang"'),
    ],
)
def test_what_its_scheduler_does_not_know_is_refused(tables: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make_plan(config_from_dict({"engine": {"name": "sglang"}, **tables}))


def test_a_run_is_told_what_was_filled_in() -> None:
    config = config_from_dict({"engine": {"name": "sglang"}})
    plan = make_plan(config)
    told = with_limits(config, plan)
    again = config_from_dict(effective_dict(told))
    assert make_plan(again).replicas[0].scheduler == plan.replicas[0].scheduler


def test_graphs_have_their_own_sizes() -> None:
    asked = (1, 3, 9, 12, 13, 200, 257, 490, 500, 512, 513)
    assert [padded(one, 512, "sglang") for one in asked] == [
        *(1, 4, 12, 12, 16, 200, 272, 496, 512, 512, 513)
    ]
    asked = (1, 33, 257, 513, 1025, 5000, 9000)
    assert [padded_prompts(one, 8192) for one in asked] == [4, 48, 288, 576, 1280, 5120, 9000]


CONFIG = """\
[engine]
name = "sglang"
version = "0.5.9"
[[nodes]]
gpu = "H100-SXM5-80GB"
gpus = 1
[[replicas]]
[scheduler]
num_blocks = {blocks}
page_size = {page}
schedule_conservativeness = {conservativeness}
schedule_policy = "{policy}"
disable_overlap_schedule = {late}
[workload.synthetic]
requests = 100
prefix_groups = {groups}
{prefix}
arrivals = {{ process = "gamma", rate_per_s = {rate}, cv = 2.0 }}
prompt = {{ median = 300.0, sigma = 1.0, max = 1500 }}
output = {{ median = 60.0, sigma = 0.8, max = 200 }}
"""


@pytest.mark.parametrize(
    ("blocks", "page", "conservativeness", "policy", "late", "groups", "rate"),
    [
        (9000, 1, 0.05, "lpm", "false", 3, 60.0),
        (4000, 1, 0.02, "fcfs", "false", 0, 200.0),
        (120, 64, 0.05, "dfs-weight", "false", 2, 40.0),
        (400_000, 1, 1.0, "fcfs", "false", 0, 5.0),
        (9000, 1, 0.3, "lof", "true", 2, 60.0),
    ],
)
def test_a_run_with_leaps_is_one_without(
    tmp_path: Path,
    blocks: int,
    page: int,
    conservativeness: float,
    policy: str,
    late: str,
    groups: int,
    rate: float,
) -> None:
    text = CONFIG.format(
        blocks=blocks,
        page=page,
        conservativeness=conservativeness,
        policy=policy,
        late=late,
        groups=groups,
        prefix="prefix_tokens = 64" if groups else "",
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


def test_prompts_are_cut_at_whole_pages() -> None:
    """As `ServerArgs.check_server_args`; a piece below a page would never be admitted."""
    problem = r"scheduler\.chunked_prefill_size: 7 is no multiple of page_size, which is 64"
    with pytest.raises(InputError, match=problem):
        replica("B200", policy="sglang", chunked_prefill_size=7)
    with pytest.raises(InputError, match="8192 is no multiple of page_size, which is 3"):
        replica("H100-SXM5-80GB", policy="sglang", page_size=3)
    assert table_of(replica("H100-SXM5-80GB", policy="sglang", chunked_prefill_size=7))
    assert table_of(replica("B200", policy="sglang", chunked_prefill_size=-1))
