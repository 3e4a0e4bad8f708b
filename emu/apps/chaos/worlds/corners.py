"""A third tour: each eighth seed is a small world of a part that the others enter by chance alone.

Stops are counted as those of the first tour (`tour.py`). Traces in their own formats, other engines
with states, in groups and in roles, destinations that refuse for long, spares that make room for
another model, and helpers of replicas that load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.forms import FORMS
from emu.apps.chaos.worlds.narrow import burst, cached, later_half, share_prefixes, small_world
from emu.apps.chaos.worlds.visits import known_prompts, layers
from emu.config.engine_words import ENGINES
from emu.config.schema import (
    FcfsTable,
    RooflineTable,
    SglangTable,
    TensorrtLlmTable,
    VllmTable,
)
from emu.config.tables import tag_of
from emu.rng import rng_stream

EVERY: Final = 8
AT: Final = 0
Lines = list[Tables]
Stop = Callable[[Rng, Tables], Lines]
_MS: Final = 1_000_000


def draw_corners(seed: int) -> tuple[Tables, Lines] | None:
    """The tables and lines of such a world; None for other seeds."""
    if seed % EVERY != AT:
        return None
    rng, stops = rng_stream(seed, "chaos corners"), _stops()
    tables = small_world(rng, seed, replicas_max=2)
    return tables, stops[seed // EVERY % len(stops)](rng, tables)


def _stops() -> Sequence[Stop]:
    return (
        _blocks_by_name,
        _trace,
        _states,
        _group,
        _roles,
        _refusals,
        _spares,
        _helpers,
        _trees,
        _tiers,
        _loads_and_prompts,
    )


def _blocks_by_name(rng: Rng, tables: Tables) -> Lines:
    """A trace that names the blocks of its prompts, the one that a prompt has begun too."""
    tables["workload"]["format"] = "mooncake"
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": 16,
        "num_blocks": int(rng.integers(300, 800)),
        "max_num_seqs": int(pick(rng, (2, 8))),
        "max_num_batched_tokens": int(pick(rng, (256, 2048))),
        "async_scheduling": "off",
        "prefix_caching": True,
    }
    lines = burst(rng, int(rng.integers(15, 30)), (200, 1700), (1, 20))
    for index, line in enumerate(lines):
        kind, count = int(rng.integers(3)), -(-line["input_toks"] // 512)
        line["hash_ids"] = [100 * kind + at for at in range(count)]
        line["arrival_time_ns"] = index * 40 * _MS
    return lines


def _trace(rng: Rng, tables: Tables) -> Lines:
    """A trace in one of the formats of others."""
    names = sorted(set(FORMS) - {"mooncake"})
    form = names[int(tables["seed"]) // (EVERY * len(_stops())) % len(names)]
    tables["workload"]["format"] = form
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 1000, "max_num_seqs": 8}
    lines = burst(rng, int(rng.integers(20, 40)), (5, 300), (1, 40))
    for line in lines:
        line["arrival_time_ns"] = int(line["arrival_time_ns"]) // _MS * 7 * _MS
        if form == "csv":
            line |= {"tenant": f"t{int(rng.integers(3))}", "priority": int(rng.integers(3))}
    first_ns = int(lines[0]["arrival_time_ns"])
    for line in lines:
        line["arrival_time_ns"] -= first_ns
    return lines


def _states(rng: Rng, tables: Tables) -> Lines:
    """States that SGLang and TensorRT-LLM set memory aside for, on several GPUs."""
    visit = int(tables["seed"]) // (EVERY * len(_stops())) % 4
    is_sglang = visit != 1
    policy = tag_of(SglangTable if is_sglang else TensorrtLlmTable)
    tables["model"] = {"name": "nvidia/Nemotron-H-8B-Base-8K"}
    tables["engine"] = {"name": policy, "version": pick(rng, ENGINES[policy].versions)}
    tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
    tables["scheduler"] = {"policy": policy}
    ranks = int(pick(rng, (1, 2, 4) if is_sglang else (4, 8)))
    tables["nodes"] = [{"gpus": ranks, "gpu": gpu} for gpu in ("H100-SXM5-80GB", "B200-SXM-180GB")]
    tables["replicas"] = [{"count": 2, "tensor_parallel": ranks}]
    if is_sglang:
        tables["scheduler"] |= {
            "disable_radix_cache": chance(rng, 0.5),
            "mamba_full_memory_ratio": float(pick(rng, (0.2, 0.9, 2.0))),
            "max_mamba_cache_size": 60 if visit == 2 else 0,
        }
    else:
        tables["scheduler"] |= {
            "enable_block_reuse": False,
            "max_batch_size": int(pick(rng, (16, 256))),
            "free_gpu_memory_fraction": float(pick(rng, (0.5, 0.9))),
        }
    return burst(rng, int(rng.integers(8, 20)), (10, 300), (2, 40))


def _group(rng: Rng, tables: Tables) -> Lines:
    """A group of SGLang's or TensorRT-LLM's replicas that steps together."""
    policy = pick(rng, (tag_of(SglangTable), tag_of(TensorrtLlmTable)))
    tables["engine"] = {"name": policy}
    tables["replicas"] = [
        {"count": int(pick(rng, (2, 3))), "data_parallel_group": "a", "role": "colocated"}
    ]
    tables["nodes"][0] |= {"count": 1, "gpus": 3}
    tables["scheduler"] = {"policy": policy, "num_blocks": int(pick(rng, (600, 4000)))}
    cache = "disable_radix_cache" if policy == tag_of(SglangTable) else "enable_block_reuse"
    tables["scheduler"][cache] = cache.startswith("disable")
    lines = burst(rng, int(rng.integers(10, 25)), (5, 200), (1, 60))
    later_half(rng, lines)
    return lines


def _roles(rng: Rng, tables: Tables) -> Lines:
    """Prefill and decode servers of SGLang or TensorRT-LLM, with few places in the latter."""
    policy = pick(rng, (tag_of(SglangTable), tag_of(TensorrtLlmTable)))
    tables["engine"] = {"name": policy}
    tables["replicas"] = [
        {"role": "prefill", "count": int(pick(rng, (1, 2)))},
        {"role": "decode", "count": int(pick(rng, (1, 2, 3)))},
    ]
    tables["nodes"][0] |= {"count": 5, "gpus": 1, "nic_gbps": float(pick(rng, (2.0, 20.0)))}
    tables["scheduler"] = {"policy": policy, "num_blocks": int(pick(rng, (600, 4000)))}
    if policy == tag_of(SglangTable):
        tables["scheduler"] |= {"disable_radix_cache": True}
        tables["scheduler"]["max_running_requests"] = int(pick(rng, (2, 6)))
    else:
        tables["scheduler"] |= {"enable_block_reuse": False}
        tables["scheduler"]["max_batch_size"] = int(pick(rng, (2, 6)))
    return burst(rng, int(rng.integers(15, 30)), (20, 300), (2, 40))


def _refusals(rng: Rng, tables: Tables) -> Lines:
    """Destinations that refuse for so long that offers are made many times."""
    lines = layers(rng, tables)
    tables["faults"] = [
        {
            "kind": "destination_refuses",
            "at_s": float(pick(rng, (0.0, 0.02))),
            "duration_s": float(pick(rng, (0.2, 0.6, 1.5))),
        }
    ]
    tables["recovery"] = {"max_retries": int(pick(rng, (2, 8)))}
    return lines


def _spares(rng: Rng, tables: Tables) -> Lines:
    """A model that has had much to do keeps its spares, until another one wants their GPUs."""
    del tables["model"], tables["replicas"]
    tables["models"] = [
        {"name": "meta-llama/Llama-3.2-1B", "served_name": name, "prefill": 1, "decode": 1}
        for name in ("m0", "m1")
    ]
    tables["nodes"][0] |= {"count": 7, "gpus": 1, "nic_gbps": 100.0}
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 2000, "max_num_seqs": 16}
    tables["latency"] = {"backend": "linear", "base_us": 2000.0, "per_token_us": 100.0}
    tables["autoscale"] = {
        "planner": "blitz",
        "executor": "blitz",
        "loader": "host",
        "tick_ms": 20.0,
        "prefill_lower_s": 0.05,
        "prefill_upper_s": 0.1,
        "min_prefill": 1,
        "min_decode": 1,
        "spare_ttl_ms": 30_000.0,
    }
    lines: Lines = []
    for name, begin_s in (("m0", 0.0), ("m1", 8.0), ("m0", 16.0), ("m1", 24.0)):
        for line in burst(rng, int(rng.integers(6, 25)), (100, 4000), (2, 60)):
            line["arrival_time_ns"] += round(begin_s * 1e9)
            lines.append(line | {"model": name})
    return lines


def _helpers(rng: Rng, tables: Tables) -> Lines:
    """Replicas take their weights layer by layer, and hand batches to as many that have them."""
    tables["replicas"] = [
        {"role": "prefill", "count": 3},
        {"role": "decode"},
        {"role": "inactive", "count": 3},
    ]
    tables["nodes"][0] |= {"count": 7, "gpus": 1, "nic_gbps": float(pick(rng, (25.0, 50.0)))}
    tables["nodes"][0]["pcie_gbps"] = float(pick(rng, (25.0, 100.0)))
    tables["scheduler"] = {
        "policy": tag_of(FcfsTable),
        "num_blocks": 20_000,
        "block_size": 16,
        "request_token_budget": int(pick(rng, (600, 1500))),
    }
    tables["commands"] = [
        {"at_s": 0.01 + 0.002 * (index // 3), "replica": replica, "command": word}
        for index, (replica, word) in enumerate(
            [(4 + at, "to_new_prefill") for at in range(3)]
            + [(at, "to_old_prefill") for at in range(3)]
        )
    ]
    tables["latency"] = {"backend": "linear", "base_us": 2000.0, "per_token_us": 60.0}
    lines = burst(rng, int(rng.integers(40, 80)), (200, 800), (2, 10))
    return _apart(rng, lines, (0, 30, 60))


def _trees(rng: Rng, tables: Tables) -> Lines:
    """Prompts that begin alike, in the trees of SGLang and TensorRT-LLM."""
    policy = pick(rng, (tag_of(SglangTable), tag_of(TensorrtLlmTable)))
    tables["engine"] = {"name": policy}
    tables["replicas"][0]["count"] = 1
    if policy == tag_of(SglangTable):
        page = int(pick(rng, (1, 4)))
        tables["scheduler"] = {
            "policy": policy,
            "page_size": page,
            "num_blocks": int(rng.integers(400, 1200)) // page,
            "disable_overlap_schedule": chance(rng, 0.7),
        }
    else:
        tables["scheduler"] = {
            "policy": policy,
            "tokens_per_block": int(pick(rng, (4, 16))),
            "num_blocks": int(rng.integers(60, 200)),
            "disable_overlap_scheduler": chance(rng, 0.7),
            "enable_block_reuse": True,
        }
    lines = burst(rng, int(rng.integers(20, 40)), (10, 150), (1, 30))
    share_prefixes(rng, lines)
    return _apart(rng, lines, (0, 30))


def _apart(rng: Rng, lines: Lines, gaps_ms: Sequence[int]) -> Lines:
    """Each line by its place times one of the gaps later, in order of arrival."""
    for index, line in enumerate(lines):
        line["arrival_time_ns"] += index * int(pick(rng, gaps_ms)) * _MS
    return by_arrival(lines)


def _tiers(rng: Rng, tables: Tables) -> Lines:
    """Prompts of one chunk or more that come again when the GPU has forgotten them."""
    lines = cached(rng, tables)
    block = int(tables["scheduler"]["block_size"])
    tables["model"]["max_model_tokens"] = 4096
    tables["network"] = {
        "tiers": pick(rng, (["cpu"], ["cxl"], ["cpu", "cxl"])),
        "tier_block_tokens": int(pick(rng, (1, 2, 4))) * block,
        "tier_shared": chance(rng, 0.3),
        "cpu_tier_gib": float(pick(rng, (0.1, 1.0))),
    }
    tables["nodes"][0]["cxl_gib"] = 1.0
    tables["scheduler"] |= {"num_blocks": int(rng.integers(16, 30)), "async_scheduling": "off"}
    for index, line in enumerate(lines):
        line["arrival_time_ns"] += index * 20 * _MS
    return lines


def _loads_and_prompts(rng: Rng, tables: Tables) -> Lines:
    """Routers weigh what replicas know of a prompt against how much they have to do."""
    lines = known_prompts(rng, tables)
    tables["scheduler"] |= {"num_blocks": 400, "max_num_seqs": 16, "async_scheduling": "off"}
    tables["latency"]["per_token_us"] = 50.0
    for index, line in enumerate(lines):
        line["arrival_time_ns"] = index * int(pick(rng, (1, 4))) * _MS
        line["output_toks"] = len(line["output_tok_ids"])
    return by_arrival(lines)
