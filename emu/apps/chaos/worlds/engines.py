"""Worlds of SGLang's and TensorRT-LLM's schedulers: some of other schedulers', with their keys.

A stream of its own decides for each, and nothing else of a world changes. What these schedulers
cannot do in emu (stages, tiers, features but drafts; SGLang's also groups) is not drawn for them.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.models import draw_engine_states, features_in
from emu.config.engine_words import ENGINES
from emu.config.schema import FcfsTable, LightLlmTable, SglangTable, TensorrtLlmTable
from emu.config.tables import tag_of
from emu.features.modes import COSTED
from emu.features.registry import all_features
from emu.rng import rng_stream

_PART: Final = 0.4
_KEPT: Final = (tag_of(FcfsTable), tag_of(LightLlmTable))
"""Schedulers with a queue of the cluster, and with keys that few worlds have."""
_SHARED: Final = ("num_blocks", "leap")
_NEVER: Final = frozenset({"pipeline_parallel", "scheduler", "engine"})


def draw_engines(seed: int, tables: Tables) -> None:
    """Change a part of the worlds whose scheduler has a queue for each replica."""
    rng = rng_stream(seed, "chaos sglang")
    had = tables["scheduler"]
    if had["policy"] in _KEPT or "models" in tables:
        return
    is_sglang = chance(rng, _PART)
    drafts = rng_stream(seed, "chaos engine drafts")
    if tables["network"].get("tiers") or features_in(tables):
        return
    if any(_NEVER.intersection(group) for group in tables["replicas"]):
        return
    if tables["model"]["name"] != "meta-llama/Llama-3.1-8B":
        return
    has_groups = any("data_parallel_group" in group for group in tables["replicas"])
    if is_sglang:
        if not has_groups:
            _sglang(rng, tables, had)
            if all(group.get("role", "colocated") == "colocated" for group in tables["replicas"]):
                _looks(rng_stream(seed, "chaos looks"), tables)
            _drafts(drafts, tables)
            draw_engine_states(seed, tables)
        return
    rng = rng_stream(seed, "chaos tensorrt-llm")
    if chance(rng, _PART):
        _tensorrt_llm(rng, tables, had)
        if not has_groups:
            _waits(rng_stream(seed, "chaos batch wait"), tables)
        _drafts(drafts, tables)
        draw_engine_states(seed, tables)


def _drafts(rng: Rng, tables: Tables) -> None:
    """What features draw for these schedulers, in one world of three that can have it."""
    latency = tables["latency"]
    is_outside = latency.get("attention_offload") or any(
        "placement" in group for group in tables["replicas"]
    )
    is_costed = latency.get("backend", COSTED[0]) in COSTED
    if not chance(rng, 0.35) or is_outside or not is_costed:
        return
    for feature in all_features():
        feature.draw_engine(rng, tables)
    scheduler = tables["scheduler"]
    if scheduler["policy"] == tag_of(SglangTable):
        scheduler["enable_spec_v2"] = chance(rng, 0.3)


def _sglang(rng: Rng, tables: Tables, had: Tables) -> None:
    tables["engine"] = {"name": "sglang", "version": pick(rng, ENGINES["sglang"].versions)}
    keys: Tables = {
        "policy": tag_of(SglangTable),
        "page_size": had["block_size"],
        "max_running_requests": int(pick(rng, (2, 8, 64))),
        "chunked_prefill_size": int(pick(rng, (-1, 0, 64, 512, 2048))),
        "max_prefill_tokens": int(pick(rng, (200, 16_384))),
        "schedule_conservativeness": float(pick(rng, (0.05, 0.3, 1.0, 1.0))),
        "schedule_policy": pick(rng, ("fcfs", "fcfs", "lpm", "dfs-weight", "lof", "random")),
        "enable_mixed_chunk": chance(rng, 0.2),
        "mem_fraction_static": float(pick(rng, (0.0, 0.8))),
        "disable_radix_cache": chance(rng, 0.3),
        "radix_eviction_policy": pick(
            rng, ("lru", "lru", "lfu", "fifo", "mru", "filo", "priority")
        ),
        "disable_overlap_schedule": chance(rng, 0.3),
        "ignore_eos": chance(rng, 0.3),
        "page_overhead": pick(rng, ("auto", "on", "taken", "off")),
        "full_stops_chunks": pick(rng, ("auto", "on", "off")),
    }
    del keys["radix_eviction_policy" if keys["disable_radix_cache"] else "ignore_eos"]
    tables["scheduler"] = {key: had[key] for key in _SHARED if key in had} | keys


def _looks(rng: Rng, tables: Tables) -> None:
    """Rare looks for new requests, and few captured batches, each in one world of four."""
    if chance(rng, 0.25):
        tables["scheduler"]["scheduler_recv_interval"] = int(pick(rng, (2, 10, 30)))
    if chance(rng, 0.25):
        tables["scheduler"]["cuda_graph_max_bs"] = int(pick(rng, (1, 4, 24)))


def _waits(rng: Rng, tables: Tables) -> None:
    """Prompts that wait for more prompts, in one world of four."""
    if chance(rng, 0.25):
        tables["scheduler"]["batch_wait_timeout_iters"] = int(pick(rng, (1, 5, 20)))
        tables["scheduler"]["batch_wait_max_tokens_ratio"] = float(pick(rng, (0.1, 0.5, 0.9)))


def _tensorrt_llm(rng: Rng, tables: Tables, had: Tables) -> None:
    name = tag_of(TensorrtLlmTable)
    tables["engine"] = {"name": name, "version": pick(rng, ENGINES[name].versions)}
    pauses = chance(rng, 0.4)
    keys: Tables = {
        "policy": name,
        "tokens_per_block": 1 << (int(had["block_size"]).bit_length() - 1),
        "capacity_scheduler_policy": "MAX_UTILIZATION" if pauses else "GUARANTEED_NO_EVICT",
        "max_batch_size": int(pick(rng, (0, 2, 8, 64))),
        "max_num_tokens": int(pick(rng, (0, 512, 4096))),
        "free_gpu_memory_fraction": float(pick(rng, (0.9, 0.7))),
        "cuda_graph_padding": chance(rng, 0.5),
        "cuda_graph_max_batch_size": int(pick(rng, (0, 16, 512))),
        "disable_overlap_scheduler": chance(rng, 0.3),
    }
    # A prompt that is not cut must fit a step, and most worlds' do not fit a small one.
    if keys["max_num_tokens"] == 512 or chance(rng, 0.5):
        keys["enable_chunked_prefill"] = True
        chunking = ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")
        keys["context_chunking_policy"] = pick(rng, chunking)
    elif chance(rng, 0.1):
        keys["capacity_scheduler_policy"] = "STATIC_BATCH"
    if not keys["disable_overlap_scheduler"]:
        keys["length_ends_known"] = pick(rng, ("auto", "on", "off"))
    keys["enable_block_reuse"] = chance(rng, 0.7)
    if keys["enable_block_reuse"]:
        keys["enable_partial_reuse"] = chance(rng, 0.7)
        if keys["enable_partial_reuse"]:
            keys["copy_on_partial_reuse"] = chance(rng, 0.7)
    tables["scheduler"] = {key: had[key] for key in _SHARED if key in had} | keys
