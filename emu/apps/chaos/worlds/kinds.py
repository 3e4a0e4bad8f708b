"""A second tour: each eighth seed is a small world of many kinds of replicas, or of a rule beside.

Stops are counted as those of the first tour (`tour.py`), so that three hundred seeds see each of
them several times. Kinds: one model on several GPUs, ranks, engines' limits and costs, each with a
few requests, so that the truth of steps (`truth/step_times.py`) meets many of them in one world.
Limits: each scheduler with small ones, in two bursts with a rest between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.narrow import burst, small_world, turns
from emu.apps.chaos.worlds.policies import pool_scaling
from emu.config.engine_words import ENGINES
from emu.config.schema import (
    FasterTransformerTable,
    LightLlmTable,
    OrcaTable,
    PagedTable,
    RooflineTable,
    SarathiTable,
    SglangTable,
    TensorrtLlmTable,
    VllmTable,
    VllmV0Table,
)
from emu.config.tables import tag_of
from emu.features.registry import all_features
from emu.rng import rng_stream

EVERY: Final = 8
AT: Final = 4
Lines = list[Tables]
Stop = Callable[[Rng, Tables], Lines]

_DENSE: Final = (
    *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "facebook/opt-1.3b"),
    *("microsoft/phi-2", "mistralai/Mistral-7B-v0.1", "google/gemma-2-9b"),
)
_EXPERTS: Final = (
    *("Qwen/Qwen1.5-MoE-A2.7B", "microsoft/Phi-mini-MoE", "Qwen/Qwen3-30B-A3B"),
    *("deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b"),
)
_STATES: Final = ("LiquidAI/LFM2-2.6B", "nvidia/Nemotron-H-8B-Base-8K")
_GPUS: Final = (
    *("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "GB200"),
    *("H100-PCIE-80GB", "RTXPRO6000", "MI300X"),
)
_KINDS: Final = 5


def draw_kinds(seed: int) -> tuple[Tables, list[Tables]] | None:
    """The tables and lines of such a world; None for other seeds."""
    if seed % EVERY != AT:
        return None
    rng, stops = rng_stream(seed, "chaos kinds"), _stops()
    tables = small_world(rng, seed, replicas_max=2)
    return tables, stops[seed // EVERY % len(stops)](rng, tables)


def _stops() -> Sequence[Stop]:
    return (
        partial(_kinds, models=_DENSE),
        partial(_kinds, models=_EXPERTS),
        partial(_kinds, models=_STATES),
        _ranks,
        _layers_beside,
        _shared_experts,
        _limits_of_vidur,
        _limits_of_sglang,
        _queues_of_pods,
        _long_moves,
        _states_below,
    )


def _kinds(rng: Rng, tables: Tables, models: Sequence[str]) -> Lines:
    """One model on several GPUs, by one engine, in replicas that differ in ranks and costs."""
    seed = int(tables["seed"])
    engines = (tag_of(VllmTable), tag_of(VllmTable), tag_of(SglangTable), tag_of(TensorrtLlmTable))
    policy = pick(rng, engines if models is not _STATES else engines[:1])
    tables["model"] = {"name": models[seed // 100 % len(models)]}
    tables["engine"] = {"name": policy, "version": pick(rng, ENGINES[policy].versions)}
    tables["scheduler"] = {"policy": policy, "num_blocks": 2000}
    tables["router"] = {"policy": "round_robin"}
    tables["nodes"], tables["replicas"] = [], []
    for _ in range(_KINDS):
        ranks = int(pick(rng, (1, 1, 2, 4)))
        stages = 1 if models is _STATES or chance(rng, 0.7) else 2
        tables["nodes"].append({"gpus": ranks * stages, "gpu": pick(rng, _GPUS)})
        kind: Tables = {"tensor_parallel": ranks, "latency": _latency(rng)}
        if stages > 1 and policy == tag_of(VllmTable) and not _is_unlike(tables):
            kind["pipeline_parallel"] = stages
        else:
            tables["nodes"][-1]["gpus"] = ranks
        if policy == tag_of(VllmTable):
            kind["scheduler"] = _limits_of_vllm(rng)
        tables["replicas"].append(kind)
    _settle(tables)
    return burst(rng, 6 * _KINDS, (5, 600), (2, 15))


def _settle(tables: Tables) -> None:
    """Each replica has machines of its own."""
    first = 0
    for node, kind in zip(tables["nodes"], tables["replicas"], strict=True):
        count = node["gpus"] * node.get("count", 1)
        kind["gpus"] = list(range(first, first + count))
        first += count


def _is_unlike(tables: Tables) -> bool:
    """Some layers have a window, which stages do not have here."""
    return tables["model"]["name"] in ("openai/gpt-oss-20b", *_DENSE[4:])


def _latency(rng: Rng) -> Tables:
    table: Tables = {"backend": tag_of(RooflineTable), "front_end": False}
    drawn: Tables = {
        "sampling": ("auto", "greedy", "random", "top_p"),
        "penalties": ("auto", "on", "off"),
        "compute_efficiency": (0.0, 0.0, 0.4),
        "memory_efficiency": (0.0, 0.0, 0.6),
        "round_tokens_to": (1, 1, 8, 64),
    }
    for key, values in drawn.items():
        table[key] = pick(rng, values)
    return table


def _limits_of_vllm(rng: Rng) -> Tables:
    return {
        "async_scheduling": pick(rng, ("on", "off")),
        "max_num_seqs": int(pick(rng, (3, 8, 64))),
        "max_num_batched_tokens": int(pick(rng, (128, 512, 2048))),
    }


def _ranks(rng: Rng, tables: Tables) -> Lines:
    """Ranks whose network is described: algorithms, chunks, delays, and machines between them."""
    lines = _kinds(rng, tables, (*_DENSE[:2], _EXPERTS[0]))
    for node, kind in zip(tables["nodes"], tables["replicas"], strict=True):
        kind.pop("pipeline_parallel", None)
        ranks = kind["tensor_parallel"] = int(pick(rng, (2, 4)))
        machines = int(pick(rng, (1, 1, 2)))
        node |= {"gpus": ranks // machines, "count": machines}
        node["nic_gbps"] = float(pick(rng, (100.0, 400.0)))
    _settle(tables)
    tables["network"] = {
        "collective_splits": int(pick(rng, (1, 3, 4))),
        "collective_algorithm": pick(rng, ("ring", "direct")),
        "endpoint_delay_ns": int(pick(rng, (10, 200))),
    }
    return lines


def _layers_beside(rng: Rng, tables: Tables) -> Lines:
    """Features whose layers take what their kernels do."""
    tables["model"] = {"name": "meta-llama/Llama-3.1-8B"}
    tables["latency"] = _latency(rng)
    tables["replicas"] = [{"tensor_parallel": int(pick(rng, (1, 2)))}]
    tables["nodes"] = [{"gpus": 2, "gpu": pick(rng, _GPUS[:5])}]
    tables["scheduler"] = _limits_of_vllm(rng) | {
        "policy": tag_of(VllmTable),
        "num_blocks": 2000,
        "async_scheduling": "off",
        "prefix_caching": False,
    }
    for feature in all_features():
        feature.draw_costs(rng, tables)
    return burst(rng, 12, (5, 300), (5, 40))


def _shared_experts(rng: Rng, tables: Tables) -> Lines:
    """Replicas that share their experts, by collectives, and step together."""
    members = int(pick(rng, (2, 4)))
    tables["model"] = {"name": pick(rng, _EXPERTS[:3])}
    tables["latency"] = _latency(rng)
    tables["nodes"] = [{"gpus": members, "gpu": pick(rng, _GPUS[1:5])}]
    tables["replicas"] = [
        {"count": members, "expert_parallel": members, "data_parallel_group": "a"}
    ]
    tables["scheduler"] = _limits_of_vllm(rng) | {
        "policy": tag_of(VllmTable),
        "num_blocks": 2000,
        "prefix_caching": False,
    }
    return burst(rng, 6 * members, (5, 300), (2, 30))


def _two_bursts(rng: Rng, count: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> Lines:
    """With a rest between them."""
    late_ns = int(pick(rng, (20, 60))) * 1_000_000_000
    lines = burst(rng, count, prompts, outputs)
    later = burst(rng, count, prompts, outputs)
    for line in later:
        line["arrival_time_ns"] += late_ns
    return [*lines, *later]


def _limits_of_vidur(rng: Rng, tables: Tables) -> Lines:
    """Each of Vidur's schedulers in its turn, all of whose limits are met."""
    own: dict[type, Tables] = {
        VllmV0Table: {"max_tokens_in_batch": int(pick(rng, (150, 300)))},
        SarathiTable: {"chunk_size": int(pick(rng, (20, 64)))},
        LightLlmTable: {
            "max_tokens_in_batch": int(pick(rng, (150, 300))),
            "max_waiting_iters": int(pick(rng, (1, 5))),
        },
        OrcaTable: {"max_tokens": 192},
        FasterTransformerTable: {"max_tokens": 192},
    }
    kind = (VllmV0Table, SarathiTable, LightLlmTable, VllmV0Table, OrcaTable)
    chosen = (*kind, FasterTransformerTable)[int(tables["seed"]) // 48 % 6]
    tables["replicas"][0]["count"] = 1
    tables["scheduler"] = own[chosen] | {
        "policy": tag_of(chosen),
        "block_size": int(pick(rng, (4, 16))),
        "num_blocks": int(rng.integers(60, 90)),
        "batch_size_cap": int(pick(rng, (4, 16))),
        "order": pick(rng, ("arrival", "arrival", "priority")),
    }
    if issubclass(chosen, PagedTable):
        tables["scheduler"]["watermark_blocks_fraction"] = float(pick(rng, (0.0, 0.1)))
    lines = _two_bursts(rng, int(rng.integers(12, 24)), (5, 120), (2, 60))
    for line in lines:
        line["priority"] = int(rng.integers(3))
    return lines


def _limits_of_sglang(rng: Rng, tables: Tables) -> Lines:
    """SGLang's pool filled to the last page, in the order in which its batches end."""
    page = int(pick(rng, (1, 4)))
    tables["engine"] = {"name": "sglang", "version": pick(rng, ENGINES["sglang"].versions)}
    tables["replicas"][0]["count"] = 1
    tables["scheduler"] = {
        "policy": tag_of(SglangTable),
        "page_size": page,
        "num_blocks": int(rng.integers(500, 900)) // page,
        "max_running_requests": int(pick(rng, (8, 32))),
        "chunked_prefill_size": int(pick(rng, (-1, 64, 256))),
        "max_prefill_tokens": int(pick(rng, (200, 16_384))),
        "schedule_conservativeness": float(pick(rng, (0.3, 1.0))),
        "schedule_policy": pick(rng, ("fcfs", "lof")),
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
    }
    return _two_bursts(rng, int(rng.integers(10, 25)), (10, 100), (40, 200))


def _queues_of_pods(rng: Rng, tables: Tables) -> Lines:
    """A pool that shrinks while some of its replicas have long queues."""
    tables["nodes"] = [{"count": 4, "gpus": 1, "gpu": "H100-SXM5-80GB"}]
    tables["replicas"] = [{"role": "colocated", "count": 4}]
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 400, "max_num_seqs": 1}
    tables["router"] = {"policy": "random"}
    tables["autoscale"] = pool_scaling(rng) | {
        "min_replicas": 1,
        "max_replicas": 4,
        "tick_ms": 20.0,
        "metric": "concurrency",
        "target_value": 30.0,
        "scale_down_stabilization_s": float(pick(rng, (0.0, 0.3))),
        "metrics_delay_ms": 0.0,
    }
    return burst(rng, 30, (20, 100), (20, 80))


def _long_moves(rng: Rng, tables: Tables) -> Lines:
    """Requests that move over slow links while they decode, block by block."""
    tables["nodes"] = [{"count": 4, "gpus": 1, "gpu": "H100-SXM5-80GB"}]
    tables["nodes"][0]["nic_gbps"] = float(pick(rng, (2.0, 5.0, 10.0)))
    tables["replicas"] = [{"role": "prefill"}, {"role": "decode", "count": 3}]
    tables["latency"] = {"backend": "linear", "base_us": 2000.0, "per_token_us": 20.0}
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": int(pick(rng, (1, 4))),
        "num_blocks": int(pick(rng, (3000, 6000))),
        "max_num_seqs": 64,
        "prefix_caching": False,
    }
    tables["router"] = {"decode_policy": "first_free"}
    tables["migration"] = {
        "rebalance": True,
        "rebalance_gap": 0.02,
        "rebalance_period_ms": float(pick(rng, (5.0, 20.0))),
    }
    return burst(rng, 20, (20, 200), (100, 400))


def _states_below(rng: Rng, tables: Tables) -> Lines:
    """Sessions on a model with states, whose cache goes to the memory of the machine and back."""
    lines = turns(rng, tables)
    for feature in all_features():
        feature.withdraw(tables)
    tables["model"] = {"name": _STATES[0], "max_model_tokens": 4096}
    tables["replicas"][0]["count"] = 1
    tables["scheduler"] |= {"block_size": 16, "num_blocks": int(rng.integers(70, 120))}
    tables["network"] = {"tiers": ["cpu"], "cpu_tier_gib": 8.0, "tier_block_tokens": 16}
    return lines
