"""The instances of a cluster file as `[[replicas]]` tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from emu.backends.llmservingsim.cluster_file import ClusterFile, Instance, Placed
from emu.backends.llmservingsim.toml_text import toml_line
from emu.latency.profile.bundle import variant_name

_NO_LIMIT_SEQUENCES: Final = 1_000_000

_SCHEDULER_KEYS: Final = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "block_size": "block_size",
    "enable_chunked_prefill": "chunked_prefill",
    "enable_prefix_caching": "prefix_caching",
    "reserve_full_isl": "reserve_full_sequence",
}


class _Group(msgspec.Struct):
    """Consecutive replicas that are written as one table."""

    lines: list[str]
    count: int
    gpus: list[int]
    fields: list[str]


def replica_tables(
    file: ClusterFile, gpu_of: list[list[int]] | None, profiles: str | Path | None
) -> list[str]:
    groups: list[_Group] = []
    everywhere = has_every_bundle(file, profiles)
    for i, placed in enumerate(file.instances):
        lines = list(_replica_lines(file, placed, profiles, everywhere))
        gpus = gpu_of[i] if gpu_of is not None else []
        if groups and groups[-1].lines == lines:
            groups[-1].count += 1
            groups[-1].gpus += gpus
            groups[-1].fields.append(placed.field)
        else:
            groups.append(_Group(lines, 1, gpus, [placed.field]))
    written: list[str] = []
    for group in groups:
        last = f" to {group.fields[-1]}" if group.count > 1 else ""
        written += [f"[[replicas]]  # {group.fields[0]}{last}", *group.lines[:1]]
        written += [toml_line("count", group.count), *group.lines[1:]]
        if group.gpus:
            written.append(toml_line("gpus", group.gpus))
        written.append("")
    return written


def _replica_lines(
    file: ClusterFile, placed: Placed, profiles: str | Path | None, everywhere: bool
) -> Iterator[str]:
    instance, shape = placed.instance, placed.shape
    yield toml_line("role", instance.pd_type or "colocated", "pd_type")
    yield toml_line("tensor_parallel", shape.tensor)
    yield toml_line("pipeline_parallel", shape.pipeline)
    if placed.model.experts is not None:
        yield toml_line("expert_parallel", shape.expert)
    if instance.dp_group is not None:
        yield toml_line("data_parallel_group", instance.dp_group)
    placement = _placement(instance)
    if placement:
        yield toml_line("placement", placement)
    scheduler = _scheduler_overrides(placed)
    if scheduler:
        yield toml_line("scheduler", scheduler)
    model: dict[str, object] = {}
    if instance.model_name != file.instances[0].instance.model_name:
        model["name"] = instance.model_name
    if instance.dtype is not None:
        model["dtype"] = instance.dtype
    if instance.kv_cache_dtype not in (None, "auto"):
        model["kv_cache_dtype"] = instance.kv_cache_dtype
    if model:
        yield toml_line("model", model)
    latency: dict[str, object] = {}
    if not everywhere and profiles is not None and has_bundle(placed, profiles):
        latency = {"backend": "profile", "path": str(profiles)}
    if instance.enable_attn_offloading:
        latency["attention_offload"] = True
    if instance.enable_sub_batch_interleaving:
        latency["sub_batch_interleaving"] = True
    if latency:
        yield toml_line("latency", latency)
    yield from _left_behind(placed)


def _scheduler_overrides(placed: Placed) -> dict[str, object]:
    instance = placed.instance
    keys: dict[str, object] = {}
    said = msgspec.structs.asdict(instance)
    for theirs, ours in _SCHEDULER_KEYS.items():
        if said[theirs] is not None:
            keys[ours] = said[theirs]
    # Zero stands for "no limit": as many tokens as a sequence can have.
    if keys.get("max_num_batched_tokens") == 0:
        keys["max_num_batched_tokens"] = placed.model.max_position
    if keys.get("max_num_seqs") == 0:
        keys["max_num_seqs"] = _NO_LIMIT_SEQUENCES
    if instance.npu_mem.mem_util is not None:
        keys["gpu_memory_utilization"] = instance.npu_mem.mem_util
    return keys


def _placement(instance: Instance) -> dict[str, object]:
    """Where weights are, if any are not on the GPU."""
    placement = instance.placement
    local: dict[str, object] = {"local_loads": True} if instance.enable_local_offloading else {}
    if placement is None or not placement.devices:
        return local

    def device(name: str) -> str:
        return "gpu" if name == "npu" else name

    keys: dict[str, object] = {"weights": device(placement.default.weights)}
    if placement.blocks:
        keys["blocks"] = [
            {"layers": rule.blocks, "weights": device(rule.weights)} for rule in placement.blocks
        ]
    if placement.layers:
        keys["tensors"] = {name: device(rule.weights) for name, rule in placement.layers.items()}
    return keys | local


def _left_behind(placed: Placed) -> Iterator[str]:
    instance = placed.instance
    if instance.npu_mem.mem_latency:
        yield f"# not carried over: npu_mem.mem_latency {instance.npu_mem.mem_latency:g} ns"


def has_bundle(placed: Placed, profiles: str | Path) -> bool:
    instance = placed.instance
    dtype = instance.dtype or placed.model.dtype
    variant = variant_name(dtype, instance.kv_cache_dtype or "auto")
    bundle = Path(profiles) / instance.hardware / placed.model.name / variant
    return (bundle / f"tp{placed.shape.tensor}").is_dir()


def has_every_bundle(file: ClusterFile, profiles: str | Path | None) -> bool:
    return profiles is not None and all(has_bundle(p, profiles) for p in file.instances)
