"""Draws of single keys of the schema, which stand for themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.models import features_in
from emu.config.kinds import unions
from emu.config.schema import FcfsTable, LightLlmTable, SarathiTable, SchedulerTable, VllmV0Table
from emu.config.tables import tag_of
from emu.features.registry import all_features

Values = Mapping[str, Sequence[Any]]
_NODE: Final[Values] = {
    "host_memory_gbytes_per_s": (20.0, 400.0),
    "host_memory_latency_ns": (0, 100, 100_000),
    "nvlink_latency_ns": (-1, 0, 2_000),
    "pcie_gbps": (-1.0, 32.0, 512.0),
    "pcie_shared_by": (1, 2),
    "ssd_gbps": (1.0, 10.0, 100.0),
    "nvlink_domain": (0, 1, 2),
    "nic_over_pcie": (True, False),
    "leaf": ("a", "b"),
    "cxl_latency_ns": (0, 1_000_000),
    "cxl_devices": (1, 2),
    "hourly_price": (0.0, 2.5),
}
_NETWORK: Final[Values] = {
    "connector_us": (0.0, 300.0),
    "connector_block_us": (0.0, 10.0),
    "first_token": ("prefill", "decode"),
    "collective_algorithm": ("ring", "direct", "oneRing", "oneDirect"),
    "collective_algorithms": ({"all-reduce": "direct"}, {"all-to-all": "ring"}, {}),
    "topology": (["Switch"], ["FullyConnected", "Switch"], []),
    "collective_splits": (1, 2, 4),
    "collective_active_chunks": (1, 2),
    "endpoint_delay_ns": (0, 10, 10_000),
    "link_latency_ns": (-1, 0, 5_000),
    "leaf_uplink_gbps": (0.0, 10.0, 200.0),
}
_SCHEDULER: Final[Values] = {
    "gpu_memory_utilization": (0.7, 0.95),
    "skip_blocked": (True, False),
    "long_prefill_token_threshold": (0, 16, 100),
    "chunked_prefill": (True, False),
    "reserve_full_sequence": (True, False),
}
_SCHEDULER_OF_OTHERS: Final[Values] = {
    "watermark_blocks_fraction": (0.0, 0.1),
    "max_waiting_iters": (1, 3),
}
_QUIRKS: Final[Values] = {
    tag_of(VllmV0Table): ("evict_without_need", "oversized_restart_blocks"),
    tag_of(SarathiTable): ("evict_without_need", "sarathi_unsorted_victims"),
    tag_of(LightLlmTable): ("oversized_restart_blocks",),
}
"""Defects of the originals that the judge can live with: it knows no request whose length changes,
and no head that blocks its queue forever."""
_AUTOSCALE: Final[Values] = {
    "tick_ms": (1.0, 10.0, 100.0),
    "tokens_prefilled_per_s": (0.0, 5_000.0),
    "tokens_transferred_per_s": (0.0, 20_000.0),
    "migration_lower_s": (0.05, 0.4),
    "migration_upper_s": (0.6, 2.0),
    "nvlink": (True, False),
    "note_layers": (True, False),
    "prune_sources": (True, False),
    "prefill_never_sends": (True, False),
    "host_cache_gib": (0.0, 10.0, 40.0),
    "host_cache_eviction": ("use", "size_use"),
    "host_cache_ttl_s": (0.0, 0.5, 30.0),
    "load_delay_ms": (0.0, 50.0, 1000.0),
    "scale_up_stabilization_s": (0.0, 0.1, 0.5),
    "faithful": (
        ["kv_equation", "split_lock"],
        ["shut_most_loaded", "evict_spares"],
        ["spare_cap"],
        [],
    ),
}
_POWER: Final[Values] = {
    "base_node_w": (0.0, 60.0),
    "gpu_idle_w": (0.0, 60.0),
    "gpu_standby_w": (0.0, 80.0),
    "gpu_active_w": (0.0, 400.0),
    "gpu_standby_s": (0.0, 0.01, 18.0),
    "cpu_idle_w": (0.0, 50.0),
    "cpu_active_w": (0.0, 200.0),
    "cpu_utilization": (0.0, 0.5),
    "dram_idle_w_per_dimm": (0.0, 3.0),
    "dram_dimm_gib": (16.0, 64.0),
    "dram_pj_per_bit": (0.0, 5.0),
    "link_idle_w": (0.0, 1.0),
    "links": (0, 8),
    "link_pj_per_bit": (0.0, 8.0),
    "nic_idle_w": (0.0, 15.0),
    "nics": (0, 2),
    "storage_idle_w": (0.0, 5.0),
    "storage_devices": (0, 4),
}
_SLO: Final[Values] = {
    "ttft_ms": (0.0, 50.0, 1000.0),
    "tpot_ms": (0.0, 10.0, 100.0),
    "e2e_ms": (0.0, 500.0, 5000.0),
    "ttft_ms_per_token": (0.0, 0.1, 1.0),
    "ttft_base_ms": (0.0, 20.0, 300.0),
}
_WORKLOAD: Final[Values] = {
    "limit": (0, 3, 20),
    "time_scale": (0.2, 1.0, 3.0),
    "max_prompt_tokens": (0, 100),
    "max_output_tokens": (0, 20),
    "seed": (-1, 7),
}
_MODEL: Final[Values] = {
    "kv_cache_dtype": ("auto", "bfloat16"),
    "max_model_tokens": (0, 1_000, 8_000),
    "served_name": ("assistant",),
}


def some_of(rng: Rng, values: Values, share: float) -> Tables:
    """A part of the keys, each with one of its values."""
    return {key: pick(rng, its) for key, its in values.items() if chance(rng, share)}


def draw_figures(rng: Rng, tables: Tables, lines: list[Tables]) -> None:
    """Keys that stand for themselves."""
    _hardware(rng, tables)
    _scheduling(rng, tables, lines)
    tables["model"] |= some_of(rng, _MODEL, 0.15)
    _traffic(rng, tables, lines)
    if tables["latency"]["backend"] == "linear" and chance(rng, 0.3):
        tables["latency"]["base_us"] += float(pick(rng, (0.0004, 0.0006)))  # rounded, then
    _control(rng, tables)
    if chance(rng, 0.2):
        tables["limits"]["stalled_s"] = float(pick(rng, (0.0, 1800.0)))


def _hardware(rng: Rng, tables: Tables) -> None:
    """Machines and the network between them."""
    for node in tables["nodes"]:
        node |= some_of(rng, _NODE, 0.15)
        for key in ("pcie_shared_by", "nvlink_domain"):
            if key in node:
                node[key] = min(node[key], node["gpus"])
    network = tables["network"]
    network |= some_of(rng, _NETWORK, 0.15)
    if tables["latency"]["backend"] == "astra-sim":  # its executor runs collectives one way
        for key in ("collective_splits", "collective_algorithms"):
            network.pop(key, None)
    if network.get("congestion") and network.get("collective_algorithm", "").startswith("one"):
        del network["collective_algorithm"]  # it has no messages that meet


def _traffic(rng: Rng, tables: Tables, lines: list[Tables]) -> None:
    """What is asked, what it may take, and the power that it draws."""
    if chance(rng, 0.2):
        tables["router"]["max_prompt_tokens"] = int(pick(rng, (50, 500)))
    if chance(rng, 0.3):
        tables["slo"] = slo = some_of(rng, _SLO, 0.7)
        if not slo.get("ttft_ms_per_token"):
            slo.pop("ttft_base_ms", None)
    if chance(rng, 0.15):
        tables["power"] = some_of(rng, _POWER, 0.7)
    if chance(rng, 0.3):
        tables["workload"] |= some_of(rng, _WORKLOAD, 0.4)
    if chance(rng, 0.1):
        first_s, last_s = (f(x["arrival_time_ns"] for x in lines) / 1e9 for f in (min, max))
        tables["workload"]["start_s"] = round((first_s + last_s) / 4, 9)
    elif chance(rng, 0.5):
        _arrivals(rng, tables, lines)


def _control(rng: Rng, tables: Tables) -> None:
    """What looks at the cluster and changes it: scaling, KV rejection, rebalancing."""
    if "autoscale" in tables:
        tables["autoscale"] |= some_of(rng, _AUTOSCALE, 0.12)
        if tables["autoscale"].get("loader") == "cache" and chance(rng, 0.5):
            tables["autoscale"]["host_cache_ttl_s"] = float(pick(rng, (0.0, 0.1, 0.5)))
    if "kv_reject" in tables:
        tables["kv_reject"] |= some_of(
            rng, {"enabled": (True, True, False), "period_ms": (1.0, 10.0, 200.0)}, 0.4
        )
    if "migration" in tables and chance(rng, 0.4):
        tables["migration"]["rebalance_period_ms"] = float(pick(rng, (5.0, 50.0, 1000.0)))


def _arrivals(rng: Rng, tables: Tables, lines: list[Tables]) -> None:
    """Clients in a closed loop or a cap in flight, a denser file, another rate, prompts that are
    there already."""
    workload = tables["workload"]
    times = [line["arrival_time_ns"] for line in lines]
    first_ns, last_ns = min(times), max(times)
    if chance(rng, 0.15) and times == sorted(times):
        workload["upscale"] = int(pick(rng, (2, 3)))
    if chance(rng, 0.4):
        workload.pop("time_scale", None)
        key = "concurrency" if len(lines) % 2 else "max_in_flight"
        workload[key] = int(pick(rng, (1, 4, 20)))
    elif chance(rng, 0.15) and last_ns > first_ns and not workload.get("limit"):
        if times[(len(times) - 1) // workload.get("upscale", 1)] == first_ns:
            workload.pop("upscale", None)  # all would arrive at once: no rate to scale
        workload.pop("time_scale", None)
        workload["rate_per_s"] = float(pick(rng, (5.0, 40.0)))
    scheduler = tables["scheduler"]
    is_plain = all(
        group["role"] == "colocated" and "data_parallel_group" not in group
        for group in tables["replicas"]
    )
    if not is_plain or scheduler["policy"] != "vllm":
        return
    for feature in all_features():
        feature.draw_late(rng, tables)


def _scheduling(rng: Rng, tables: Tables, lines: list[Tables]) -> None:
    scheduler = tables["scheduler"]
    policy = scheduler["policy"]
    fields = unions()[SchedulerTable].keys(policy)
    values = dict(_SCHEDULER)
    for feature in all_features():
        values |= feature.values
    drawn = some_of(rng, {**values, **_SCHEDULER_OF_OTHERS}, 0.2)
    for feature in all_features():
        feature.draw_keys(rng, tables, drawn)
    if policy == tag_of(FcfsTable):
        drawn.pop("skip_blocked", None)
    scheduler |= {key: value for key, value in drawn.items() if key in fields}
    if policy in _QUIRKS and chance(rng, 0.3):
        scheduler["faithful"] = [quirk for quirk in _QUIRKS[policy] if chance(rng, 0.6)]
    if chance(rng, 0.15):
        scheduler["order"] = "deadline" if policy != tag_of(FcfsTable) else "arrival"
        for line in lines:
            for turn in line.get("sub_requests", [line]):
                if chance(rng, 0.6):
                    turn["deadline_ns"] = int(pick(rng, (0, 50_000_000, 2_000_000_000)))
    for feature in features_in(tables):
        feature.vary(rng, tables, lines)
