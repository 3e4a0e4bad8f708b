"""Draws of shapes and costs: models of all kinds, GPUs, parallel ranks, backends, placement.

Every key that is drawn belongs to the group's own backend and policy, so that a refusal is a
finding. A table of replicas may be added at the end: those that are there keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from emu.chaos.drawfaults import Rng, Tables, chance, pick
from emu.config.kinds import KINDS
from emu.config.names import ENGINES
from emu.config.schema import PlacedTensors, SchedulerTable


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
        tables["scheduler"].pop("retain_s", None)
    if len(tables["nodes"]) == 1 and chance(rng, 0.12):
        _named_gpus(tables)


# --- shape, model, machines ---------------------------------------------------------------------
def _shape(rng: Rng, tables: Tables) -> tuple[int, int]:
    """Ranks of each replica; stages only where nothing needs all layers in one place."""
    groups = tables["replicas"]
    scheduler = tables["scheduler"]
    is_one_stage = (
        "speculative_config" in scheduler
        or scheduler.get("enable_lora")
        or tables["model"]["name"] != "meta-llama/Llama-3.1-8B"
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
    drafter = scheduler.get("speculative_config", {}).get("model")
    if drawn != "meta-llama/Llama-3.1-8B" or scheduler.get("enable_lora") or drafter:
        return known.get(drawn, Model(drawn, 8, "window"))  # one stage is right for any
    keeps_states = (
        scheduler["policy"] == "vllm"
        and all(g["role"] == "colocated" and "data_parallel_group" not in g for g in groups)
        and not tables["network"].get("tiers")
        and "speculative_config" not in scheduler
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
    can_astra = (
        tensor * pipeline <= 2
        and model.kind not in _UNLIKE
        and "speculative_config" not in tables["scheduler"]
    )
    can_astra = can_astra and not tables["scheduler"].get("enable_lora")
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
    has_drafts = "speculative_config" in tables["scheduler"]
    has_more = has_drafts or tables["scheduler"].get("enable_lora")
    if pipeline == 1 and model.kind == "dense" and not has_more and chance(rng, 0.4):
        _placement(rng, tables)


def _engine(rng: Rng, table: Tables, tables: Tables) -> None:
    """What happens around the kernels."""
    drawn: dict[str, Sequence[Any]] = {
        "engine": ENGINES,
        "sampling": ("auto", "greedy", "random", "top_p"),
        "penalties": ("auto", "on", "off"),
        "front_end": (True, False),
        "jitter": (True, False),
        "warm_up": (True, False),
    }
    for key, values in drawn.items():
        if chance(rng, 0.25):
            table[key] = pick(rng, values)
    if chance(rng, 0.15):
        table["host_overhead"] = False
    elif table.get("engine") != "none" and chance(rng, 0.15):
        table["enforce_eager"] = True
    if table.get("engine") == "none" or table.get("host_overhead") is False:
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
    fields = KINDS[SchedulerTable].kinds[policy].__struct_fields__
    figures = {"max_num_seqs": 3, "batch_size_cap": 3, "gpu_memory_utilization": 0.92}
    group["scheduler"] = {key: value for key, value in figures.items() if key in fields}
    if chance(rng, 0.5):
        is_linear = tables["latency"]["backend"] == "linear"
        group["latency"] = {"base_us": 3000.0} if is_linear else {"round_tokens_to": 4}
    if chance(rng, 0.3):
        group["model"] = {"max_model_tokens": 5_000}
