"""Worlds of one group that shares experts, and of what `[engine]` and `[recovery]` say of it.

One wide world in thirty, by a stream of its own, so that all others stay. Ranks are lost while the
group stalls for another, come back while it does, and are too many to go on without. A campaign of
lost ranks draws nothing else, and wider groups.
"""

from __future__ import annotations

import itertools
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.faults import fault_on
from emu.config.schema import TensorrtLlmTable
from emu.config.tables import tag_of
from emu.features.registry import all_features
from emu.rng import rng_stream

SHARE: Final = 1 / 30
"""Of wide worlds."""
_FAULTS: Final = (
    *("gpu_crash", "gpu_crash", "gpu_crash", "replica_crash", "replica_restart"),
    *("pause", "straggler", "node_crash", "kv_shrink", "freeze"),
)
_LOSSES: Final = frozenset({"gpu_crash", "replica_crash", "replica_restart", "node_crash"})
"""Faults that take a rank's process away."""
_WIDE: Final = 32
"""Members of the widest groups, in campaigns of lost ranks alone."""


def draw_shared_experts(seed: int) -> tuple[Tables, list[Tables], list[Tables]] | None:
    """The tables, lines and faults of such a world; None for most seeds."""
    rng = rng_stream(seed, "chaos shared experts")
    return shared_experts(rng, seed) if chance(rng, SHARE) else None


def shared_experts(rng: Rng, seed: int) -> tuple[Tables, list[Tables], list[Tables]]:
    """The same; what came later is drawn by streams of the seed."""
    members = int(pick(rng, (2, 4, 8)))
    tables = _group(seed, rng, members)
    if chance(rng, 0.8):
        tables["recovery"] = _mask(rng)
    _apart(seed, tables)
    if members == 8 and chance(rng, 0.4) and "expert_gpus" not in tables["engine"]:
        _draft(rng, tables)
    elif chance(rng, 0.2):  # states beside attention
        tables["model"]["name"] = "Qwen/Qwen3-Next-80B-A3B-Instruct"
        tables["nodes"][0]["gpu"] = "GB200"
    _balance(seed, tables)
    return tables, _lines(rng), _faults(rng, members)


def draw_lost_ranks(seed: int) -> tuple[Tables, list[Tables], list[Tables]]:
    """Such a world of any seed, whose group masks experts and loses at least one rank."""
    for draw in itertools.count():
        rng = rng_stream(seed, f"chaos lost ranks {draw}")
        members = int(pick(rng, (2, 4, 8, _WIDE)))
        tables = _group(seed, rng, members)
        tables["recovery"] = _mask(rng)
        if members == _WIDE:  # slots must be dealt evenly
            tables["engine"]["redundant_experts"] = int(pick(rng, (0, 64)))
            tables["engine"].pop("eplb_likeness", None)
        elif members == 8 and chance(rng, 0.3):
            _draft(rng, tables)
        elif chance(rng, 0.15):
            tables["model"]["name"] = "Qwen/Qwen3-Next-80B-A3B-Instruct"
            tables["nodes"][0]["gpu"] = "GB200"
        _balance(seed, tables)
        lines, faults = _lines(rng), _faults(rng, members)
        if any(fault["kind"] in _LOSSES for fault in faults):
            return tables, lines, faults
    raise AssertionError("drawn for ever")


def _mask(rng: Rng) -> Tables:
    """How a group goes on without a rank."""
    return {
        "ep_fault": "mask",
        "ep_detect_s": float(pick(rng, (0.0, 0.01, 0.2, 2.0))),
        "ep_agree_s": float(pick(rng, (0.0, 0.05))),
        "expert_backup": pick(rng, ("host", "peer", "disk", "none")),
    }


def _group(seed: int, rng: Rng, members: int) -> Tables:
    """Members that share the experts of a small model."""
    return {
        "seed": seed,
        "model": {"name": "deepseek-ai/DeepSeek-V2-Lite", "max_model_tokens": 4096},
        "engine": _engine(rng, members),
        "scheduler": {"prefix_caching": chance(rng, 0.3)},
        "replicas": [{"count": members, "expert_parallel": members, "data_parallel_group": "a"}],
        "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 4, "count": -(-members // 4)}],
        "network": {},
        "workload": {"oversized": "reject"},
        "recovery": {},
    }


def lost_rank(rng: Rng, tables: Tables) -> list[Tables]:
    """A group that goes on without a rank, and reads the experts of which it had no other copy."""
    members = int(pick(rng, (2, 4, 8)))
    made = _group(int(tables["seed"]), rng, members)
    tables.clear()
    tables |= made
    tables["engine"]["redundant_experts"] = 64
    tables["recovery"] = _mask(rng) | {
        "ep_detect_s": float(pick(rng, (0.01, 0.2))),
        "expert_backup": pick(rng, ("host", "peer", "disk")),
    }
    gpu = int(rng.integers(members))
    tables["faults"] = [{"kind": "gpu_crash", "at_s": 0.1, "gpu": gpu, "duration_s": 3.0}]
    if members > 2 and chance(rng, 0.6):  # another one before the group has noticed the first
        other = {"at_s": float(pick(rng, (0.105, 0.15))), "gpu": (gpu + 1) % members}
        tables["faults"].append(tables["faults"][0] | other)
    return _lines(rng)[:24]


def _apart(seed: int, tables: Tables) -> None:
    """Some groups have their experts on GPUs of their own, and nothing to mask."""
    rng = rng_stream(seed, "chaos experts apart")
    if not chance(rng, 0.15):
        return
    gpus = int(pick(rng, (2, 4, 16)))
    tables["engine"] |= {
        "expert_gpus": gpus,
        "micro_batches": int(pick(rng, (1, 2, 3, 5))),
        "overlap": "none",
        "all2all": pick(rng, ("deepep", "mnnvl")),
        "redundant_experts": int(pick(rng, (0, 16))),
    }
    tables["replicas"][0]["expert_parallel"] = gpus
    tables["recovery"] = {}


def _balance(seed: int, tables: Tables) -> None:
    """Some groups are TensorRT-LLM's, most of whose prompts wait for those of other ranks."""
    rng = rng_stream(seed, "chaos ranks of attention")
    if not chance(rng, 0.2) or "Lite" not in tables["model"]["name"]:
        return
    name = tag_of(TensorrtLlmTable)
    tables["engine"]["name"] = name
    tables["scheduler"] = {"policy": name, "enable_block_reuse": chance(rng, 0.3)}
    if chance(rng, 0.8):
        tables["scheduler"] |= {
            "attention_dp_enable_balance": True,
            "attention_dp_timeout_iters": int(pick(rng, (0, 3, 60))),
            "attention_dp_batching_wait_iters": int(pick(rng, (0, 2, 10))),
        }


def _draft(rng: Rng, tables: Tables) -> None:
    """A larger model, which has layers for multi-token prediction."""
    tables["model"] = {"name": "deepseek-ai/DeepSeek-V3", "max_model_tokens": 4096}
    tables["nodes"][0]["gpu"] = "GB200"
    for feature in all_features():
        feature.draw_shared(rng, tables)


def _engine(rng: Rng, members: int) -> Tables:
    """How the group shares its 64 experts."""
    all2all = pick(rng, ("deepep", "deepep", "mnnvl", "allgather_reducescatter"))
    overlaps = {
        "deepep": ("none", "two_batch", "single_batch"),
        "mnnvl": ("none", "single_batch"),
        "allgather_reducescatter": ("none",),
    }
    engine: Tables = {
        "all2all": all2all,
        "overlap": pick(rng, overlaps[all2all]),
        "expert_popularity": pick(rng, ("uniform", "lognormal:1", "lognormal:2", "zipf:0.7")),
        "redundant_experts": int(pick(rng, (0, 8, 64))),
    }
    if engine["redundant_experts"] == 8:
        engine["eplb_likeness"] = 0.5  # a plan that misses much
    if engine["redundant_experts"] == 64 and engine["overlap"] == "none":
        engine["eplb_algorithm"] = "global"
    if chance(rng, 0.4):
        engine["eplb_interval_s"] = float(pick(rng, (0.05, 0.5)))
        engine["expert_drift_s"] = float(pick(rng, (0.0, 1.0)))
    return engine


def _lines(rng: Rng) -> list[Tables]:
    """Two waves of requests."""
    lines = [
        {
            "arrival_time_ns": round(begin_s * 1e9) + index * 2_000_000,
            "input_toks": int(rng.integers(1, 900)),
            "output_toks": int(pick(rng, (1, 2, 20, 150))),
        }
        for begin_s in (0.0, float(pick(rng, (0.1, 0.5, 3.0))))
        for index in range(int(rng.integers(4, 30)))
    ]
    return by_arrival(lines)


def _faults(rng: Rng, members: int) -> list[Tables]:
    """Losses close to each other."""
    found = []
    for _ in range(int(rng.integers(0, 6))):
        at_s = float(pick(rng, (0.02, 0.1, 0.11, 0.3, 0.6, 2.5)))
        member = int(rng.integers(members))
        fault = fault_on(rng, pick(rng, _FAULTS), at_s, member, [member], gpus=4)
        if fault is not None:
            found.append(fault)
    return sorted(found, key=lambda fault: float(fault["at_s"]))
