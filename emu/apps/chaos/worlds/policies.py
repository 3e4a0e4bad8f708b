"""Draws of what decides in a plain world: scheduler, router, scaling, recovery."""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.worlds.commands import colocated_commands, role_commands
from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.config.kinds import unions
from emu.config.schema import (
    FasterTransformerTable,
    FcfsTable,
    HpaTable,
    LeastOutstandingTable,
    LightLlmTable,
    LoadTable,
    OrcaTable,
    RandomTable,
    RoundRobinTable,
    SarathiTable,
    SchedulerTable,
    VllmTable,
    VllmV0Table,
)
from emu.config.tables import tag_of

FCFS: Final = tag_of(FcfsTable)
HPA: Final = tag_of(HpaTable)
SCHEDULERS: Final = (
    *(tag_of(VllmTable), tag_of(VllmTable), FCFS, FCFS),
    *(tag_of(VllmV0Table), tag_of(SarathiTable), tag_of(OrcaTable)),
    *(tag_of(LightLlmTable), tag_of(FasterTransformerTable)),
)
ROUTERS: Final = (
    *(tag_of(LoadTable), tag_of(RoundRobinTable)),
    *(tag_of(RandomTable), tag_of(LeastOutstandingTable)),
)
"""Drawn with each world; others of the registry by a stream of their own."""


def draw_policies(rng: Rng, tables: Tables, kind: str) -> None:
    policy = FCFS if kind == "scaled" and chance(rng, 0.8) else pick(rng, SCHEDULERS)
    if kind == "group":
        policy = tag_of(VllmTable)
    tables["scheduler"] = _scheduler(rng, policy)
    tables["router"] = {
        "policy": pick(rng, ROUTERS),
        "max_outstanding": int(pick(rng, (0, 0, 0, 8, 20))),
        "signal_delay_ms": float(pick(rng, (0.0, 0.0, 20.0))),
    }
    tables["workload"] = {"oversized": "reject"}
    tables["network"] = {"kv_transfer": pick(rng, ("layerwise", "blocking"))}
    if policy == "vllm" and kind != "scaled" and chance(rng, 0.45):
        tiers = list(pick(rng, (("cpu",), ("cxl",), ("cxl",), ("cpu", "cxl"))))
        if "cxl" in tiers:
            speed = float(pick(rng, (0.002, 0.01, 60.0)))
            tables["nodes"][0] |= {"cxl_gib": 1.0, "cxl_gbytes_per_s": speed}
        tables["network"] |= {
            "tiers": tiers,
            "tier_block_tokens": int(pick(rng, (16, 64))),
            "tier_shared": chance(rng, 0.5),
            "cpu_tier_gib": float(pick(rng, (0.05, 1.0))),
        }
        blocks = 48 * 16 // tables["scheduler"]["block_size"]  # few, so that tiers are asked
        tables["scheduler"] |= {"prefix_caching": True, "num_blocks": blocks}
    if kind == "pool":
        tables["autoscale"] = pool_scaling(rng)
    if kind == "colocated":
        tables["migration"] = {"rebalance": chance(rng, 0.2), "rebalance_gap": 0.05}
        if chance(rng, 0.3):
            tables["commands"] = colocated_commands(rng, tables)
    if kind in ("colocated", "group", "pool"):
        return
    tables["router"]["decode_policy"] = pick(rng, ("first_free", "least_used"))
    if chance(rng, 0.4):
        tables["kv_reject"] = {"factor": 1.2, "min_use": 0.1}
    tables["migration"] = {
        "rebalance": chance(rng, 0.3),
        "rebalance_gap": 0.05,
        "drain": chance(rng, 0.3),
    }
    if kind == "scaled":
        tables["autoscale"] = role_scaling(rng)
    elif chance(rng, 0.3):
        tables["commands"] = role_commands(rng, tables)


def _scheduler(rng: Rng, policy: str) -> Tables:
    block = int(pick(rng, (1, 4, 16)))
    drawn = {
        "policy": policy,
        "block_size": block,
        "num_blocks": int(pick(rng, (48, 100, 400))) * 16 // block,
        "max_num_seqs": int(pick(rng, (2, 8, 64))),
        "max_num_batched_tokens": int(pick(rng, (64, 512, 2048))),
        "chunk_size": int(pick(rng, (32, 128))),
        "batch_size_cap": int(pick(rng, (4, 64))),
        "max_tokens": 512,
        "max_tokens_in_batch": 4096,
        "max_batch_prefill_tokens": int(pick(rng, (512, 2048))),
        "request_token_budget": 4096,
        "order": pick(rng, ("arrival", "arrival", "arrival", "priority", "fair")),
        "prefix_caching": chance(rng, 0.6),
        "async_scheduling": pick(rng, ("auto", "auto", "on")),
    }
    if policy == FCFS:
        drawn["order"] = "arrival"  # as its name says
    # All figures are drawn whatever the policy is, so that a world does not depend on it otherwise.
    keys = unions()[SchedulerTable].keys(policy)
    return {key: value for key, value in drawn.items() if key in keys}


def pool_scaling(rng: Rng) -> Tables:
    drawn: Tables = {
        "executor": pick(rng, ("blitz", "serverless")),
        "planner": HPA,
        "metric": pick(rng, ("kv_utilization", "concurrency", "queue")),
        "target_utilization": 0.3,
        "target_value": float(pick(rng, (1.0, 4.0))),
        "loader": pick(rng, ("host", "cache", "disk")),
        "max_replicas": int(pick(rng, (1000, 2))),
        "scale_down_stabilization_s": float(pick(rng, (0.0, 0.2, 1.0))),
        "cold_start_s": float(pick(rng, (0.0, 0.0, 0.3))),
        "metrics_delay_ms": float(pick(rng, (0.0, 0.0, 0.0, 30.0, 400.0))),
    }
    # Engines that start for a load also pin its pages; no draw of its own, so worlds stay.
    drawn["pin_gib_per_s"] = 4.2 if drawn["cold_start_s"] else 0.0
    return drawn


def role_scaling(rng: Rng) -> Tables:
    return {
        "executor": pick(rng, ("blitz", "blitz", "blitz", "serverless")),
        "live": chance(rng, 0.7),
        "mutate": chance(rng, 0.7),
        "multicast": pick(rng, ("p2p", "chain", "tanz", "none")),
        "loader": pick(rng, ("host", "cache", "disk")),
        "blocking": chance(rng, 0.5),
        "prefill_lower_s": 0.05,
        "prefill_upper_s": 0.1,
        "decode_lower": 0.3,
        "decode_upper": 0.6,
        "max_prefill": int(pick(rng, (64, 2))),
        "max_decode": int(pick(rng, (64, 2))),
        "spare_ttl_ms": float(pick(rng, (0.0, 100.0, 500.0))),
        "metrics_delay_ms": float(pick(rng, (0.0, 0.0, 0.0, 30.0, 400.0))),
    }


def draw_recovery(rng: Rng, tables: Tables) -> bool:
    heals = chance(rng, 0.6)
    tables["recovery"] = {
        "on_crash": pick(rng, ("retry", "retry", "retry", "fail")),
        "max_retries": int(pick(rng, (0, 1, 3))),
        "transfer_timeout_ms": float(pick(rng, (5.0, 50.0, 500.0))),
        "lease_ms": float(pick(rng, (0.0, 0.0, 0.0, 10.0, 200.0))),
        "progress_deadline_ms": float(pick(rng, (50.0, 50.0, 500.0, 60_000.0))),
        "replace": heals or chance(rng, 0.6),
        "restart_s": float(pick(rng, (0.0, 0.1, 1.0))),
        "load_deadline_s": float(pick(rng, (20.0, 60.0))),
        "drain_grace_s": float(pick(rng, (0.0, 0.0, 0.05))),
        "client_retries": int(pick(rng, (0, 0, 2))),
        "client_backoff_ms": 50.0,
    }
    tables["limits"] = {
        "simulated_s": 2000.0,
        "events_per_instant": 20_000,
        "preemptions_per_request": 50,
    }
    return heals
