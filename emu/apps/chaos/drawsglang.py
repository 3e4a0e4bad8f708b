"""Worlds of SGLang's scheduler: some of other schedulers', with SGLang's keys.

A stream of its own decides, and nothing else of a world changes. What SGLang's scheduler cannot do
in emu (stages, groups, tiers, features, states) is not drawn for it.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.draws import Tables, chance, features_in, pick
from emu.config.names import ENGINES
from emu.config.schema import FcfsTable, LightLlmTable, SglangTable
from emu.config.tables import tag_of
from emu.rng import rng_stream

_PART: Final = 0.4
_KEPT: Final = (tag_of(FcfsTable), tag_of(LightLlmTable))
"""Schedulers with a queue of the cluster, and with keys that few worlds have."""
_SHARED: Final = ("num_blocks", "leap")


def draw_sglang(seed: int, tables: Tables) -> None:
    """Change a part of the worlds whose scheduler has a queue for each replica."""
    rng = rng_stream(seed, "chaos sglang")
    had = tables["scheduler"]
    if had["policy"] in _KEPT or "models" in tables or not chance(rng, _PART):
        return
    if tables["network"].get("tiers") or features_in(tables):
        return
    for group in tables["replicas"]:
        if {"pipeline_parallel", "data_parallel_group", "scheduler", "engine"}.intersection(group):
            return
    if tables["model"]["name"] != "meta-llama/Llama-3.1-8B":
        return
    tables["engine"] = {"name": "sglang", "version": pick(rng, ENGINES["sglang"].versions)}
    tables["scheduler"] = {key: had[key] for key in _SHARED if key in had} | {
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
        "page_overhead": pick(rng, ("auto", "on", "off")),
        "full_stops_chunks": pick(rng, ("auto", "on", "off")),
    }
