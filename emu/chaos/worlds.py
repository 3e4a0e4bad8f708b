"""Random worlds: a cluster, policies, a workload and faults, all drawn from one seed.

Swarm testing: each world switches a random part of the possibilities off and gives the rest very
different weights, because uniform mixes cancel themselves out. Delays come from few values, so that
things often happen at the same instant. Worlds are small: some thousand events.

A world is a configuration as plain tables plus the lines of its workload, so that any of them can
be written down as a file. Streams are separate: faults do not change the cluster or the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from emu.config.faultkinds import KINDS
from emu.rng import rng_stream

T = TypeVar("T")
Rng = np.random.Generator
Tables = dict[str, Any]

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
_NEEDS_ROLES: Final = (
    "partition",
    "lease_expired",
    "destination_refuses",
    "transfer_refused",
    "transfer_broken",
    "transfer_hang",
    "completion_late",
    "completion_twice",
    "handshake_lost",
)
_NEEDS_PLANNER: Final = ("metrics_frozen", "planner_restart")
_TIMES_S: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class World(msgspec.Struct):
    """A configuration and its workload."""

    tables: Tables
    lines: list[dict[str, Any]]
    heals: bool
    """Every fault ends and every replica comes back: all requests must end soon after that."""


def _pick(rng: Rng, values: Sequence[T]) -> T:
    return values[int(rng.integers(len(values)))]


def _chance(rng: Rng, probability: float) -> bool:
    return float(rng.random()) < probability


def draw_world(seed: int, *, requests_max: int = 60) -> World:
    """The world of a seed."""
    rng = rng_stream(seed, "chaos world")
    tables: Tables = {"seed": seed}
    kind = _pick(rng, ("colocated", "colocated", "roles", "roles", "roles", "scaled", "scaled"))
    _cluster(rng, tables, kind)
    _policies(rng, tables, kind)
    lines = _workload(rng_stream(seed, "chaos workload"), requests_max)
    heals = _recovery(rng, tables, kind)
    span_s = max(line["arrival_time_ns"] for line in lines) / 1e9
    faults = draw_faults(rng_stream(seed, "chaos faults"), tables, kind, span_s + 0.5, heals=heals)
    if faults:
        tables["faults"] = faults
    return World(tables, lines, heals)


# --- the cluster --------------------------------------------------------------------------------
def _cluster(rng: Rng, tables: Tables, kind: str) -> None:
    gpus = int(_pick(rng, (1, 2, 4)))
    wide = _chance(rng, 0.15) and gpus > 1
    shape: Tables = {}
    if wide:
        shape[str(_pick(rng, ("tensor_parallel", "pipeline_parallel")))] = 2
    each = 2 if wide else 1
    if kind == "colocated":
        groups = [{"role": "colocated", "count": int(rng.integers(1, 5)), **shape}]
    else:
        groups = [
            {"role": "prefill", "count": int(rng.integers(1, 4)), **shape},
            {"role": "decode", "count": int(rng.integers(1, 4)), **shape},
        ]
    if kind == "scaled":
        groups.append({"role": "inactive", "count": int(rng.integers(1, 5)), **shape})
    total = sum(group["count"] for group in groups) * each
    tables["model"] = {"name": "meta-llama/Llama-3.1-8B"}
    tables["nodes"] = [
        {
            "count": -(-total // gpus),
            "gpus": gpus,
            "gpu": "A100-SXM4-80GB",
            "nic_gbps": float(_pick(rng, (10.0, 100.0, 400.0))),
            "nic_latency_us": float(_pick(rng, (0.0, 5.0, 1000.0))),
            **({"nvlink_gbps": 0.0} if _chance(rng, 0.4) else {}),
        }
    ]
    tables["replicas"] = groups
    tables["latency"] = {
        "backend": "linear",
        "base_us": float(_pick(rng, (1000.0, 5000.0, 20000.0))),
        "per_token_us": float(_pick(rng, (0.0, 50.0, 100.0))),
        "per_context_token_us": float(_pick(rng, (0.0, 1.0))),
    }


def _policies(rng: Rng, tables: Tables, kind: str) -> None:
    policy = "fcfs" if kind == "scaled" and _chance(rng, 0.8) else _pick(rng, SCHEDULERS)
    block = int(_pick(rng, (1, 4, 16)))
    tables["scheduler"] = {
        "policy": policy,
        "block_size": block,
        "num_blocks": int(_pick(rng, (48, 100, 400))) * 16 // block,
        "max_num_seqs": int(_pick(rng, (2, 8, 64))),
        "max_num_batched_tokens": int(_pick(rng, (64, 512, 2048))),
        "chunk_size": int(_pick(rng, (32, 128))),
        "batch_size_cap": int(_pick(rng, (4, 64))),
        "max_tokens": 512,
        "max_tokens_in_batch": 4096,
        "max_batch_prefill_tokens": int(_pick(rng, (512, 2048))),
        "request_token_budget": 4096,
        "order": _pick(rng, ("arrival", "arrival", "arrival", "priority", "fair")),
        "prefix_caching": _chance(rng, 0.6),
    }
    tables["router"] = {
        "policy": _pick(rng, ("load", "round_robin", "random", "least_outstanding")),
        "max_outstanding": int(_pick(rng, (0, 0, 0, 8, 20))),
        "signal_delay_ms": float(_pick(rng, (0.0, 0.0, 20.0))),
    }
    tables["workload"] = {"oversized": "reject"}
    tables["network"] = {"kv_transfer": _pick(rng, ("layerwise", "blocking"))}
    if kind == "colocated":
        return
    tables["router"]["decode_policy"] = _pick(rng, ("first_free", "least_used"))
    if _chance(rng, 0.4):
        tables["kv_reject"] = {"factor": 1.2, "min_use": 0.1}
    tables["migration"] = {
        "rebalance": _chance(rng, 0.3),
        "rebalance_gap": 0.05,
        "drain": _chance(rng, 0.3),
    }
    if kind == "scaled":
        tables["autoscale"] = {
            "executor": _pick(rng, ("blitz", "blitz", "blitz", "serverless")),
            "live": _chance(rng, 0.7),
            "mutate": _chance(rng, 0.7),
            "multicast": _pick(rng, ("p2p", "chain", "tanz", "none")),
            "loader": _pick(rng, ("host", "cache", "disk")),
            "blocking": _chance(rng, 0.5),
            "prefill_lower_s": 0.05,
            "prefill_upper_s": 0.1,
            "decode_lower": 0.3,
            "decode_upper": 0.6,
            "spare_ttl_ms": float(_pick(rng, (0.0, 100.0, 500.0))),
        }
    elif _chance(rng, 0.3):
        tables["commands"] = _commands(rng, tables)


def _commands(rng: Rng, tables: Tables) -> list[Tables]:
    """Roles change by hand, but one replica of each kind stays as it is."""
    prefill, decode = (group["count"] for group in tables["replicas"][:2])
    commands: list[Tables] = []
    for replica in range(1, prefill):
        at_s = float(_pick(rng, _TIMES_S))
        word = _pick(rng, ("to_decode", "deactivate", "to_old_prefill"))
        commands.append({"at_s": at_s, "replica": replica, "command": word})
        if word == "deactivate" and _chance(rng, 0.6):
            later = at_s + float(_pick(rng, _TIMES_S))
            commands.append({"at_s": later, "replica": replica, "command": "to_prefill"})
    for replica in range(prefill + 1, prefill + decode):
        at_s = float(_pick(rng, _TIMES_S))
        commands.append({"at_s": at_s, "replica": replica, "command": "deactivate"})
        if _chance(rng, 0.6):
            later = at_s + float(_pick(rng, _TIMES_S))
            commands.append({"at_s": later, "replica": replica, "command": "to_decode"})
    return commands


# --- the workload -------------------------------------------------------------------------------
def _workload(rng: Rng, requests_max: int) -> list[dict[str, Any]]:
    """Lines in emu's own format, with ties, sessions, cancellations and extreme lengths."""
    count = int(rng.integers(5, requests_max + 1))
    gap_ns = int(_pick(rng, (0, 1_000_000, 10_000_000, 50_000_000)))
    longest = int(_pick(rng, (30, 300, 700)))
    has_prefixes = _chance(rng, 0.3)
    leaving, in_sessions = (0.0, 0.15, 0.4)[int(rng.integers(3))], _chance(rng, 0.3)
    at_ns = 0
    lines: list[dict[str, Any]] = []
    for index in range(count):
        if not _chance(rng, 0.3):  # ties are common
            at_ns += gap_ns * int(rng.integers(0, 4))
        if in_sessions and _chance(rng, 0.2):
            turns = [
                _turn(rng, longest, has_prefixes)
                | ({} if last else {"tool_duration_ns": int(_pick(rng, (0, 10_000_000)))})
                for last in (False, True)
            ]
            session = f"s{index}"
            lines.append({"session_id": session, "arrival_time_ns": at_ns, "sub_requests": turns})
            continue
        line = {"arrival_time_ns": at_ns, **_turn(rng, longest, has_prefixes)}
        if _chance(rng, leaving):
            line["cancel_after_ns"] = int(_pick(rng, (0, 5_000_000, 50_000_000, 300_000_000)))
        if _chance(rng, 0.2):
            line["priority"] = int(rng.integers(3))
            line["tenant"] = f"t{int(rng.integers(3))}"
        lines.append(line)
    return lines


def _turn(rng: Rng, longest: int, has_prefixes: bool) -> dict[str, Any]:
    prompt = 1 if _chance(rng, 0.05) else int(rng.integers(1, longest + 1))
    output = int(_pick(rng, (1, 2, 10, 40, 120)))
    turn: dict[str, Any] = {"input_toks": prompt, "output_toks": output}
    if has_prefixes:
        group = int(rng.integers(3)) * 10_000
        turn["input_tok_ids"] = [group + i for i in range(prompt)]
        turn["output_tok_ids"] = [90_000 + i for i in range(output)]
    return turn


# --- faults -------------------------------------------------------------------------------------
def _recovery(rng: Rng, tables: Tables, kind: str) -> bool:
    heals = _chance(rng, 0.6)
    tables["recovery"] = {
        "on_crash": _pick(rng, ("retry", "retry", "retry", "fail")),
        "max_retries": int(_pick(rng, (0, 1, 3))),
        "transfer_timeout_ms": float(_pick(rng, (5.0, 50.0, 500.0))),
        "progress_deadline_ms": float(_pick(rng, (50.0, 500.0))),
        "replace": heals or _chance(rng, 0.6),
        "restart_s": float(_pick(rng, (0.0, 0.1, 1.0))),
        "load_deadline_s": float(_pick(rng, (20.0, 60.0))),
        "drain_grace_s": float(_pick(rng, (0.0, 0.0, 0.05))),
        "client_retries": int(_pick(rng, (0, 0, 2))),
        "client_backoff_ms": 50.0,
    }
    tables["limits"] = {
        "simulated_s": 2000.0,
        "events_per_instant": 20_000,
        "preemptions_per_request": 50,
    }
    return heals


def draw_faults(rng: Rng, tables: Tables, kind: str, span_s: float, *, heals: bool) -> list[Tables]:
    """Some faults of some kinds for this cluster, in order of time."""
    if _chance(rng, 0.05):
        return []  # a world without faults, now and then
    kinds = [
        name
        for name in KINDS
        if (kind != "colocated" or name not in _NEEDS_ROLES)
        and (kind == "scaled" or name not in _NEEDS_PLANNER)
        and _chance(rng, 0.35)
    ]
    if not kinds:
        kinds = ["replica_crash"]
    weights = rng.exponential(size=len(kinds)) + 0.05
    weights /= weights.sum()
    replicas = sum(group["count"] for group in tables["replicas"])
    machines = sum(node["count"] for node in tables["nodes"])
    faults: list[Tables] = []
    calm_s = float(_pick(rng, (0.0, 0.05, 0.3)))
    at_s = 0.0
    for _ in range(int(rng.integers(1, 9))):
        name = kinds[int(rng.choice(len(kinds), p=weights))]
        step_s = float(rng.random()) * span_s / 4 if _chance(rng, 0.7) else 0.0
        at_s = round(at_s + calm_s + step_s, 3 if _chance(rng, 0.5) else 9)
        faults.append(_fault(rng, name, at_s, replicas, machines, kind, heals=heals))
    return faults


def _fault(
    rng: Rng, name: str, at_s: float, replicas: int, machines: int, kind: str, *, heals: bool
) -> Tables:
    spec = KINDS[name]
    fault: Tables = {"at_s": at_s, "kind": name}
    groups = list(spec.one_of)
    for group in groups:
        key = "replica" if "replica" in group and not _chance(rng, 0.3) else _pick(rng, group)
        if key == "node":
            fault["node"] = int(rng.integers(machines))
        elif key == "stage":
            stages = [s for s in spec.stages if kind != "colocated" or s in ("colocated", "any")]
            if name == "client_leaves":
                stages = [s for s in spec.stages if kind != "colocated" or "migr" not in s]
            fault["stage"] = _pick(rng, stages)
        elif key == "request":
            fault["request"] = int(rng.integers(20))
        else:
            fault[key] = int(rng.integers(replicas))
    if fault.get("source", -1) == fault.get("destination", -2):
        if replicas == 1:
            return {"at_s": at_s, "kind": "replica_crash", "replica": 0, **_until(rng, heals)}
        fault["destination"] = (fault["source"] + 1) % replicas
    if spec.magnitude is not None:
        fault["magnitude"] = _magnitude(rng, name)
    if name in _WINDOWS:
        fault["probability"] = float(_pick(rng, (0.2, 0.5, 1.0)))
    if name == "swizzle":
        fault["probability"] = float(_pick(rng, (0.5, 1.0)))
    if name in ("link_down", "client_leaves"):
        fault["times"] = int(rng.integers(1, 4))
    is_finite = heals or spec.needs_duration or name == "load_stuck"  # or nothing ever loads
    if spec.takes_duration and (is_finite or _chance(rng, 0.6)):
        fault["duration_s"] = float(_pick(rng, _TIMES_S[1:]))
    return fault


def _until(rng: Rng, heals: bool) -> Tables:
    return {"duration_s": float(_pick(rng, _TIMES_S[1:]))} if heals else {}


_WINDOWS: Final = (
    *_NEEDS_ROLES[2:],
    "host_cache_stale",
    "load_stuck",
)


def _magnitude(rng: Rng, name: str) -> float:
    if name == "straggler":
        return float(_pick(rng, (1.2, 3.0, 10.0)))
    if name == "overload":
        return float(_pick(rng, (2.0, 5.0)))
    if name in ("link_latency", "completion_late", "completion_twice"):
        return float(_pick(rng, (0.001, 1.0, 100.0)))
    return float(_pick(rng, (0.01, 0.1, 0.5, 0.9)))
