"""Draws of the shape of replicas: parallel ranks, models, machines, groups that differ.

Every key that is drawn belongs to the group's own backend and policy, so that a refusal is a
finding. A table of replicas may be added at the end: those that are there keep their numbers.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.worlds.costs import draw_latency
from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.models import (
    EXPERTS,
    MODELS,
    UNLIKE,
    Model,
    are_forbidden,
    features_in,
    forbids,
    keeps_other_things,
)
from emu.config.kinds import unions
from emu.config.schema import SchedulerTable
from emu.features.modes import CACHED_STATES, STAGES, WINDOWS

_SHAPES: Final = ((1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (4, 2))
"""(tensor, pipeline) ranks."""
LARGE: Final = "Qwen/Qwen3-30B-A3B"
"""Too large for the smallest of the drawn GPUs alone."""
GPUS: Final = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H20", "L40S", "MI300X")
_CUSTOM: Final = {
    "name": "drawn",
    "memory_gib": 90.0,
    "memory_gbytes_per_s": 1500.0,
    "tflops_fp16": 300.0,
    "tflops_fp8": 600.0,
    "sm_count": 120,
    "nvlink_gbps": 1200.0,
    "pcie_gbps": 128.0,
}


def draw_shapes(rng: Rng, tables: Tables) -> None:
    """Another shape, model or cost for the replicas of a world."""
    tensor, pipeline = _shape(rng, tables)
    is_apart = any("data_parallel_group" in group for group in tables["replicas"])
    if chance(rng, 0.1) and tensor > 1 and pipeline == 1 and not is_apart:
        tables["network"]["congestion"] = True
        tables["network"].pop("collective_algorithms", None)
        if tables["network"].get("collective_algorithm", "").startswith("one"):
            del tables["network"]["collective_algorithm"]  # it has no messages that meet
    model = draw_model(rng, tables, tensor, pipeline)
    _machines(rng, tables, tensor, pipeline)
    draw_latency(rng, tables, model, tensor, pipeline)
    draw_experts(rng, tables, model, tensor)
    _another_group(rng, tables, model, tensor)
    _overrides(rng, tables)
    if keeps_other_things(tables["model"]["name"]):
        for feature in features_in(tables):
            if forbids(feature, WINDOWS):
                feature.withdraw(tables)
    if len(tables["nodes"]) == 1 and chance(rng, 0.12):
        _named_gpus(tables)


def _shape(rng: Rng, tables: Tables) -> tuple[int, int]:
    """Ranks of each replica; stages only where nothing needs all layers in one place."""
    groups = tables["replicas"]
    is_one_stage = (
        are_forbidden(tables, STAGES)
        or tables["model"]["name"] != "meta-llama/Llama-3.1-8B"
        or not all(feature.spans_stages(tables) for feature in features_in(tables))
    )
    shapes = [shape for shape in _SHAPES if shape[1] == 1 or not is_one_stage]
    tensor, pipeline = pick(rng, shapes)
    for group in groups:
        group.pop("tensor_parallel", None)
        group.pop("pipeline_parallel", None)
        if tensor > 1:
            group["tensor_parallel"] = tensor
        if pipeline > 1:
            group["pipeline_parallel"] = pipeline
    return tensor, pipeline


def draw_model(rng: Rng, tables: Tables, tensor: int, pipeline: int) -> Model:
    """A model that the world's shape and features can serve."""
    scheduler, groups = tables["scheduler"], tables["replicas"]
    known = {model.name: model for model in MODELS}
    drawn = tables["model"]["name"]
    is_kept = any(feature.keeps_model(tables) for feature in features_in(tables))
    if drawn != "meta-llama/Llama-3.1-8B" or is_kept:
        return known.get(drawn, Model(drawn, 8, "window"))  # one stage is right for any
    keeps_states = (
        scheduler["policy"] == "vllm"
        and all(g["role"] == "colocated" and "data_parallel_group" not in g for g in groups)
        and not tables["network"].get("tiers")
        and not are_forbidden(tables, CACHED_STATES)
    )
    fitting = [
        model
        for model in MODELS
        if tensor <= model.ranks_max
        and (pipeline == 1 or model.kind not in UNLIKE)
        and (keeps_states or model.kind != "states")
        and (tensor > 1 or model.name != LARGE)
    ]
    chosen = pick(rng, fitting)
    tables["model"]["name"] = chosen.name
    if chance(rng, 0.15):
        tables["model"]["dtype"] = "bfloat16"
    return chosen


def _machines(rng: Rng, tables: Tables, tensor: int, pipeline: int) -> None:
    """Machines for all replicas, of one or two kinds."""
    count = sum(group["count"] for group in tables["replicas"])
    gpus = tensor * pipeline * int(pick(rng, (1, 1, 2)))
    node = tables["nodes"][0]
    machines = -(-count * tensor * pipeline // gpus) + int(pick(rng, (0, 0, 1)))
    if pipeline > 1 and chance(rng, 0.3):  # stages on machines of their own
        gpus, machines = tensor, count * pipeline
    node |= {"gpus": gpus, "count": machines, "host_memory_gib": 256.0}
    for key in ("pcie_shared_by", "nvlink_domain"):
        if key in node:
            node[key] = min(node[key], gpus)
    if chance(rng, 0.3):
        node["gpu"] = dict(_CUSTOM) if chance(rng, 0.3) else pick(rng, GPUS)
    if (
        machines > 1 and gpus % (tensor * pipeline) == 0 and chance(rng, 0.3)
    ):  # as many machines, but the last ones are others
        others = int(rng.integers(1, machines))
        tables["nodes"] = [
            {**node, "count": machines - others},
            {**node, "count": others, "gpu": pick(rng, GPUS), "nic_gbps": 50.0},
        ]


def _named_gpus(tables: Tables) -> None:
    """Every replica says where it stands, from the last GPU on."""
    end = sum(node["count"] * node["gpus"] for node in tables["nodes"])
    for group in tables["replicas"]:
        size = group.get("tensor_parallel", 1) * group.get("pipeline_parallel", 1)
        first = end - group["count"] * size
        group["gpus"] = list(range(first, end))
        group["shared"] = "autoscale" in tables and group["role"] == "inactive"
        end = first


def draw_experts(rng: Rng, tables: Tables, model: Model, tensor: int) -> None:
    """Experts shared by the ranks of a replica, or of all members that step together."""
    if model.kind not in EXPERTS:
        return
    if tables["network"].get("collective_algorithm") == "doubleBinaryTree":
        del tables["network"]["collective_algorithm"]  # a tree knows no all-to-all
    if not chance(rng, 0.6):
        return
    for group in tables["replicas"]:
        members = group["count"] if "data_parallel_group" in group else 1
        ranks = tensor * members * group.get("pipeline_parallel", 1)
        inside = min(ranks, *(node["gpus"] for node in tables["nodes"]))
        if members % min(members, inside) == 0:  # else machines are not filled evenly
            group["expert_parallel"] = tensor * members


def _another_group(rng: Rng, tables: Tables, model: Model, tensor: int) -> None:
    """One table more, of another shape: replicas that serve beside the others."""
    roles = {group["role"] for group in tables["replicas"]}
    is_fixed = "autoscale" not in tables and "inactive" not in roles
    is_plain = not any("placement" in group or "gpus" in group for group in tables["replicas"])
    if not (is_fixed and is_plain) or not chance(rng, 0.4):
        return
    if any("data_parallel_group" in g or "pipeline_parallel" in g for g in tables["replicas"]):
        return
    least = 2 if model.name == LARGE else 1
    ranks = int(pick(rng, [n for n in (1, 2, 4) if least <= n <= model.ranks_max]))
    role = "colocated" if "colocated" in roles else "decode"
    gpu = pick(rng, [name for name in GPUS if name not in {n["gpu"] for n in _named(tables)}])
    group: Tables = {"role": role, "count": 1, "gpu": gpu}
    if ranks > 1:
        group["tensor_parallel"] = ranks
    tables["replicas"].append(group)
    tables["nodes"].append({**tables["nodes"][0], "count": 1, "gpus": ranks, "gpu": gpu})
    for key in ("pcie_shared_by", "nvlink_domain"):
        if key in tables["nodes"][-1]:
            tables["nodes"][-1][key] = min(tables["nodes"][-1][key], ranks)


def _named(tables: Tables) -> list[Tables]:
    """Machines whose GPU is of the catalogue."""
    return [node for node in tables["nodes"] if isinstance(node["gpu"], str)]


def _overrides(rng: Rng, tables: Tables) -> None:
    """A table of replicas that says otherwise than the rest, in keys of its own kinds."""
    group = pick(rng, tables["replicas"])
    if "data_parallel_group" in group or not chance(rng, 0.3):
        return
    policy = tables["scheduler"]["policy"]
    fields = unions()[SchedulerTable].keys(policy)
    figures = {"max_num_seqs": 3, "batch_size_cap": 3, "gpu_memory_utilization": 0.92}
    group["scheduler"] = {key: value for key, value in figures.items() if key in fields}
    if chance(rng, 0.5):
        is_linear = tables["latency"]["backend"] == "linear"
        group["latency"] = {"base_us": 3000.0} if is_linear else {"round_tokens_to": 4}
    if chance(rng, 0.3):
        group["model"] = {"max_model_tokens": 5_000}
