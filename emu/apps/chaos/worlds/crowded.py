"""Stops of the tour where models share GPUs: more of them, or more of their replicas, than GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.narrow import burst
from emu.config.schema import HpaTable, VllmTable
from emu.config.tables import tag_of

_OBJECTIVES: Final[Sequence[Tables]] = (
    {"ttft_ms": 1.0, "ttft_ms_per_token": 1.0, "ttft_base_ms": 20.0},
    {"ttft_ms": 60.0, "tpot_ms": 10.0},
    {"e2e_ms": 500.0},
)


def shared_gpus(rng: Rng, tables: Tables) -> list[Tables]:
    """Models that want more replicas than there are GPUs, each in its time."""
    served = [f"m{index}" for index in range(int(pick(rng, (2, 3, 4))))]
    del tables["model"], tables["replicas"]
    least = int(pick(rng, (0, 0, 1)))
    tables["models"] = [
        {
            "name": pick(rng, ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-1.5B")),
            "served_name": name,
            "colocated": max(least, int(name in ("m0", "m1"))),
            "slo": _OBJECTIVES[int(name[1:]) % len(_OBJECTIVES)],
        }
        for name in served
    ]
    gpus = max(int(pick(rng, (2, 3, 4))), least * len(served))
    tables["nodes"][0] |= {"count": 1, "gpus": gpus}
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 400, "max_num_seqs": 8}
    tables["autoscale"] = {
        "planner": tag_of(HpaTable),
        "executor": "serverless",
        "loader": pick(rng, ("host", "host", "cache")),
        "metric": pick(rng, ("concurrency", "queue")),
        "target_value": float(pick(rng, (1.0, 3.0))),
        "tick_ms": 20.0,
        "min_replicas": least,
        "idle_s": float(pick(rng, (0.1, 0.5))),
        "scale_down_stabilization_s": float(pick(rng, (0.1, 2.0))),
    }
    lines: list[Tables] = []
    if len(served) > 2 and not least:
        return _starved(rng, tables)
    for begin_s in (0.0, 0.6, 1.2, 2.5):
        names = served if chance(rng, 0.4) else [pick(rng, served)]
        for line in burst(rng, int(rng.integers(5, 12)), (10, 100), (5, 60)):
            line["arrival_time_ns"] += round(begin_s * 1e9)
            line["model"] = pick(rng, names)
            lines.append(line)
    return by_arrival(lines)


def _starved(rng: Rng, tables: Tables) -> list[Tables]:
    """Two models have all GPUs and much to do, one more than the other, when a third one comes."""
    tables["nodes"][0]["gpus"] = 4
    tables["models"] = tables["models"][:3]
    for model, count in zip(tables["models"], (2, 2, 0), strict=True):
        model["colocated"] = count
    tables["autoscale"] |= {"idle_s": 5.0, "scale_down_stabilization_s": 5.0}
    busier = int(rng.integers(2))
    lines: list[Tables] = []
    for index in range(2):
        count = int(rng.integers(8, 14)) if index == busier else int(rng.integers(3, 6))
        lines += [
            line | {"model": f"m{index}"} for line in burst(rng, count, (10, 100), (100, 200))
        ]
    for line in burst(rng, 4, (10, 100), (5, 60)):
        line["arrival_time_ns"] += 200_000_000
        lines.append(line | {"model": "m2"})
    return by_arrival(lines)
