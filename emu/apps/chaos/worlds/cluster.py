"""Draws of a plain world's replicas and machines."""

from __future__ import annotations

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick


def draw_cluster(rng: Rng, tables: Tables, kind: str) -> None:
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
