"""More stops of the tour: what replicas do with each other, each in a small world of its own.

Batches that go round a pipeline, tenants that are served in turn, routers that look into caches,
KV that leaves layer by layer, groups that step together, links that several
faults strike at once, replicas that lie over machines.
"""

from __future__ import annotations

import copy
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.narrow import burst, cached, later_half
from emu.apps.chaos.worlds.policies import SCHEDULERS
from emu.apps.chaos.worlds.scaling import WITH_COPIES
from emu.config.schema import (
    FasterTransformerTable,
    FcfsTable,
    LightLlmTable,
    OrcaTable,
    PrefixAwareTable,
    RooflineTable,
    SarathiTable,
    VllmTable,
    VllmV0Table,
)
from emu.config.tables import tag_of
from emu.features.registry import all_features

_VIDUR: Final = (VllmV0Table, SarathiTable, OrcaTable, LightLlmTable, FasterTransformerTable)

_FAIR: Final = tuple(
    tag_of(kind)
    for kind in (SarathiTable, OrcaTable, VllmTable, VllmV0Table, FasterTransformerTable)
)
"""Schedulers whose fair queues are followed, each in its turn."""


def rounds(rng: Rng, tables: Tables) -> list[Tables]:
    """Batches that go round a pipeline for long, and prompts that come in between."""
    stages = int(pick(rng, (2, 3, 4)))
    tables["nodes"][0]["gpus"] = stages
    tables["replicas"] = [{"role": "colocated", "count": 1, "pipeline_parallel": stages}]
    if chance(rng, 0.4):
        tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
        tables["latency"]["jitter"] = chance(rng, 0.3)
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": int(pick(rng, (100, 4000))),
        "max_num_seqs": int(pick(rng, (4, 8, 32))),
        "max_num_batched_tokens": int(pick(rng, (64, 512))),
        "prefix_caching": False,
    }
    if chance(rng, 0.3):
        policy = pick(rng, tuple(tag_of(kind) for kind in _VIDUR))
        tables["scheduler"] = {"policy": policy, "num_blocks": 600, "batch_size_cap": 8}
    lines = burst(rng, int(rng.integers(4, 12)), (10, 100), (60, 200))
    late = burst(rng, int(rng.integers(2, 10)), (10, 200), (1, 100))
    for line in late:
        line["arrival_time_ns"] += int(pick(rng, (50_000_000, 200_000_000, 500_000_000)))
    return by_arrival([*lines, *late])


def tenants(rng: Rng, tables: Tables) -> list[Tables]:
    """Tenants that ask for different amounts of work, served in turn, by each scheduler."""
    policies = (*_FAIR, pick(rng, SCHEDULERS[4:]))
    policy = policies[int(tables["seed"]) // 100 % len(policies)]
    is_vllm = policy == tag_of(VllmTable)
    tables["scheduler"] = {
        "policy": policy,
        "num_blocks": 4000,
        "order": "fair",
        "max_num_seqs" if is_vllm else "batch_size_cap": int(pick(rng, (1, 2, 4))),
    }
    if is_vllm:
        tables["scheduler"] |= {"async_scheduling": "off", "prefix_caching": False}
    tables["replicas"][0]["count"] = 1
    lines = burst(rng, int(rng.integers(20, 40)), (5, 100), (1, 60))
    for line in lines:
        tenant = int(rng.integers(4))
        line["tenant"] = f"t{tenant}"
        line["output_toks"] += 15 * tenant
        line["arrival_time_ns"] *= int(pick(rng, (1, 3)))
    return by_arrival(lines)


def known_prompts(rng: Rng, tables: Tables) -> list[Tables]:
    """Prompts that begin alike, to replicas of which each holds a part."""
    lines = cached(rng, tables)
    tables["network"] = {}
    tables["router"] = {"policy": tag_of(PrefixAwareTable)}
    tables["replicas"][0]["count"] = int(pick(rng, (2, 3, 4)))
    tables["nodes"][0] |= {"count": 2, "gpus": 2}
    tables["scheduler"] |= {"num_blocks": int(pick(rng, (60, 200))), "max_num_seqs": 8}
    for index, line in enumerate(lines):
        line["arrival_time_ns"] += index * 10_000_000
    return lines


def known_there(rng: Rng, tables: Tables) -> list[Tables]:
    """Requests that a feature's own router sends where what they need is."""
    router = tables["router"]["policy"]
    tables["replicas"][0]["count"] = int(pick(rng, (2, 3)))
    tables["nodes"][0]["gpus"] = 2
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": 2000,
        "max_num_seqs": int(pick(rng, (1, 2, 4))),
    }
    lines = burst(rng, int(rng.integers(20, 40)), (5, 200), (5, 40))
    for feature in all_features():
        for _ in range(8):  # each is on in a part of the worlds
            drawn = copy.deepcopy((tables, lines))
            feature.draw(int(rng.integers(1 << 30)), rng, *drawn)
            if drawn[0]["router"]["policy"] != router:
                tables |= drawn[0]
                return drawn[1]
    return lines


def layers(rng: Rng, tables: Tables) -> list[Tables]:
    """KV that leaves layer by layer while prompts are read, or after that, over any links."""
    tables["replicas"] = [
        {"role": "prefill", "count": int(pick(rng, (1, 2)))},
        {"role": "decode", "count": int(pick(rng, (1, 2)))},
    ]
    tables["nodes"][0] |= {"count": 4, "gpus": 1, "nic_gbps": float(pick(rng, (1.0, 5.0, 50.0)))}
    tables["latency"]["per_token_us"] = float(pick(rng, (10.0, 100.0)))
    tables["scheduler"] = {
        "policy": pick(rng, (tag_of(VllmTable), tag_of(FcfsTable))),
        "block_size": 16,
        "num_blocks": 2000,
    }
    tables["router"]["decode_policy"] = pick(rng, ("first_free", "least_used"))
    tables["network"] = {
        "kv_transfer": pick(rng, ("layerwise", "layerwise", "blocking")),
        "connector_us": float(pick(rng, (0.0, 200.0))),
    }
    return burst(rng, int(rng.integers(12, 25)), (50, 600), (1, 30))


def waves(rng: Rng, tables: Tables) -> list[Tables]:
    """Two groups that step together, with little to do for some members, and none for others."""
    stages = int(pick(rng, (1, 1, 2)))
    group = {"role": "colocated", "count": int(pick(rng, (2, 3))), "pipeline_parallel": stages}
    tables["replicas"] = [group | {"data_parallel_group": name} for name in ("a", "b")]
    tables["nodes"][0] |= {"count": 2, "gpus": 3 * stages}
    tables["router"] = {"policy": pick(rng, ("load", "round_robin", "random"))}
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": int(pick(rng, (60, 2000))),
        "max_num_batched_tokens": int(pick(rng, (64, 512))),
        "prefix_caching": chance(rng, 0.3),
    }
    if chance(rng, 0.4):
        tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
    lines = burst(rng, int(rng.integers(6, 20)), (5, 200), (1, 60))
    later_half(rng, lines)
    return by_arrival(lines)


def struck_links(rng: Rng, tables: Tables) -> list[Tables]:
    """Links and pairs that several faults strike, each over before the next one is."""
    lines = layers(rng, tables)
    for group in tables["replicas"]:
        group["count"] = 2
    tables["network"]["kv_transfer"] = "blocking"
    prefills = tables["replicas"][0]["count"]
    faults: list[Tables] = []
    slower: tuple[Tables, ...] = (
        {"kind": "link_latency", "extra_ms": 2.0},
        {"kind": "link_latency", "extra_ms": 3.0},
        {"kind": "link_degrade", "factor": 0.5},
    )
    for place, (at_s, lasts_s) in enumerate(((0.005, 0.3), (0.02, 0.15), (0.05, 0.4))):
        pair = {"source": 0 if place < 2 else prefills - 1, "destination": prefills}
        if chance(rng, 0.8):
            cut = {"kind": "partition", "at_s": at_s, "duration_s": lasts_s}
            faults.append(cut | pair)
        end = (0, prefills)[place % 2]  # both ends of a pair are late at once
        faults.append(slower[place] | {"at_s": at_s + 0.001, "replica": end, "duration_s": 0.6})
    for kind in ("transfer_refused", "handshake_lost", "completion_late"):
        late = {"delay_ms": 5.0} if kind == "completion_late" else {}
        pair = {"source": int(rng.integers(prefills)), "destination": prefills}
        faults.append({"kind": kind, "at_s": 0.03, **pair, **late, "duration_s": 0.5})
    tables["faults"] = sorted(faults, key=lambda fault: float(fault["at_s"]))
    tables["recovery"] = {"transfer_timeout_ms": 3000.0}
    return lines


def over_machines(rng: Rng, tables: Tables) -> list[Tables]:
    """Replicas of which a part lies on another machine: stages, or ranks."""
    ranks = pick(rng, ("pipeline_parallel", "pipeline_parallel", "tensor_parallel"))
    roles = ("colocated",) if ranks == "pipeline_parallel" else ("prefill", "decode")
    tables["replicas"] = [{"role": role, "count": 2, ranks: 2} for role in roles]
    tables["nodes"][0] |= {
        "count": 4,
        "gpus": int(pick(rng, (1, 3))),
        "nic_gbps": float(pick(rng, (5.0, 100.0))),
    }
    tables["latency"] = {"backend": tag_of(RooflineTable), "front_end": False}
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 400, "max_num_seqs": 8}
    if roles != ("colocated",):
        tables["nodes"][0]["gpus"] = 2
        tables["scheduler"]["prefix_caching"] = False
    return burst(rng, int(rng.integers(10, 20)), (10, 300), (2, 60))


def copies(rng: Rng, tables: Tables) -> list[Tables]:
    """Bursts with pauses, and a crash: copies in the memory of machines are there, or have gone."""
    tables["model"] = {"name": "meta-llama/Llama-3.2-1B"}
    tables["nodes"][0] |= {"count": 2, "gpus": 2}
    tables["replicas"] = [{"role": "colocated"}, {"role": "inactive", "count": 3}]
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 400, "max_num_seqs": 8}
    tables["autoscale"] = WITH_COPIES | {
        "host_cache_ttl_s": float(pick(rng, (0.3, 1.0, 3.0))),
        "scale_down_stabilization_s": float(pick(rng, (0.1, 0.5))),
    }
    tables["faults"] = [
        {"kind": "replica_crash", "at_s": at_s, "replica": replica, "duration_s": 3.0}
        for at_s, replica in ((1.0, 0), (float(pick(rng, (2.5, 4.2))), int(rng.integers(1, 4))))
    ]
    lines: list[Tables] = []
    for begin_s in (0.0, 2.2, 4.0, 5.5, 8.0):
        for line in burst(rng, int(rng.integers(5, 11)), (20, 200), (20, 60)):
            line["arrival_time_ns"] += round(begin_s * 1e9)
            lines.append(line)
    return lines
