"""Random worlds: a cluster, policies, a workload and faults, all drawn from one seed.

Swarm testing: each world switches a random part of the possibilities off and gives the rest very
different weights, because uniform mixes cancel themselves out. Delays come from few values, so that
things often happen at the same instant. Worlds are small: some thousand events. Faults are drawn
in `drawfaults.py`.

A world is a configuration as plain tables plus the lines of its workload, so that any of them can
be written down as a file. Streams are separate: faults do not change the cluster or the requests.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from emu.chaos.drawfaults import (
    TIMES_S,
    Rng,
    Tables,
    chance,
    draw_faults,
    ground_of,
    pick,
)
from emu.chaos.drawmodels import draw_models
from emu.chaos.drawrare import draw_rare
from emu.chaos.drawwide import draw_wide
from emu.config.kinds import KINDS
from emu.config.schema import SchedulerTable
from emu.rng import rng_stream

KINDS_OF_CLUSTER: Final = (
    *["colocated"] * 3,
    "group",
    *["pool"] * 2,
    *["roles"] * 5,
    *["scaled"] * 5,
)
"""Colocated: fixed, in a data-parallel group, scaled as a pool. Split: fixed, scaled."""
SCHEDULERS: Final = (
    "vllm",
    "vllm",
    "fcfs",
    "fcfs",
    "vllm_v0",
    "sarathi",
    "orca",
    "lightllm",
    "faster_transformer",
)


class World(msgspec.Struct):
    """A configuration and its workload."""

    tables: Tables
    lines: list[dict[str, Any]]
    heals: bool
    """Every fault ends and every replica comes back: all requests must end soon after that."""


def draw_world(seed: int, *, requests_max: int = 60, wide: bool = True) -> World:
    """The world of a seed.

    `wide`: also keys that plain worlds leave at their defaults (`drawwide.py`); tests that change
    a world's model, policy or costs take a plain one.
    """
    rare = draw_rare(seed) if wide else None
    if rare is not None:
        tables, lines, faults = rare
        own = tables.get("recovery", {})
        heals = _recovery(rng_stream(seed, "chaos world"), tables)
        tables["recovery"] |= own
        return World(tables | {"faults": faults}, lines, heals)
    rng = rng_stream(seed, "chaos world")
    tables = {"seed": seed}
    kind = pick(rng, KINDS_OF_CLUSTER)
    _cluster(rng, tables, kind)
    _policies(rng, tables, kind)
    lines = _workload(rng_stream(seed, "chaos workload"), requests_max, tables)
    draw_models(seed, tables, lines)
    heals = _recovery(rng, tables)
    span_s = max(line["arrival_time_ns"] for line in lines) / 1e9
    if wide:
        span_s = draw_wide(seed, tables, lines)
    if tables.get("autoscale", {}).get("loader") in ("disk", "cache"):
        # Weights that never come from a disk in time would be loaded for ever.
        tables["recovery"]["load_deadline_s"] *= 4
    if "models" in tables and "autoscale" in tables:
        # What is left of a fleet may be too little for the least that each model is to have.
        heals = tables["recovery"]["replace"] = True
    ground = ground_of(tables, heals=heals)
    faults = draw_faults(rng_stream(seed, "chaos faults"), ground, span_s + 0.5)
    if faults:
        tables["faults"] = faults
    return World(tables, lines, heals)


# --- the cluster --------------------------------------------------------------------------------
def _cluster(rng: Rng, tables: Tables, kind: str) -> None:
    gpus = int(pick(rng, (1, 2, 4)))
    wide = chance(rng, 0.15) and gpus > 1
    shape: Tables = {}
    if wide:
        shape[str(pick(rng, ("tensor_parallel", "pipeline_parallel")))] = 2
    each = 2 if wide else 1
    if kind in ("colocated", "pool"):
        groups = [{"role": "colocated", "count": int(rng.integers(1, 5)), **shape}]
    elif kind == "group":
        member = {"role": "colocated", **shape}
        groups = [{**member, "count": int(rng.integers(2, 4)), "data_parallel_group": "A"}]
        if chance(rng, 0.5):
            groups.append({**member, "count": 1})
    else:
        groups = [
            {"role": "prefill", "count": int(rng.integers(1, 4)), **shape},
            {"role": "decode", "count": int(rng.integers(1, 4)), **shape},
        ]
    if kind in ("scaled", "pool") or (kind in ("colocated", "roles") and chance(rng, 0.2)):
        groups.append({"role": "inactive", "count": int(rng.integers(1, 5)), **shape})
    total = sum(group["count"] for group in groups) * each
    tables["model"] = {"name": "meta-llama/Llama-3.1-8B"}
    tables["nodes"] = [
        {
            "count": -(-total // gpus) + int(pick(rng, (0, 0, 0, 1))),
            "gpus": gpus,
            "gpu": "A100-SXM4-80GB",
            "host_memory_gib": 64.0,
            "nic_gbps": float(pick(rng, (10.0, 100.0, 400.0))),
            "nic_latency_us": float(pick(rng, (0.0, 5.0, 1000.0))),
            **({"nvlink_gbps": 0.0} if chance(rng, 0.4) else {}),
        }
    ]
    tables["replicas"] = groups
    tables["latency"] = {
        "backend": "linear",
        "base_us": float(pick(rng, (1000.0, 5000.0, 20000.0))),
        "per_token_us": float(pick(rng, (0.0, 50.0, 100.0))),
        "per_context_token_us": float(pick(rng, (0.0, 1.0))),
    }


def _policies(rng: Rng, tables: Tables, kind: str) -> None:
    policy = "fcfs" if kind == "scaled" and chance(rng, 0.8) else pick(rng, SCHEDULERS)
    if kind == "group":
        policy = "vllm"
    tables["scheduler"] = _scheduler(rng, policy)
    tables["router"] = {
        "policy": pick(rng, ("load", "round_robin", "random", "least_outstanding")),
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
        tables["autoscale"] = _pool_scaling(rng)
    if kind == "colocated":
        tables["migration"] = {"rebalance": chance(rng, 0.2), "rebalance_gap": 0.05}
        if chance(rng, 0.3):
            tables["commands"] = _colocated_commands(rng, tables)
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
        tables["autoscale"] = _role_scaling(rng)
    elif chance(rng, 0.3):
        tables["commands"] = _commands(rng, tables)


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
    if policy == "fcfs":
        drawn["order"] = "arrival"  # as its name says
    # All figures are drawn whatever the policy is, so that a world does not depend on it otherwise.
    kind = KINDS[SchedulerTable].kinds[policy]
    return {key: value for key, value in drawn.items() if key in kind.__struct_fields__}


def _pool_scaling(rng: Rng) -> Tables:
    return {
        "executor": pick(rng, ("blitz", "serverless")),
        "planner": "hpa",
        "metric": pick(rng, ("kv_utilization", "concurrency", "queue")),
        "target_utilization": 0.3,
        "target_value": float(pick(rng, (1.0, 4.0))),
        "loader": pick(rng, ("host", "cache", "disk")),
        "max_replicas": int(pick(rng, (1000, 2))),
        "scale_down_stabilization_s": float(pick(rng, (0.0, 0.2, 1.0))),
        "cold_start_s": float(pick(rng, (0.0, 0.0, 0.3))),
        "metrics_delay_ms": float(pick(rng, (0.0, 0.0, 0.0, 30.0, 400.0))),
    }


def _role_scaling(rng: Rng) -> Tables:
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


def _colocated_commands(rng: Rng, tables: Tables) -> list[Tables]:
    """All but the first leave and come back by hand, or come for the first time."""
    commands: list[Tables] = []
    serving, *idle = (group["count"] for group in tables["replicas"])
    for replica in range(1, serving + sum(idle)):
        at_s = float(pick(rng, TIMES_S))
        if replica < serving:
            commands.append({"at_s": at_s, "replica": replica, "command": "deactivate"})
            at_s += float(pick(rng, TIMES_S))
        if chance(rng, 0.6):
            commands.append({"at_s": at_s, "replica": replica, "command": "to_colocated"})
    return commands


def _commands(rng: Rng, tables: Tables) -> list[Tables]:
    """Roles change by hand, but one replica of each kind stays as it is."""
    prefill, decode, *idle = (group["count"] for group in tables["replicas"])
    commands: list[Tables] = []
    for replica in range(1, prefill):
        at_s = float(pick(rng, TIMES_S))
        word = pick(rng, ("to_decode", "deactivate", "to_old_prefill"))
        commands.append({"at_s": at_s, "replica": replica, "command": word})
        if word == "deactivate" and chance(rng, 0.6):
            later = at_s + float(pick(rng, TIMES_S))
            commands.append({"at_s": later, "replica": replica, "command": "to_prefill"})
    for replica in range(prefill + 1, prefill + decode):
        at_s = float(pick(rng, TIMES_S))
        commands.append({"at_s": at_s, "replica": replica, "command": "deactivate"})
        if chance(rng, 0.6):
            later = at_s + float(pick(rng, TIMES_S))
            commands.append({"at_s": later, "replica": replica, "command": "to_decode"})
    for replica in range(prefill + decode, prefill + decode + sum(idle)):
        word = pick(rng, ("to_prefill", "to_decode", "to_new_prefill"))
        at_s = float(pick(rng, TIMES_S))
        commands.append({"at_s": at_s, "replica": replica, "command": word})
    return commands


# --- the workload -------------------------------------------------------------------------------
def _workload(rng: Rng, requests_max: int, tables: Tables) -> list[dict[str, Any]]:
    """Lines in emu's own format, with ties, sessions, cancellations and extreme lengths."""
    scheduler, has_tiers = tables["scheduler"], bool(tables["network"].get("tiers"))
    whole = scheduler["num_blocks"] * scheduler["block_size"]
    largest = whole if chance(rng, 0.3) else 0
    count = int(rng.integers(5, requests_max + 1))
    gap_ns = int(pick(rng, (0, 1_000_000, 10_000_000, 50_000_000)))
    longest = int(pick(rng, (300, 700) if has_tiers else (30, 300, 700)))
    prefixes = int(pick(rng, (3, 12))) if has_tiers or chance(rng, 0.3) else 0
    leaving, in_sessions = (0.0, 0.15, 0.4)[int(rng.integers(3))], chance(rng, 0.3)
    at_ns = 0
    lull_ns = int(pick(rng, (0, 0, 300_000_000, 3_000_000_000)))  # a second burst after a while
    lines: list[dict[str, Any]] = []
    for index in range(count):
        if index == count // 2:
            at_ns += lull_ns
        if not chance(rng, 0.3):  # ties are common
            at_ns += gap_ns * int(rng.integers(0, 4))
        if in_sessions and chance(rng, 0.2):
            turns = [
                _turn(rng, longest, prefixes, largest)
                | ({} if last else {"tool_duration_ns": int(pick(rng, (0, 10_000_000)))})
                for last in (False, True)
            ]
            session = f"s{index}"
            lines.append({"session_id": session, "arrival_time_ns": at_ns, "sub_requests": turns})
            continue
        line = {"arrival_time_ns": at_ns, **_turn(rng, longest, prefixes, largest)}
        if chance(rng, leaving):
            line["cancel_after_ns"] = int(pick(rng, (0, 5_000_000, 50_000_000, 300_000_000)))
        if chance(rng, 0.2):
            line["priority"] = int(rng.integers(3))
            line["tenant"] = f"t{int(rng.integers(3))}"
        lines.append(line)
    return lines


def _turn(rng: Rng, longest: int, prefixes: int, largest: int) -> dict[str, Any]:
    """`largest`: tokens that just fit into an empty replica; 0 = no such request."""
    prompt = 1 if chance(rng, 0.05) else int(rng.integers(1, longest + 1))
    output = int(pick(rng, (1, 2, 10, 40, 120)))
    if largest and chance(rng, 0.05):  # the KV of the last output token is never computed
        prompt = largest - output + 1
    turn: dict[str, Any] = {"input_toks": prompt, "output_toks": output}
    if prefixes:
        group = int(rng.integers(prefixes)) * 10_000
        turn["input_tok_ids"] = [group + i for i in range(prompt)]
        turn["output_tok_ids"] = [90_000 + i for i in range(output)]
    return turn


# --- recovery -----------------------------------------------------------------------------------
def _recovery(rng: Rng, tables: Tables) -> bool:
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
