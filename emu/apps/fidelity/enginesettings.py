"""Settings of a measured vLLM: keys of [scheduler] from its record, and what they leave behind."""

from __future__ import annotations

import json

from emu.apps.fidelity.record import USED, WITHOUT_EFFECT, Case, first_of, table_of
from emu.documents import Document


def left_behind(case: Case) -> list[str]:
    """Comments that name settings of the engine which are not emulated."""
    engine = table_of(case.meta, "engine_kwargs")
    left = {
        key: value
        for key, value in engine.items()
        if value and key not in USED and key not in WITHOUT_EFFECT
    }
    resolved = table_of(case.meta, "resolved_config")
    policy = table_of(resolved, "scheduler_config").get("policy")
    if policy not in (None, "fcfs"):
        left["policy"] = policy
    if table_of(resolved, "model_config").get("enforce_eager"):
        left["enforce_eager"] = True
    if resolved.get("speculative_config"):
        left["speculative_config"] = resolved["speculative_config"]
    return [f"# not carried over: {key} = {json.dumps(value)}" for key, value in left.items()]


def scheduler_keys(case: Case) -> Document:
    """Our scheduler's keys, from the most to the least complete record of the engine."""
    meta = case.meta
    engine, cache = table_of(meta, "engine_kwargs"), table_of(meta, "kv_cache")
    resolved = table_of(table_of(meta, "resolved_config"), "scheduler_config")
    cached = table_of(table_of(meta, "resolved_config"), "cache_config")
    found = {
        "max_num_seqs": first_of("max_num_seqs", resolved, engine),
        "max_num_batched_tokens": first_of("max_num_batched_tokens", resolved, engine),
        "long_prefill_token_threshold": first_of("long_prefill_token_threshold", resolved, engine),
        "chunked_prefill": first_of("enable_chunked_prefill", resolved, engine),
        "reserve_full_sequence": first_of("scheduler_reserve_full_isl", resolved),
        "block_size": first_of("block_size", cache, cached, engine),
        "prefix_caching": first_of("enable_prefix_caching", cache, cached, engine),
        "num_blocks": first_of("num_gpu_blocks", cache, cached),
    }
    if isinstance(found["num_blocks"], int):
        found["num_blocks"] = usable_blocks(found["num_blocks"])
    is_async = first_of("async_scheduling", resolved, engine)
    if is_async is not None and not is_async:
        found["async_scheduling"] = "off"
    if found["num_blocks"] is None and case.cluster is None:
        found["gpu_memory_utilization"] = first_of("gpu_memory_utilization", cache, cached, engine)
    return {key: value for key, value in found.items() if value is not None}


def usable_blocks(recorded: int) -> int:
    """Blocks that requests can have of vLLM's `num_gpu_blocks`: its pool keeps one back, which
    stands for blocks that are never read (its "null block").
    `recorded` is that number.
    """
    return max(1, recorded - 1)
