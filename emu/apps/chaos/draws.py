"""Draws of the parts of a world: faults, models, GPUs, ranks, backends, engines' features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from emu.config.faultkinds import FAULT_KINDS
from emu.config.fleet import expand_models
from emu.config.kinds import unions
from emu.config.load import config_from_dict
from emu.config.names import ENGINES, NO_ENGINE, engine_label, engine_words
from emu.config.schema import PlacedTensors, SchedulerTable
from emu.features.base import Feature
from emu.features.modes import CACHED_STATES, OTHER_BACKEND, OUTSIDE, STAGES, WINDOWS
from emu.features.registry import all_features
from emu.rng import rng_stream

# --- faults: the list of `[[faults]]` tables of a seed --------------------------------------------
# A random part of the kinds is switched off, the others get very different weights. Some kinds only
# strike while something rare is going on (a lease, a drain, a load of weights): those come in
# volleys, or with a companion fault that makes it happen.

T = TypeVar("T")
Rng = np.random.Generator
Tables = dict[str, Any]

TIMES_S: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Few values, so that things often happen at the same instant."""
WIDE: Final = 64
"""Replicas of a large cluster."""
_LASTS_S: Final = {
    "link_down": (0.001, 0.01, 0.1, 1.0, 10.0),
    "pause": (*TIMES_S[1:], 30.0),
    "replica_restart": (0.0, *TIMES_S[1:], 60.0),
}
"""Where faults of a kind last for other times."""
_TRANSFERS: Final = (
    "destination_refuses",
    "transfer_refused",
    "transfer_broken",
    "transfer_hang",
    "completion_late",
    "completion_twice",
    "handshake_lost",
)
_NEEDS_TRANSFERS: Final = ("partition", "lease_expired", *_TRANSFERS)
_NEEDS_PLANNER: Final = ("metrics_delayed", "metrics_frozen", "metrics_lost", "planner_restart")
_WITH_PROBABILITY: Final = (*_TRANSFERS, "host_cache_stale", "load_stuck")
_TWINS: Final = (
    *("straggler", "link_degrade", "link_latency", "partition", "metrics_delayed"),
    *("metrics_frozen", "metrics_lost"),
)
"""Kinds that add up, or of which the last end counts."""
_MEETS_LOADS: Final = ("host_cache_lost", "host_cache_stale", "load_stuck")
_COLOCATED_STAGES: Final = (
    "colocated",
    "loading",
    "loading_colocated",
    "shutting_colocated",
    "any",
    "queued",
    "prefill",
    "decode",
)


class Ground(msgspec.Struct, frozen=True):
    """What of a cluster the draw depends on."""

    replicas: int
    machines: int
    gpus: int
    prefills: tuple[int, ...]
    """Replicas that prefill at the start; none = colocated serving."""
    has_transfers: bool
    has_planner: bool
    has_cxl: bool
    """KV is kept in CXL memory."""
    heals: bool
    """Every fault ends and every replica comes back."""


def pick(rng: Rng, values: Sequence[T]) -> T:
    """One of the values, all alike."""
    return values[int(rng.integers(len(values)))]


def chance(rng: Rng, probability: float) -> bool:
    """True with this probability."""
    return float(rng.random()) < probability


def ground_of(tables: Mapping[str, Any], *, heals: bool) -> Ground:
    """What a configuration's tables say about the cluster."""
    groups = tables["replicas"] if not tables.get("models") else _groups_of_models(tables)
    roles = [g.get("role", "colocated") for g in groups for _ in range(g.get("count", 1))]
    is_split = "prefill" in roles or "decode" in roles
    return Ground(
        replicas=len(roles),
        machines=sum(node.get("count", 1) for node in tables["nodes"]),
        gpus=sum(node.get("count", 1) * node.get("gpus", 8) for node in tables["nodes"]),
        prefills=tuple(index for index, role in enumerate(roles) if role == "prefill"),
        has_transfers=is_split or bool(tables.get("migration", {}).get("rebalance")),
        has_planner=bool(tables.get("autoscale")),
        has_cxl="cxl" in tables.get("network", {}).get("tiers", ()),
        heals=heals,
    )


def _groups_of_models(tables: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The replicas that follow from `[[models]]`."""
    groups: list[Mapping[str, Any]]
    bare = {key: value for key, value in tables.items() if key != "workload"}
    groups = msgspec.to_builtins(expand_models(config_from_dict(bare)).replicas)
    return groups


def draw_faults(rng: Rng, ground: Ground, span_s: float) -> list[Tables]:
    """Some faults of some kinds for this cluster, in order of time."""
    if chance(rng, 0.05):
        return []  # a world without faults, now and then
    kinds = [name for name in kinds_for(ground) if chance(rng, 0.8 if name == "cxl_lost" else 0.35)]
    if not kinds:
        kinds = ["replica_crash"]
    weights = rng.exponential(size=len(kinds)) + 0.05
    weights /= weights.sum()
    faults: list[Tables] = []
    calm_s = float(pick(rng, (0.0, 0.05, 0.3)))
    at_s = 0.0
    for _ in range(int(rng.integers(1, 9))):
        name = kinds[int(rng.choice(len(kinds), p=weights))]
        step_s = float(rng.random()) * span_s / 4 if chance(rng, 0.7) else 0.0
        at_s = round(at_s + calm_s + step_s, 3 if chance(rng, 0.5) else 9)
        faults += _some(rng, name, at_s, ground)
    if ground.has_cxl:  # reads from there are rare, so this is tried in every such world
        faults += _some(rng, "cxl_lost", round(float(rng.random()) * span_s, 3), ground)
    return sorted(faults, key=lambda fault: fault["at_s"])


def kinds_for(ground: Ground) -> list[str]:
    """Kinds that can find something to strike in such a cluster."""
    return [
        name
        for name in FAULT_KINDS
        if (ground.has_transfers or name not in _NEEDS_TRANSFERS)
        and (ground.prefills or name != "lease_expired")
        and (ground.has_planner or name not in _NEEDS_PLANNER)
        and (ground.has_cxl or name != "cxl_lost")
    ]


def _some(rng: Rng, name: str, at_s: float, ground: Ground) -> list[Tables]:
    """A fault, several of the kind, or the fault and one that gives it something to strike."""
    first = _fault(rng, name, at_s, ground)
    if name == "lease_expired":
        pause_s = float(pick(rng, (0.02, 0.1, 0.3)))
        count = int(rng.integers(1, 7))
        volley = [{**first, "at_s": round(at_s + pause_s * order, 9)} for order in range(count)]
        if chance(rng, 0.5):
            window_s = max(0.05, pause_s * count)
            volley.append({"at_s": at_s, "kind": "destination_refuses", "duration_s": window_s})
        return volley
    if name == "cxl_lost":  # reads from there do not take long
        pause_s, count = float(pick(rng, (0.2, 0.5, 1.0))), int(rng.integers(2, 10))
        return [{**first, "at_s": round(at_s + pause_s * order, 9)} for order in range(count)]
    if name == "drain_expired" and chance(rng, 0.6):  # drains are few: a window for all of them
        return [{**first, "at_s": 0.0, "duration_s": 10.0}]
    if name == "replica_crash" and "stage" in first:  # states that last but an instant
        more = [_fault(rng, name, at_s, ground) for _ in range(int(rng.integers(0, 4)))]
        return [first, *(fault for fault in more if "stage" in fault)]
    if name in _TWINS and first.get("duration_s") and chance(rng, 0.3):
        # Another on the same one, from the middle of the first: both count, then one, then none.
        later = {**first, "at_s": round(at_s + first["duration_s"] / 2, 9)}
        if FAULT_KINDS[name].magnitude is not None:
            later[FAULT_KINDS[name].size] = _size(rng, name)
        return [first, later]
    if name in _MEETS_LOADS and chance(rng, 0.6):
        crash = _fault(rng, "replica_restart", round(at_s + 0.01, 9), ground)
        return [first, {**crash, "duration_s": float(pick(rng, TIMES_S[1:4]))}]
    return [first]


def _fault(rng: Rng, name: str, at_s: float, ground: Ground) -> Tables:
    spec = FAULT_KINDS[name]
    fault: Tables = {"at_s": at_s, "kind": name}
    for group in spec.one_of:
        by_stage = 0.6 if ground.has_planner else 0.3
        key = "replica" if "replica" in group and not chance(rng, by_stage) else pick(rng, group)
        if key == "node":
            fault["node"] = int(rng.integers(ground.machines))
        elif key == "gpu":
            fault["gpu"] = int(rng.integers(ground.gpus))
        elif key == "stage":
            fault["stage"] = pick(rng, _stages(spec.stages, ground))
        elif key == "request":
            fault["request"] = int(rng.integers(20))
        elif name == "lease_expired":
            fault["replica"] = pick(rng, ground.prefills)
        else:
            fault[key] = int(rng.integers(ground.replicas))
    if fault.get("source", -1) == fault.get("destination", -2):
        if ground.replicas == 1:
            return _fault(rng, "straggler", at_s, ground)
        fault["destination"] = (fault["source"] + 1) % ground.replicas
    if "replica" in spec.may and chance(rng, 0.2):
        fault["replica"] = int(rng.integers(ground.replicas))
    if spec.magnitude is not None and not spec.may_magnitude:
        fault[spec.size] = _size(rng, name)
    if name in _WITH_PROBABILITY:
        fault["probability"] = float(pick(rng, (0.2, 0.5, 1.0)))
    if name == "swizzle":
        fault["probability"] = float(pick(rng, (0.5, 1.0)))
    if "stage" in fault and name == "replica_crash" and chance(rng, 0.5):
        fault["after_s"] = float(pick(rng, (0.001, 0.01, 0.1, 0.3)))
    # A window of stuck loads always ends, or nothing would ever load.
    is_finite = ground.heals or spec.needs_duration or name in ("load_stuck", "drain_expired")
    if spec.takes_duration and (is_finite or chance(rng, 0.6)):
        fault["duration_s"] = float(pick(rng, _LASTS_S.get(name, TIMES_S[1:])))
    if name == "link_down" and fault.get("duration_s"):
        fault["times"] = int(rng.integers(1, 21))
    elif name in ("client_leaves", "completion_twice"):
        fault["clients" if name == "client_leaves" else "times"] = int(rng.integers(1, 4))
    return fault


def fault_on(
    rng: Rng, name: str, at_s: float, replica: int, others: Sequence[int], *, gpus: int
) -> Tables | None:
    """A fault of a kind on this replica of one GPU, on machines of so many; None = it cannot.

    Faults of two replicas go from or to one of the `others`.
    """
    spec = FAULT_KINDS[name]
    fault: Tables = {"at_s": at_s, "kind": name}
    keys = {key for group in spec.one_of for key in group}
    if {"source", "destination"} <= keys or name == "partition":
        pair = [replica, pick(rng, others)]
        if pair[0] == pair[1]:
            return None
        order = pair if chance(rng, 0.5) else pair[::-1]
        fault |= {"source": order[0], "destination": order[1]}
    elif "replica" in keys or "replica" in spec.may:
        if "replica" in keys or chance(rng, 0.5):
            fault["replica"] = replica
    elif "gpu" in keys:
        fault["gpu"] = replica
    elif "node" in keys:
        fault["node"] = replica // gpus
    if spec.magnitude is not None and not spec.may_magnitude:
        fault[spec.size] = _size(rng, name)
    if name in _WITH_PROBABILITY:
        fault["probability"] = float(pick(rng, (0.5, 1.0)))
    if spec.takes_duration:
        fault["duration_s"] = float(pick(rng, (0.02, 0.1, 0.4)))
    if name == "completion_twice":
        fault["times"] = 1
    return fault


def _stages(stages: Sequence[str], ground: Ground) -> list[str]:
    """Those that there can be."""
    if ground.prefills:
        return [stage for stage in stages if "colocated" not in stage]
    return [stage for stage in stages if stage in _COLOCATED_STAGES]


def _size(rng: Rng, name: str) -> float:
    if name == "straggler":
        return float(pick(rng, (1.2, 3.0, 10.0)))
    if name == "overload":
        return float(pick(rng, (2.0, 2.0, 5.0, 5.0, 20.0)))
    if name == "metrics_delayed":
        return float(pick(rng, (1.0, 50.0, 500.0, 60_000.0)))
    if name in ("link_latency", "completion_late", "completion_twice"):
        return float(pick(rng, (0.001, 1.0, 100.0)))
    return float(pick(rng, (0.01, 0.1, 0.5, 0.9)))


def draw_train(rng: Rng, ground: Ground, span_s: float, every_s: float) -> list[Tables]:
    """Faults for a long run: all kinds in turn, in an order that is drawn anew each time around."""
    kinds = kinds_for(ground)
    faults: list[Tables] = []
    at_s, order = 0.0, list[int]()
    while at_s < span_s:
        order = order or [int(index) for index in rng.permutation(len(kinds))]
        train = _some(rng, kinds[order.pop()], round(at_s, 6), ground)
        faults += [_narrowed(rng, fault, ground) for fault in train if fault["at_s"] < span_s]
        at_s += every_s * (0.5 + float(rng.random()))
    return sorted(faults, key=lambda fault: fault["at_s"])


def _narrowed(rng: Rng, fault: Tables, ground: Ground) -> Tables:
    """In a large cluster a fault of transfers is one replica's, and an overload twice the rate."""
    if ground.replicas <= WIDE:
        return fault
    if fault["kind"] in _TRANSFERS:
        return {**fault, "destination": int(rng.integers(ground.replicas))}
    return {**fault, "factor": 2.0} if fault["kind"] == "overload" else fault


# --- shapes and costs: models of all kinds, GPUs, parallel ranks, backends, placement -------------
# Every key that is drawn belongs to the group's own backend and policy, so that a refusal is a
# finding. A table of replicas may be added at the end: those that are there keep their numbers.


class Model(NamedTuple):
    """What the draw must know of a model of the catalogue."""

    name: str
    ranks_max: int
    """Tensor-parallel ranks that can share its heads."""
    kind: str


MODELS: Final = (
    Model("meta-llama/Llama-3.1-8B", 8, "dense"),
    Model("meta-llama/Llama-3.2-1B", 8, "dense"),
    Model("Qwen/Qwen2.5-0.5B", 2, "dense"),
    Model("facebook/opt-1.3b", 8, "dense"),
    Model("microsoft/phi-2", 8, "dense"),
    Model("Qwen/Qwen1.5-MoE-A2.7B", 8, "moe"),
    Model("microsoft/Phi-mini-MoE", 8, "moe"),
    Model("Qwen/Qwen3-30B-A3B", 4, "moe"),
    Model("deepseek-ai/DeepSeek-V2-Lite", 8, "mla"),
    Model("mistralai/Mistral-7B-v0.1", 8, "window"),
    Model("google/gemma-2-9b", 8, "window"),
    Model("openai/gpt-oss-20b", 8, "window"),
    Model("LiquidAI/LFM2-2.6B", 8, "states"),
    Model("nvidia/Nemotron-H-8B-Base-8K", 8, "states"),
)
_SHAPES: Final = ((1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (4, 2))
"""(tensor, pipeline) ranks."""
_LARGE: Final = "Qwen/Qwen3-30B-A3B"
"""Too large for the smallest of the drawn GPUs alone."""
_UNLIKE: Final = ("window", "states")
"""Kinds whose layers differ: one stage, roofline or linear."""
_EXPERTS: Final = ("moe", "mla")
_ONE_WAY: Final = frozenset({"collective_splits", "collective_algorithms"})
"""What ASTRA-Sim's executor, which runs collectives one way, cannot do."""
_GPUS: Final = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H20", "L40S", "MI300X")
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


def keeps_other_things(name: str) -> bool:
    """Some layers of a model keep states, or a window, and not the KV of all tokens."""
    return any(model.name == name and model.kind in _UNLIKE for model in MODELS)


def draw_shapes(rng: Rng, tables: Tables) -> None:
    """Another shape, model or cost for the replicas of a world."""
    tensor, pipeline = _shape(rng, tables)
    is_apart = any("data_parallel_group" in group for group in tables["replicas"])
    if chance(rng, 0.1) and tensor > 1 and pipeline == 1 and not is_apart:
        tables["network"]["congestion"] = True
        tables["network"].pop("collective_algorithms", None)
        if tables["network"].get("collective_algorithm", "").startswith("one"):
            del tables["network"]["collective_algorithm"]  # it has no messages that meet
    model = _model(rng, tables, tensor, pipeline)
    _machines(rng, tables, tensor, pipeline)
    _latency(rng, tables, model, tensor, pipeline)
    _experts(rng, tables, model, tensor)
    _another_group(rng, tables, model, tensor)
    _overrides(rng, tables)
    if keeps_other_things(tables["model"]["name"]):
        for feature in features_in(tables):
            if forbids(feature, WINDOWS):
                feature.withdraw(tables)
    if len(tables["nodes"]) == 1 and chance(rng, 0.12):
        _named_gpus(tables)


# --- shape, model, machines ---------------------------------------------------------------------
def _shape(rng: Rng, tables: Tables) -> tuple[int, int]:
    """Ranks of each replica; stages only where nothing needs all layers in one place."""
    groups = tables["replicas"]
    is_one_stage = (
        are_forbidden(tables, STAGES) or tables["model"]["name"] != "meta-llama/Llama-3.1-8B"
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


def _model(rng: Rng, tables: Tables, tensor: int, pipeline: int) -> Model:
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
        and (pipeline == 1 or model.kind not in _UNLIKE)
        and (keeps_states or model.kind != "states")
        and (tensor > 1 or model.name != _LARGE)
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
        node["gpu"] = dict(_CUSTOM) if chance(rng, 0.3) else pick(rng, _GPUS)
    if (
        machines > 1 and gpus % (tensor * pipeline) == 0 and chance(rng, 0.3)
    ):  # as many machines, but the last ones are others
        others = int(rng.integers(1, machines))
        tables["nodes"] = [
            {**node, "count": machines - others},
            {**node, "count": others, "gpu": pick(rng, _GPUS), "nic_gbps": 50.0},
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


# --- costs --------------------------------------------------------------------------------------
def _latency(rng: Rng, tables: Tables, model: Model, tensor: int, pipeline: int) -> None:
    can_astra = tensor * pipeline <= 2 and model.kind not in _UNLIKE
    can_astra = can_astra and not are_forbidden(tables, OTHER_BACKEND)
    can_astra = can_astra and not tables["network"].keys() & _ONE_WAY
    can_astra = can_astra and chance(rng, 0.08)  # its executor takes the most time by far
    can_astra = can_astra and not tables["network"].get("congestion")
    can_astra = can_astra and "cxl" not in tables["network"].get("tiers", ())  # slower than 1 GB/s
    backend = "astra-sim" if can_astra else pick(rng, ("linear", "roofline", "roofline"))
    if backend == "linear":
        if chance(rng, 0.3):
            tables["latency"]["prefill_tokens_per_s"] = float(pick(rng, (2_000.0, 20_000.0)))
        return
    table: Tables = {"backend": backend}
    tables["latency"] = table
    if tensor > 1 and tables["network"].get("collective_algorithm") == "doubleBinaryTree":
        del tables["network"]["collective_algorithm"]  # logits are gathered, which it cannot
    if chance(rng, 0.3):
        table["compute_efficiency"] = 0.4
    if chance(rng, 0.3):
        table["memory_efficiency"] = 0.6
    if chance(rng, 0.3):
        table["round_tokens_to"] = int(pick(rng, (8, 64)))
    if model.kind in _EXPERTS and chance(rng, 0.5):
        table["expert_routing"] = pick(rng, ("balanced", "round_robin", "random", "skewed"))
    if backend == "astra-sim":
        table["compute"] = "roofline"
        if chance(rng, 0.6):
            table["faithful"] = ["end_npu_stagger"]
        return
    _engine(rng, table, tables)
    has_more = are_forbidden(tables, OUTSIDE)
    if pipeline == 1 and model.kind == "dense" and not has_more and chance(rng, 0.4):
        _placement(rng, tables)


ENGINE_LABELS: Final = (
    *(engine_label("vllm", version) for version in ENGINES["vllm"].versions),
    NO_ENGINE,
)
"""Engines of any scheduler's worlds; SGLang's comes with its own (`drawsglang.py`)."""


def _engine(rng: Rng, table: Tables, tables: Tables) -> None:
    """What happens around the kernels."""
    drawn: dict[str, Sequence[Any]] = {
        "engine": ENGINE_LABELS,
        "sampling": ("auto", "greedy", "random", "top_p"),
        "penalties": ("auto", "on", "off"),
        "front_end": (True, False),
        "jitter": (True, False),
        "warm_up": (True, False),
    }
    for key, values in drawn.items():
        if chance(rng, 0.25):
            table[key] = pick(rng, values)
    label = table.pop("engine", "")
    if label:
        name, version = engine_words(label)
        tables["engine"] = {"name": name, "version": version} if version else {"name": name}
    if chance(rng, 0.15):
        table["host_overhead"] = False
    elif label != NO_ENGINE and chance(rng, 0.15):
        table["enforce_eager"] = True
    if label == NO_ENGINE or table.get("host_overhead") is False:
        table.pop("jitter", None)
    if chance(rng, 0.15):
        table["step_overhead_us"] = float(pick(rng, (-1.0, 0.0, 700.0)))


def _placement(rng: Rng, tables: Tables) -> None:
    """Weights outside GPU memory, attention in the memory of the machine."""
    if chance(rng, 0.4):
        tables["latency"] |= {"attention_offload": True}
        if chance(rng, 0.5):
            tables["latency"]["sub_batch_interleaving"] = True
        for node in tables["nodes"]:
            node["pim"] = "DDR4_8GB_3200"
        return
    place: Tables = {"weights": pick(rng, ("gpu", "cpu"))}
    if chance(rng, 0.5):
        place["blocks"] = [{"layers": "0-3", "weights": "cpu"}]
    if chance(rng, 0.5):
        place["tensors"] = {
            name: pick(rng, ("gpu", "cpu")) for name in PlacedTensors.__struct_fields__
        }
    if chance(rng, 0.5):
        place["local_loads"] = True
    for group in tables["replicas"]:
        group["placement"] = place


def _experts(rng: Rng, tables: Tables, model: Model, tensor: int) -> None:
    """Experts shared by the ranks of a replica, or of all members that step together."""
    if model.kind not in _EXPERTS:
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


# --- groups that differ -------------------------------------------------------------------------
def _another_group(rng: Rng, tables: Tables, model: Model, tensor: int) -> None:
    """One table more, of another shape: replicas that serve beside the others."""
    roles = {group["role"] for group in tables["replicas"]}
    is_fixed = "autoscale" not in tables and "inactive" not in roles
    is_plain = not any("placement" in group or "gpus" in group for group in tables["replicas"])
    if not (is_fixed and is_plain) or not chance(rng, 0.4):
        return
    if any("data_parallel_group" in g or "pipeline_parallel" in g for g in tables["replicas"]):
        return
    least = 2 if model.name == _LARGE else 1
    ranks = int(pick(rng, [n for n in (1, 2, 4) if least <= n <= model.ranks_max]))
    role = "colocated" if "colocated" in roles else "decode"
    gpu = pick(rng, [name for name in _GPUS if name not in {n["gpu"] for n in _named(tables)}])
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


# --- newer models and engines' features -----------------------------------------------------------
# A stream of its own decides, so that the rest of a world stays as it was drawn. What a world's
# schedulers and backends cannot do is not drawn for it.

HYBRIDS: Final = ("openai/gpt-oss-20b", "google/gemma-2-9b", "LiquidAI/LFM2-2.6B")
"""Models with windows and with states that fit a GPU of the drawn clusters."""


def draw_models(seed: int, tables: Tables, lines: list[dict[str, Any]]) -> None:
    """Change a part of the worlds with the vllm scheduler on one stage."""
    rng = rng_stream(seed, "chaos models")
    groups = tables["replicas"]
    if tables["scheduler"]["policy"] != "vllm" or any("pipeline_parallel" in g for g in groups):
        return
    if any(_has_own_tables(group) for group in groups):
        return
    is_plain = all(
        group["role"] in ("colocated", "inactive") and "data_parallel_group" not in group
        for group in groups
    )
    if is_plain and not tables["network"].get("tiers") and chance(rng, 0.25):
        _hybrid(rng, tables)
    for feature in all_features():
        feature.draw(seed, rng, tables, lines)


def features_in(tables: Tables) -> list[Feature]:
    """Features that the common tables of a world switch on."""
    return [feature for feature in all_features() if _given(tables, feature.key)]


def _given(tables: Tables, key: str) -> bool:
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return bool(value)


def forbids(feature: Feature, mode: str) -> bool:
    """Whether a feature does not go with a mode."""
    return any(conflict.other == mode for conflict in feature.conflicts)


def are_forbidden(tables: Tables, mode: str) -> bool:
    """Whether some feature of a world does not go with a mode."""
    return any(forbids(feature, mode) for feature in features_in(tables))


def _has_own_tables(group: Tables) -> bool:
    return bool(group.get("scheduler") or group.get("latency") or group.get("model"))


def _hybrid(rng: Rng, tables: Tables) -> None:
    name = pick(rng, HYBRIDS)
    if name == HYBRIDS[2] and any(group["role"] != "colocated" for group in tables["replicas"]):
        name = HYBRIDS[0]  # states are nowhere but on replicas that serve from the start
    tables["model"] = {"name": name}
