"""Draws that make a world wide: keys of the schema that plain worlds leave at their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from emu.apps.chaos.draws import (
    TIMES_S,
    Rng,
    Tables,
    chance,
    draw_shapes,
    features_in,
    keeps_other_things,
    pick,
)
from emu.config.kinds import unions
from emu.config.presets import PRESETS
from emu.config.schema import (
    FcfsTable,
    HpaTable,
    LightLlmTable,
    PaperTable,
    SarathiTable,
    SchedulerTable,
    VllmV0Table,
)
from emu.config.tables import tag_of
from emu.features.registry import all_features
from emu.rng import rng_stream

# --- what scales and what is asked: presets, several models, made workloads, sessions -------------
LIVE_PRESETS: Final = ("blitzscale", "multicast", "network", "serverlessllm", "allcache")
_FLEET: Final = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
)
_OTHER_ROLES: Final = ("prefill", "decode")


# --- scaling ------------------------------------------------------------------------------------
def draw_scaling(rng: Rng, tables: Tables) -> None:
    """A named system, another planner, or bounds that let all replicas go."""
    table: Tables | None = tables.get("autoscale")
    groups = tables["replicas"]
    if table is None:
        roles = {group["role"] for group in groups}
        is_apart = any("data_parallel_group" in group for group in groups)
        if roles == {"prefill", "decode"} and not is_apart and chance(rng, 0.1):
            tables["autoscale"] = {"preset": pick(rng, ("distserve_full", "distserve_half"))}
        return
    is_pool = table.get("planner") == tag_of(HpaTable)
    if chance(rng, 0.25):
        preset = "hpa" if is_pool else pick(rng, LIVE_PRESETS)
        kept = {} if preset != "hpa" else {"tick_ms": float(pick(rng, (20.0, 500.0)))}
        for key in PRESETS[preset]:
            table.pop(key, None)
        table |= {"preset": preset, **kept}
    elif not is_pool and chance(rng, 0.3):
        table["planner"] = tag_of(PaperTable)
    if is_pool and chance(rng, 0.4):
        table["scale_up_stabilization_s"] = float(pick(rng, (0.1, 0.5)))
    if not chance(rng, 0.3):
        return
    if is_pool:
        table["min_replicas"] = int(pick(rng, (0, 0, 2)))
        table["max_replicas"] = max(2, table["max_replicas"])
    else:
        table |= {"min_prefill": int(pick(rng, (0, 2))), "min_decode": int(pick(rng, (0, 0, 2)))}
    table["idle_s"] = float(pick(rng, (0.0, 0.1, 1.0)))


# --- several models -----------------------------------------------------------------------------
def draw_fleet(rng: Rng, tables: Tables, lines: Sequence[Tables]) -> None:
    """Two to four models in place of the world's replicas."""
    groups = tables.pop("replicas")
    tables.pop("commands", None)
    is_split = any(group["role"] == "prefill" for group in groups)
    is_scaled = "autoscale" in tables
    for key in ("rebalance", "drain"):
        tables.get("migration", {}).pop(key, None)
    served = [f"m{index}" for index in range(int(rng.integers(2, 5)))]
    tables["models"] = models = [
        _served_model(rng, label, tables, is_split=is_split, is_scaled=is_scaled)
        for label in served
    ]
    gpus = int(pick(rng, (2, 4)))
    start = sum(
        model["tensor_parallel"] * sum(model.get(role, 0) for role in _ROLES) for model in models
    )
    spare = int(rng.integers(1, 5))
    node = tables["nodes"][0] | {"gpus": gpus, "count": -(-(start + spare) // gpus) + 1}
    node["host_memory_gib"] = float(pick(rng, (20.0, 40.0, 256.0)))
    for key in ("pcie_shared_by", "nvlink_domain"):
        if key in node:
            node[key] = min(node[key], gpus)
    tables["nodes"] = [node]
    _asked(rng, tables, lines, served)


_ROLES: Final = ("prefill", "decode", "colocated")


def _served_model(
    rng: Rng, label: str, tables: Tables, *, is_split: bool, is_scaled: bool
) -> Tables:
    model: Tables = {
        "name": pick(rng, _FLEET),
        "served_name": label,
        "tensor_parallel": int(pick(rng, (1, 1, 2))),
    }
    least = 0 if is_scaled and chance(rng, 0.3) else 1
    for role in _OTHER_ROLES if is_split else ("colocated",):
        count = least * int(pick(rng, (1, 1, 2)))
        if count:
            model[role] = count
    drawn: Mapping[str, Sequence[Any]] = {
        "dtype": ("auto", "bfloat16"),
        "kv_cache_dtype": ("auto", "bfloat16"),
        "max_model_tokens": (0, 1_000),
        "pinned": (True, False),
        "max_outstanding": (0, 3, 20),
        "slo": (
            {"ttft_ms": 100.0},
            {"tpot_ms": 20.0, "e2e_ms": 900.0},
            {"ttft_ms_per_token": 0.5, "ttft_base_ms": 50.0},
        ),
    }
    model |= {key: pick(rng, values) for key, values in drawn.items() if chance(rng, 0.25)}
    if is_scaled and chance(rng, 0.4):
        table = tables["autoscale"]
        if table.get("planner") == tag_of(HpaTable):
            model["autoscale"] = {"min_replicas": int(pick(rng, (0, 1))), "idle_s": 0.2}
        else:
            least = int(pick(rng, (0, 1)))
            model["autoscale"] = {"min_prefill": least, "min_decode": least, "idle_s": 0.2}
    if chance(rng, 0.2):
        model["scheduler"] = {"num_blocks": tables["scheduler"]["num_blocks"] * 2}
    if chance(rng, 0.2):
        model["latency"] = {"base_us": 2_500.0}
    return model


def _asked(rng: Rng, tables: Tables, lines: Sequence[Tables], served: Sequence[str]) -> None:
    """Requests name a model, an alias, none, or one that no replica serves."""
    workload = tables["workload"]
    names = list(served)
    if chance(rng, 0.4):
        workload["models"] = {"gpt-9": served[-1]}
        names.append("gpt-9")
    if chance(rng, 0.2):
        names.append("no-such-model")
    if chance(rng, 0.5):
        workload["model_shares"] = {label: float(rng.integers(1, 5)) for label in served}
        workload["model_run"] = float(pick(rng, (1.0, 4.0)))
    named = float(pick(rng, (0.0, 0.7, 1.0)))
    for line in lines:
        if chance(rng, named):
            line["model"] = pick(rng, names)


# --- what is asked ------------------------------------------------------------------------------
def draw_sessions(rng: Rng, lines: Sequence[Tables]) -> None:
    """A few requests become long conversations."""
    for index, line in enumerate(lines):
        if "sub_requests" in line or "images" in line or not chance(rng, 0.15):
            continue
        kept: Tables = {key: line[key] for key in _OF_A_SESSION if key in line}
        turn = {key: value for key, value in line.items() if key not in _OF_A_SESSION}
        short = {**turn, "input_toks": max(1, turn["input_toks"] // 4)}
        if "input_tok_ids" in short:
            short["input_tok_ids"] = short["input_tok_ids"][: short["input_toks"]]
        turns = int(pick(rng, (5, 12, 25)))
        pause_ns = int(pick(rng, (0, 1_000_000, 80_000_000)))
        line.clear()
        line |= {**kept, "session_id": f"long{index}"}
        line["sub_requests"] = [
            {**short, **({"tool_duration_ns": pause_ns} if at < turns - 1 else {})}
            for at in range(turns)
        ]


_OF_A_SESSION: Final[Sequence[str]] = (
    *("arrival_time_ns", "priority", "tenant", "adapter", "acceptance_rate", "model"),
)


def draw_made(rng: Rng, tables: Tables) -> float:
    """A workload from distributions in place of lines; about the time over which it arrives."""
    arrivals: Tables = {
        "process": pick(rng, ("poisson", "gamma", "constant", "burst", "piecewise", "all_at_once")),
        "rate_per_s": float(pick(rng, (5.0, 50.0))),
    }
    if arrivals["process"] == "gamma":
        arrivals["cv"] = float(pick(rng, (0.3, 3.0)))
    elif arrivals["process"] == "burst":
        arrivals |= {"burst_rate_per_s": 200.0, "burst_every_s": 1.0, "burst_length_s": 0.1}
    elif arrivals["process"] == "piecewise":
        arrivals["points"] = [[0.0, 2.0], [1.0, 50.0], [3.0, 5.0]]
    made: Tables = {
        "requests": int(pick(rng, (10, 30))),
        "arrivals": arrivals,
        "prompt": _lengths(rng, 400),
        "output": _lengths(rng, 60),
        "tenants": int(pick(rng, (1, 3))),
    }
    if arrivals["process"] != "all_at_once" and chance(rng, 0.2):
        made["duration_s"] = 2.0
    if chance(rng, 0.4):
        made["sessions"] = {
            "turns_min": 1,
            "turns_max": int(pick(rng, (3, 8))),
            "tool_s": float(pick(rng, (0.0, 0.2))),
            "shared_context": chance(rng, 0.5),
        }
        if chance(rng, 0.4):
            made["sessions"]["branches"] = int(pick(rng, (2, 4)))
    elif chance(rng, 0.4):
        tables["workload"]["preset"] = pick(rng, ("chat", "code", "conversation", "summarization"))
    for feature in all_features():
        feature.draw_made(rng, tables, made)
    if chance(rng, 0.4):
        made |= {"prefix_groups": int(pick(rng, (1, 4))), "prefix_tokens": 64}
    for key in ("start_s", "upscale", "rate_per_s"):  # of the lines that were there
        tables["workload"].pop(key, None)
    if tables["workload"].get("concurrency"):
        made.pop("duration_s", None)
        del made["arrivals"]
    tables["workload"]["synthetic"] = made
    return min(10.0, float(made["requests"] / arrivals["rate_per_s"]))


def _lengths(rng: Rng, longest: int) -> Tables:
    table: Tables = {
        "distribution": pick(rng, ("fixed", "uniform", "zipf", "lognormal")),
        "min": 1,
        "max": longest,
    }
    figures: dict[str, Tables] = {
        "fixed": {"value": longest // 3},
        "zipf": {"theta": float(pick(rng, (0.4, 1.1)))},
        "lognormal": {"median": longest / 5, "sigma": 0.8},
    }
    return table | figures.get(table["distribution"], {})


# --- whole worlds ---------------------------------------------------------------------------------
# A stream of its own decides, so that the plain part of a world stays as it was drawn. What a
# world's own policies and backends refuse is not drawn for it: a refusal is a finding.

Values = Mapping[str, Sequence[Any]]
SLOWEST: Final = 20
"""A drawn model on drawn GPUs may be so many times slower than the coefficients of plain worlds."""

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


def draw_wide(seed: int, tables: Tables, lines: list[Tables]) -> float:
    """Widen two worlds in three, each by some of its possibilities.

    Returns about how long requests arrive, in seconds. A workload that is made from distributions
    leaves no lines.
    """
    rng = rng_stream(seed, "chaos wide")
    span_s: float = max(line["arrival_time_ns"] for line in lines) / 1e9
    if chance(rng, 1 / 3):
        return span_s
    if chance(rng, 0.5):
        _figures(rng, tables, lines)
    _latencies(rng_stream(seed, "chaos latencies"), tables)
    draw_scaling(rng, tables)
    if chance(rng, 0.15) and _can_be_fleet(tables):
        draw_fleet(rng, tables, lines)
    elif chance(rng, 0.6):
        draw_shapes(rng, tables)
        tables["limits"]["simulated_s"] *= SLOWEST
    if chance(rng, 0.2):
        draw_sessions(rng, lines)
    if chance(rng, 0.12):
        span_s = draw_made(rng, tables)
        lines.clear()
    roles = {group["role"] for group in tables.get("replicas", ())}
    if roles != {"colocated"} or keeps_other_things(tables["model"].get("name", "")):
        for feature in features_in(tables):
            if feature.key.startswith("workload."):  # those of [scheduler] went with their shapes
                feature.withdraw(tables)
    return span_s


def _can_be_fleet(tables: Tables) -> bool:
    """Several models know no tiers, and no groups that step together, here."""
    return (
        not tables["network"].get("tiers")
        and not any("data_parallel_group" in group for group in tables["replicas"])
        and not any("pipeline_parallel" in group for group in tables["replicas"])
        and not any(feature.keeps_model(tables, of_fleet=True) for feature in features_in(tables))
        and tables["model"]["name"] == "meta-llama/Llama-3.1-8B"
        and "preset" not in tables.get("autoscale", {})
    )


def _latencies(rng: Rng, tables: Tables) -> None:
    """Some replicas become slower or faster by command, and some of these are turned back."""
    if not chance(rng, 0.2):
        return
    commands: list[Tables] = []
    for replica in range(sum(group["count"] for group in tables["replicas"])):
        at_s = float(pick(rng, TIMES_S))
        factors = (float(pick(rng, (0.5, 1.7, 4.0))), 1.0)[: 1 + chance(rng, 0.5)]
        for factor in factors if chance(rng, 0.5) else ():
            turned = {"at_s": at_s, "replica": replica, "command": "set_latency"}
            commands.append({**turned, "factor": factor})
            at_s += float(pick(rng, TIMES_S))
    if commands:
        tables["commands"] = [*tables.get("commands", ()), *commands]


def _some(rng: Rng, values: Values, share: float) -> Tables:
    """A part of the keys, each with one of its values."""
    return {key: pick(rng, its) for key, its in values.items() if chance(rng, share)}


# --- single figures -----------------------------------------------------------------------------
def _figures(rng: Rng, tables: Tables, lines: list[Tables]) -> None:
    """Keys that stand for themselves."""
    for node in tables["nodes"]:
        node |= _some(rng, _NODE, 0.15)
        for key in ("pcie_shared_by", "nvlink_domain"):
            if key in node:
                node[key] = min(node[key], node["gpus"])
    tables["network"] |= _some(rng, _NETWORK, 0.15)
    if tables["latency"]["backend"] == "astra-sim":  # its executor runs collectives one way
        for key in ("collective_splits", "collective_algorithms"):
            tables["network"].pop(key, None)
    network = tables["network"]
    if network.get("congestion") and network.get("collective_algorithm", "").startswith("one"):
        del network["collective_algorithm"]  # it has no messages that meet
    _scheduling(rng, tables, lines)
    tables["model"] |= _some(rng, _MODEL, 0.15)
    if chance(rng, 0.2):
        tables["router"]["max_prompt_tokens"] = int(pick(rng, (50, 500)))
    if chance(rng, 0.3):
        tables["slo"] = slo = _some(rng, _SLO, 0.7)
        if not slo.get("ttft_ms_per_token"):
            slo.pop("ttft_base_ms", None)
    if chance(rng, 0.15):
        tables["power"] = _some(rng, _POWER, 0.7)
    if chance(rng, 0.3):
        tables["workload"] |= _some(rng, _WORKLOAD, 0.4)
    if chance(rng, 0.1):
        first_s, last_s = (f(x["arrival_time_ns"] for x in lines) / 1e9 for f in (min, max))
        tables["workload"]["start_s"] = round((first_s + last_s) / 4, 9)
    elif chance(rng, 0.5):
        _arrivals(rng, tables, lines)
    if tables["latency"]["backend"] == "linear" and chance(rng, 0.3):
        tables["latency"]["base_us"] += float(pick(rng, (0.0004, 0.0006)))  # rounded, then
    if "autoscale" in tables:
        tables["autoscale"] |= _some(rng, _AUTOSCALE, 0.12)
        if tables["autoscale"].get("loader") == "cache" and chance(rng, 0.5):
            tables["autoscale"]["host_cache_ttl_s"] = float(pick(rng, (0.0, 0.1, 0.5)))
    if "kv_reject" in tables:
        tables["kv_reject"] |= _some(
            rng, {"enabled": (True, True, False), "period_ms": (1.0, 10.0, 200.0)}, 0.4
        )
    if "migration" in tables and chance(rng, 0.4):
        tables["migration"]["rebalance_period_ms"] = float(pick(rng, (5.0, 50.0, 1000.0)))
    if chance(rng, 0.2):
        tables["limits"]["stalled_s"] = float(pick(rng, (0.0, 1800.0)))


def _arrivals(rng: Rng, tables: Tables, lines: list[Tables]) -> None:
    """Clients in a closed loop, a denser file, another rate, prompts that are there already."""
    workload = tables["workload"]
    times = [line["arrival_time_ns"] for line in lines]
    first_ns, last_ns = min(times), max(times)
    if chance(rng, 0.15) and times == sorted(times):
        workload["upscale"] = int(pick(rng, (2, 3)))
    if chance(rng, 0.1):
        workload.pop("time_scale", None)
        workload["concurrency"] = int(pick(rng, (1, 4, 20)))
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
    drawn = _some(rng, {**values, **_SCHEDULER_OF_OTHERS}, 0.2)
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
