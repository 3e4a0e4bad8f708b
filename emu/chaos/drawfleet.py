"""Draws of what scales and of what is asked: presets, several models, made workloads, sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from emu.chaos.drawfaults import Rng, Tables, chance, pick
from emu.config.presets import PRESETS

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
    is_pool = table.get("planner") == "hpa"
    if chance(rng, 0.25):
        preset = "hpa" if is_pool else pick(rng, LIVE_PRESETS)
        kept = {} if preset != "hpa" else {"tick_ms": float(pick(rng, (20.0, 500.0)))}
        for key in PRESETS[preset]:
            table.pop(key, None)
        table |= {"preset": preset, **kept}
    elif not is_pool and chance(rng, 0.3):
        table["planner"] = "paper"
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
        if table.get("planner") == "hpa":
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
    has_turns = "preset" in tables["workload"] or "sessions" in made  # some presets have them
    if "limit_mm_per_prompt" in tables["scheduler"] and not has_turns:
        made["images"] = {
            "share": float(pick(rng, (0.3, 1.0))),
            "count": int(pick(rng, (1, 2))),
            "tokens": int(pick(rng, (8, 40))),
            "distinct": int(pick(rng, (0, 3))),
        }
    if chance(rng, 0.4):
        made |= {"prefix_groups": int(pick(rng, (1, 4))), "prefix_tokens": 64}
    if tables["scheduler"].get("enable_lora"):
        made["adapters"] = 4
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
