"""LLMServingSim's cluster file as a configuration of ours, with comments that say what came from
where, and what was left behind.

Owns the mapping of its keys to ours. What emu does not emulate is never written as a key; a comment
names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from emu.backends.llmservingsim.cluster_file import Cluster, ClusterFile, read_cluster_file
from emu.backends.llmservingsim.machines import gpu_kinds, node_tables
from emu.backends.llmservingsim.replicas import has_bundle, has_every_bundle, replica_tables
from emu.backends.llmservingsim.toml_text import toml_line

_NO_TYPES: Final[Mapping[str, str]] = {}


def import_cluster(
    path: str | Path, profiles: str | Path | None = None, *, types: Mapping[str, str] = _NO_TYPES
) -> str:
    """TOML text of our configuration for a cluster file.

    `profiles` is a root of profile bundles: where it has one for an instance, its latencies come
    from there, else from the roofline. `types` has `dtype` and `kv_cache_dtype` for instances that
    do not say theirs. Raises InputError for what the file lacks.
    """
    file = read_cluster_file(Path(path), types)
    kinds = gpu_kinds(file)
    node_lines, gpu_of = node_tables(file, kinds)
    lines = [*_head(file), *_models(file), *node_lines]
    several_kinds = len({msgspec.json.encode(kind) for kind in kinds}) > 1
    lines += replica_tables(file, gpu_of if several_kinds else None, profiles)
    lines += [*_scheduler(), *_latency(file, profiles), *_power(file.cluster)]
    return "\n".join(lines).rstrip() + "\n"


def _head(file: ClusterFile) -> list[str]:
    gpus = sum(placed.shape.gpus for placed in file.instances)
    return [
        f"# Converted from {Path(file.source).name}, a cluster file of LLMServingSim:",
        f"# {len(file.cluster.nodes)} nodes, {len(file.instances)} instances, {gpus} GPUs.",
        "# It has no workload: set workload.path, or leave the synthetic default.",
        *(f"# not carried over: {key}, a key that has no meaning" for key in file.unknown),
        "",
    ]


def _models(file: ClusterFile) -> list[str]:
    """The first instance's model; others override it where they stand."""
    return ["[model]", toml_line("name", file.instances[0].instance.model_name, "model_name"), ""]


def _scheduler() -> list[str]:
    return [
        "[scheduler]  # the simulator's own defaults; instances override them above",
        toml_line("policy", "vllm"),
        toml_line("max_num_seqs", 128),
        toml_line("max_num_batched_tokens", 2048),
        toml_line("block_size", 16),
        "",
        "[router]",
        toml_line("policy", "load"),
        "",
    ]


def _latency(file: ClusterFile, profiles: str | Path | None) -> list[str]:
    lines = ["[latency]"]
    if has_every_bundle(file, profiles):
        lines += [toml_line("backend", "profile"), toml_line("path", str(profiles))]
    else:
        lines.append(toml_line("backend", "roofline"))
        if profiles is None:
            lines.append('# for measured layer times: backend = "profile", path = bundles')
        else:
            lacking = [p for p in file.instances if not has_bundle(p, profiles)]
            names = {
                f"{p.model.name} on {p.instance.hardware}, TP {p.shape.tensor}" for p in lacking
            }
            lines += [f"# no bundle for {name}" for name in sorted(names)]
    lines.append("# host_overhead = false: as the simulator, which has no time of the host")
    return [*lines, ""]


def _power(cluster: Cluster) -> list[str]:
    """Power is modeled only if every node says its figures; ours are one set for all."""
    powers = [node.power for node in cluster.nodes]
    first = powers[0]
    if first is None or None in powers:
        some = any(power is not None for power in powers)
        return ["# not carried over: power, which not every node gives", ""] if some else []
    if any(power != first for power in powers) or len(first.npu) != 1:
        problem = "nodes or GPUs with different figures; emu has one set for all machines"
        return [f"# not carried over: power ({problem})", ""]
    (gpu,) = first.npu.values()
    keys = {
        "base_node_w": first.base_node_power,
        "gpu_idle_w": gpu.idle_power,
        "gpu_standby_w": gpu.standby_power,
        "gpu_active_w": gpu.active_power,
        "gpu_standby_s": gpu.standby_duration,
        "cpu_idle_w": first.cpu.idle_power,
        "cpu_active_w": first.cpu.active_power,
        "cpu_utilization": first.cpu.util,
        "dram_idle_w_per_dimm": first.dram.idle_power,
        "dram_dimm_gib": first.dram.dimm_size,
        "dram_pj_per_bit": first.dram.energy_per_bit,
        "link_idle_w": first.link.idle_power,
        "links": first.link.num_links,
        "link_pj_per_bit": first.link.energy_per_bit,
        "nic_idle_w": first.nic.idle_power,
        "nics": first.nic.num_nics,
        "storage_idle_w": first.storage.idle_power,
        "storage_devices": first.storage.num_devices,
    }
    return ["[power]", *(toml_line(key, value) for key, value in keys.items()), ""]
