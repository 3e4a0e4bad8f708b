"""A tour: each fourth seed is a small world of the next part that drawn worlds seldom enter.

Which part comes is counted, not drawn, so that three hundred seeds see each of them twice or more:
each feature alone, prompts that wait for more prompts, tokens that leave in groups, models that
keep windows or states, links by the shape of machines, schedulers of other engines without memory,
ranks that are lost, made workloads, pools of pods, weights in the memory of the machine, clients in
a loop. The rest of a world is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from emu.apps.chaos.worlds.crowded import shared_gpus
from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.experts import lost_rank
from emu.apps.chaos.worlds.models import HYBRIDS
from emu.apps.chaos.worlds.narrow import (
    burst,
    leaving,
    one_feature,
    served,
    small_world,
    tensorrt_llm,
    turns,
    waits_for_prompts,
)
from emu.apps.chaos.worlds.policies import SCHEDULERS, pool_scaling
from emu.apps.chaos.worlds.visits import (
    copies,
    known_prompts,
    known_there,
    layers,
    over_machines,
    rounds,
    struck_links,
    tenants,
    waves,
)
from emu.config.kinds import KINDS
from emu.config.schema import (
    RooflineTable,
    SchedulerTable,
    VidurTable,
    VllmTable,
)
from emu.config.tables import tag_of
from emu.features.registry import all_features
from emu.rng import rng_stream

EVERY: Final = 4
_AT: Final = 2
Stop = Callable[[Rng, Tables], list[Tables]]


def draw_tour(seed: int) -> tuple[Tables, list[Tables]] | None:
    """The tables and lines of such a world; None for other seeds."""
    if seed % EVERY != _AT:
        return None
    rng, stops = rng_stream(seed, "chaos tour"), _stops()
    tables = small_world(rng, seed, replicas_max=2)
    return tables, stops[seed // EVERY % len(stops)](rng, tables)


def _stops() -> Sequence[Stop]:
    features = [partial(one_feature, feature=feature) for feature in all_features()]
    return (
        *features,
        _waits,
        _groups_of_tokens,
        _hybrid,
        _links,
        _others,
        lost_rank,
        _made,
        _pods,
        _outside,
        *(rounds, tenants, known_prompts, known_there, layers, waves, struck_links),
        *(over_machines, shared_gpus, copies),
        _loops,
    )


def _waits(rng: Rng, tables: Tables) -> list[Tables]:
    """TensorRT-LLM's prompts wait for more of them."""
    lines = tensorrt_llm(rng, tables)
    waits_for_prompts(rng, tables)
    return lines


def _groups_of_tokens(rng: Rng, tables: Tables) -> list[Tables]:
    """A server that sends several tokens of a request at once."""
    lines = served(rng, tables)
    tables["engine"] = {"stream_interval": int(pick(rng, (2, 10, 50)))}
    return lines


def _hybrid(rng: Rng, tables: Tables) -> list[Tables]:
    """Sessions on a model that keeps windows or states, in little memory."""
    lines = turns(rng, tables)
    for feature in all_features():
        feature.withdraw(tables)
    tables["model"] = {"name": pick(rng, HYBRIDS)}
    tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
    tables["scheduler"] |= {"block_size": 16, "num_blocks": int(rng.integers(150, 400))}
    return lines


def _links(rng: Rng, tables: Tables) -> list[Tables]:
    """KV between machines whose GPUs, cards and leaves are joined in all ways."""
    lines = leaving(rng, tables)
    shape = {
        "pcie_shared_by": int(pick(rng, (1, 2))),
        "nvlink_domain": int(pick(rng, (0, 1, 2))),
        "nic_over_pcie": chance(rng, 0.5),
        "pcie_gbps": float(pick(rng, (-1.0, 32.0))),
        "nic_latency_us": float(pick(rng, (0.0, 30.0))),
        "nvlink_gbps": float(pick(rng, (-1.0, 0.0, 400.0))),
        "cxl_gib": 1.0,
        "cxl_devices": 2,
        "cxl_latency_ns": int(pick(rng, (0, 100_000))),
        "host_memory_gbytes_per_s": float(pick(rng, (20.0, 200.0))),
        "ssd_gbps": float(pick(rng, (10.0, 100.0))),
    }
    node = tables["nodes"][0] | shape
    tables["nodes"] = [node | {"count": 1, "leaf": "a"}, node | {"count": 2, "leaf": "b"}]
    tables["network"]["leaf_uplink_gbps"] = float(pick(rng, (5.0, 1.0, 200.0)))
    if chance(rng, 0.5):
        tables["network"] |= {"tiers": pick(rng, (["cxl"], ["cpu", "cxl"])), "cpu_tier_gib": 0.02}
    return lines


def _others(rng: Rng, tables: Tables) -> list[Tables]:
    """Schedulers of other engines, whose outputs do not fit."""
    policies = [
        name
        for name, kind in KINDS[SchedulerTable].kinds.items()
        if issubclass(kind, VidurTable) and name in SCHEDULERS and not issubclass(kind, VllmTable)
    ]
    tables["scheduler"] = {
        "policy": pick(rng, policies),
        "block_size": 16,
        "num_blocks": int(rng.integers(24, 40)),
        "batch_size_cap": int(pick(rng, (4, 16))),
    }
    return burst(rng, int(rng.integers(15, 30)), (10, 60), (20, 100))


def _made(rng: Rng, tables: Tables) -> list[Tables]:
    """Many short requests that are made by each process in turn."""
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 4000}
    processes = ("burst", "gamma", "piecewise", "poisson")
    process = processes[int(tables["seed"]) // 100 % len(processes)]
    arrivals: Tables = {"process": process, "rate_per_s": float(pick(rng, (20.0, 60.0)))}
    if process == "gamma":
        arrivals["cv"] = float(pick(rng, (0.3, 3.0)))
    elif process == "burst":
        arrivals |= {"burst_rate_per_s": 200.0, "burst_every_s": 1.0, "burst_length_s": 0.15}
    elif process == "piecewise":
        arrivals["points"] = [[0.0, 5.0], [1.0, 100.0], [2.0, 20.0], [4.0, 60.0]]
    laws: dict[str, Tables] = {
        "fixed": {"value": 40},
        "uniform": {"min": 5, "max": 60},
        "zipf": {"min": 5, "max": 60, "theta": float(pick(rng, (0.4, 1.1)))},
        "lognormal": {"min": 1, "max": 400, "median": 40.0, "sigma": 0.8},
    }
    law = pick(rng, tuple(laws))
    tables["workload"]["synthetic"] = {
        "requests": 250,
        "arrivals": arrivals,
        "prompt": {"distribution": law, **laws[law]},
        "output": {"distribution": "fixed", "value": 1},
    }
    return []


def _loops(rng: Rng, tables: Tables) -> list[Tables]:
    """Clients in a closed loop or a cap in flight, lines at another rate, and what is due when.

    Two stragglers strike one replica, the shorter one while the other lasts.
    """
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": int(pick(rng, (60, 2000))),
        "max_num_seqs": int(pick(rng, (2, 8))),
        "order": pick(rng, ("arrival", "deadline")),
    }
    lines = burst(rng, int(rng.integers(20, 40)), (10, 100), (5, 60))
    for line in lines:
        line["arrival_time_ns"] *= int(pick(rng, (1, 3)))
        if chance(rng, 0.6):
            line["deadline_ns"] = int(pick(rng, (50_000_000, 2_000_000_000)))
    lines = by_arrival(lines)
    asked: Sequence[Tables] = (
        {"concurrency": 3},
        {"upscale": 2, "rate_per_s": 50.0},
        {"max_in_flight": 4, "rate_per_s": 100.0},
    )
    tables["workload"] |= asked[int(tables["seed"]) // 100 % len(asked) - 1]
    tables["faults"] = [
        {"kind": "straggler", "replica": 0, "at_s": at_s, "factor": factor, "duration_s": lasts_s}
        for at_s, factor, lasts_s in ((0.05, 2.0, 0.5), (0.1, 1.5, 0.1))
    ]
    return lines


def _pods(rng: Rng, tables: Tables) -> list[Tables]:
    """A pool that grows and shrinks, between bounds of its own."""
    tables["replicas"] = [{"role": "colocated"}, {"role": "inactive", "count": 3}]
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 400, "max_num_seqs": 8}
    least = int(pick(rng, (0, 1, 2)))
    tables["autoscale"] = pool_scaling(rng) | {
        "min_replicas": least,
        "max_replicas": int(pick(rng, (2, 3, 4))),
        "tick_ms": float(pick(rng, (20.0, 100.0))),
        "idle_s": float(pick(rng, (0.1, 1.0))),
        "scale_up_stabilization_s": float(pick(rng, (0.0, 0.1))),
    }
    late_ns = int(pick(rng, (500_000_000, 3_000_000_000)))
    lines = burst(rng, 24, (20, 300), (5, 60))
    for line in lines[14:]:
        line["arrival_time_ns"] += late_ns
    return lines


def _outside(rng: Rng, tables: Tables) -> list[Tables]:
    """Some weights are read from the memory of the machine, layer by layer."""
    tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 400, "max_num_seqs": 8}
    tables["replicas"][0]["placement"] = {
        "weights": pick(rng, ("gpu", "cpu")),
        "blocks": [{"layers": "0-3", "weights": "cpu"}],
        "local_loads": chance(rng, 0.5),
    }
    return burst(rng, int(rng.integers(5, 15)), (10, 200), (5, 30))
