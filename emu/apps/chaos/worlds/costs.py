"""Draws of `[latency]`, `[engine]` and placement: what a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.models import EXPERTS, UNLIKE, Model, are_forbidden
from emu.config.engine_words import ENGINES, NO_ENGINE, engine_label, engine_words
from emu.config.schema import PlacedTensors
from emu.features.modes import OTHER_BACKEND, OUTSIDE

_ONE_WAY: Final = frozenset({"collective_splits", "collective_algorithms"})
"""What ASTRA-Sim's executor, which runs collectives one way, cannot do."""


def draw_latency(rng: Rng, tables: Tables, model: Model, tensor: int, pipeline: int) -> None:
    can_astra = tensor * pipeline <= 2 and model.kind not in UNLIKE
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
    if model.kind in EXPERTS and chance(rng, 0.5):
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
"""Engines of any scheduler's worlds; others come with their own (`engines.py`)."""


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
