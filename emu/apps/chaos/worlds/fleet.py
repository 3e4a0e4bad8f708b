"""Draws of several models in place of a world's replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.config.schema import HpaTable
from emu.config.tables import tag_of

_FLEET: Final = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
)
_OTHER_ROLES: Final = ("prefill", "decode")


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
