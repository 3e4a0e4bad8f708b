"""A tour: every sixth seed is a small world of the next part of the program that drawn worlds seldom
enter.

Which part comes is counted, not drawn, so that three hundred seeds see each of them three times or
more: each feature alone, prompts that wait for more prompts, tokens that leave in groups, models
that keep windows or states, links by the shape of machines, schedulers of other engines without
memory, ranks that are lost. The rest of a world is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.experts import lost_rank
from emu.apps.chaos.worlds.models import HYBRIDS
from emu.apps.chaos.worlds.narrow import (
    burst,
    leaving,
    one_feature,
    served,
    tensorrt_llm,
    turns,
    waits_for_prompts,
)
from emu.apps.chaos.worlds.policies import SCHEDULERS
from emu.config.kinds import KINDS
from emu.config.schema import (
    LoadTable,
    RooflineTable,
    RoundRobinTable,
    SchedulerTable,
    VidurTable,
    VllmTable,
)
from emu.config.tables import tag_of
from emu.features.registry import all_features
from emu.rng import rng_stream

EVERY: Final = 6
_AT: Final = 4
Stop = Callable[[Rng, Tables], list[Tables]]


def draw_tour(seed: int) -> tuple[Tables, list[Tables]] | None:
    """The tables and lines of such a world; None for other seeds."""
    if seed % EVERY != _AT:
        return None
    rng, stops = rng_stream(seed, "chaos tour"), _stops()
    tables: Tables = {
        "seed": seed,
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"count": 2, "gpus": 2, "gpu": "A100-SXM4-80GB", "host_memory_gib": 64.0}],
        "replicas": [{"role": "colocated", "count": int(rng.integers(1, 3))}],
        "latency": {
            "backend": "linear",
            "base_us": float(pick(rng, (1000.0, 5000.0))),
            "per_token_us": float(pick(rng, (0.0, 50.0))),
            "per_context_token_us": float(pick(rng, (0.0, 1.0))),
        },
        "router": {"policy": pick(rng, (tag_of(LoadTable), tag_of(RoundRobinTable)))},
        "workload": {"oversized": "reject"},
        "network": {},
    }
    return tables, stops[seed // EVERY % len(stops)](rng, tables)


def _stops() -> Sequence[Stop]:
    features = [partial(one_feature, feature=feature) for feature in all_features()]
    return (*features, _waits, _groups_of_tokens, _hybrid, _links, _others, lost_rank)


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
    }
    node = tables["nodes"][0] | shape
    tables["nodes"] = [node | {"count": 2, "leaf": "a"}, node | {"count": 1, "leaf": "b"}]
    tables["network"]["leaf_uplink_gbps"] = float(pick(rng, (0.0, 1.0, 200.0)))
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
