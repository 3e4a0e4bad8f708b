"""LoRA adapters: requests name one, replicas have slots for some.

Memory is taken at start for every slot, whatever is loaded: for each matrix `rank` x (inputs +
outputs) at 16 bits. A step with adapted requests computes, for each matrix, two thin products
beside it: rows times inputs x rank and rank x outputs; the weights of every adapter in the batch
are read. Ranks below the greatest one compute as the greatest. None of this is measured: times are
the GPU's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec

from emu.catalogue.lookup import lookup_model
from emu.catalogue.model import ModelSpec
from emu.config.features import keys_of
from emu.config.schema import Config, LoraAffinityTable, SchedulerTable, VllmTable
from emu.config.tables import Count, Count0, Table, doc, tag_of
from emu.errors import InputError
from emu.features.base import Door, Feature, Figures, OwnPolicy, Place, Served, Tables, parts_of
from emu.features.lora.slots import WEIGHT_BYTES, Adapters, LoraPricer
from emu.features.modes import (
    EXPERTS,
    OTHER_BACKEND,
    OTHER_SCHEDULER,
    OUTSIDE,
    STAGES,
    STATES,
    Conflict,
    Seat,
)
from emu.latency.context import LatencyContext, PassPart
from emu.latency.kernels.operations import Ops
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    import numpy as np

    from emu.workload.opened import Facts

_KEY: Final = "scheduler.enable_lora"
_MODEL: Final = "adapters of {model}, which has more than dense layers, are not modeled"


class Keys(Table, kw_only=True, frozen=True):
    """What [scheduler] says."""

    enable_lora: Annotated[bool, doc("Requests may name LoRA adapters (docs/lab/adapters.md).")] = (
        False
    )
    max_loras: Annotated[Count, doc("LoRA: slots on the GPU, different adapters at once.")] = 1
    max_cpu_loras: Annotated[
        Count0, doc("LoRA: copies in host memory, at least max_loras; 0 = max_loras.")
    ] = 0
    max_lora_rank: Annotated[
        Literal[1, 8, 16, 32, 64, 128, 256, 320, 512],
        doc("LoRA: rank of every slot, and of the adapters."),
    ] = 16

    @property
    def host_slots(self) -> int:
        """Copies in host memory."""
        return self.max_cpu_loras or self.max_loras


def adapted_matrices(spec: ModelSpec, tp: int) -> list[tuple[int, int, int]]:
    """(inputs, outputs, how many of them in the model) of one rank's adapted matrices."""
    found: dict[tuple[int, int], int] = {}

    def add(inputs: int, outputs: int, count: int = 1) -> None:
        found[inputs, outputs] = found.get((inputs, outputs), 0) + count

    hidden = spec.hidden
    for index in range(spec.layers):
        layer = spec.layer(index)
        part = layer.attention
        assert part is not None, "adapters of attention without heads of its own"
        heads, kv_heads = ceil_div(part.heads, tp), max(1, ceil_div(part.kv_heads, tp))
        add(hidden, heads * part.head_dim)
        add(hidden, kv_heads * part.head_dim)
        add(hidden, kv_heads * part.value_dim)
        add(heads * part.value_dim, hidden)
        assert layer.mlp is not None, "adapters of experts"
        width = ceil_div(layer.mlp.width, tp)
        add(hidden, width, 2 if layer.mlp.gated else 1)
        add(width, hidden)
    return [(inputs, outputs, count) for (inputs, outputs), count in found.items()]


def slot_bytes(spec: ModelSpec, tp: int, rank: int) -> int:
    """Bytes of one slot on one rank."""
    weights = sum(count * (i + o) for i, o, count in adapted_matrices(spec, tp))
    return rank * weights * WEIGHT_BYTES


class LoraPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about adapters on one kind of replica."""

    rank: int
    host_ns: int
    """From host memory to the GPU, one adapter."""
    cold_ns: int
    """From the disk to host memory and to the GPU."""

    def pricer(self, context: LatencyContext) -> LoraPricer:
        """What adapters take on such a replica."""
        ops = Ops(context.gpu, context.kernels.coefficients(context.gpu), WEIGHT_BYTES)
        matrices = adapted_matrices(context.model, context.tensor_parallel)
        return LoraPricer(self.rank, self.host_ns, self.cold_ns, ops, matrices)


class Lora(Feature):
    """See the module's head."""

    name = "LoRA adapters"
    key = _KEY
    summary = "Requests name an adapter; a batch loads those that have no slot on the GPU."
    guide = "lab/adapters.md"
    keys = ((VllmTable, Keys),)
    switch = "enable_lora = true"
    serves = ("adapter",)
    section = "adapters"
    files = ("configs/adapters.toml", "tests/speed/test_slow_modes.py")
    forbids = ((STEPS_BY_THE_RULE, Adapters.forbids_cohort),)
    conflicts = (
        Conflict(OTHER_SCHEDULER, _KEY, "policy {policy} has no adapters; vllm has"),
        Conflict(STAGES, "replicas.pipeline_parallel", "adapters run on one pipeline stage"),
        Conflict(
            OTHER_BACKEND, "latency.backend", "{backend} has no cost of adapters; roofline has"
        ),
        Conflict(
            OUTSIDE,
            _KEY,
            "weights or attention outside the GPU cannot be combined with adapters",
        ),
        Conflict(STATES, _KEY, _MODEL),
        Conflict(EXPERTS, _KEY, _MODEL),
    )
    example: ClassVar[Mapping[str, object]] = {"scheduler": {"enable_lora": True}}
    values: ClassVar[Mapping[str, Sequence[Any]]] = {"max_lora_rank": (8, 64)}

    def is_on(self, config: Config, scheduler: SchedulerTable) -> bool:
        """Whether requests may name adapters."""
        return keys_of(scheduler, Keys).enable_lora

    def check(self, seat: Seat, others: Sequence[str]) -> None:
        """Copies on the host are at least as many as slots."""
        keys = keys_of(seat.scheduler, Keys)
        if 0 < keys.max_cpu_loras < keys.max_loras:
            seat.wrong("scheduler.max_cpu_loras", f"expected at least max_loras = {keys.max_loras}")
        super().check(seat, others)

    def check_workload(self, facts: Facts, places: Sequence[Place], source: str) -> None:
        """Every replica can serve a request that names an adapter."""
        if facts.adapter and not all(self in place.features for place in places):
            problem = f"the workload names adapters ({facts.adapter}); set it to true everywhere"
            raise InputError(source, None, _KEY, problem)

    def slots(self, scheduler: SchedulerTable) -> int:
        """Adapters on the GPU."""
        return keys_of(scheduler, Keys).max_loras

    def slot_bytes(self, scheduler: SchedulerTable, model: ModelSpec, tp: int) -> int:
        """All slots of a rank."""
        keys = keys_of(scheduler, Keys)
        return keys.max_loras * slot_bytes(model, tp, keys.max_lora_rank)

    def pass_part(self, place: Place, config: Config) -> PassPart:
        """Loads over PCIe and from the disk, and the products."""
        rank = keys_of(place.scheduler, Keys).max_lora_rank
        tp, node = place.tensor_parallel, place.node
        one = slot_bytes(place.model, 1, rank)
        pcie_gbps = node.pcie_gbps if node.pcie_gbps > 0 else place.gpu.pcie_gbps
        host_ns = round(slot_bytes(place.model, tp, rank) * 8 / (pcie_gbps * 1e9) * NS_PER_S)
        disk_ns = round(one * 8 / (node.ssd_gbps * 1e9) * NS_PER_S)
        return LoraPlan(rank=rank, host_ns=host_ns, cold_ns=disk_ns + host_ns)

    def scheduler_part(self, place: Place, config: Config, own: OwnPolicy) -> Part:
        """The slots."""
        keys = keys_of(place.scheduler, Keys)
        return Adapters(keys.max_loras, keys.host_slots)

    def facts(self, place: Place, config: Config) -> dict[str, str]:
        """Slots, and what they take."""
        keys = keys_of(place.scheduler, Keys)
        one = slot_bytes(place.model, place.tensor_parallel, keys.max_lora_rank)
        return {
            "adapters": f"{keys.max_loras} slots of {one / 1e6:.1f} MB on a GPU "
            f"(rank {keys.max_lora_rank}), {keys.host_slots} on the host"
        }

    def figures(self, replicas: Sequence[Served], doors: Sequence[Door]) -> Tables:
        """Loads and hits on all replicas."""
        books: list[Adapters] = list(parts_of(replicas, Adapters))
        return {
            "cold_loads": sum(book.cold_loads for book in books),
            "host_loads": sum(book.host_loads for book in books),
            "hits": sum(book.hits for book in books),
        }

    def line(self, figures: Figures, number: Callable[[float], str]) -> tuple[str, str]:
        """Loads."""
        loads = f"{figures['cold_loads']:,} read, {figures['host_loads']:,} copied"
        return "Adapters", loads

    def draw(
        self, seed: int, rng: np.random.Generator, tables: Tables, lines: list[Tables]
    ) -> None:
        """Some of the worlds with a dense model of the catalogue."""
        name = tables["model"].get("name", "")
        if not name or not _is_dense(lookup_model(name)) or not rng.random() < 0.3:
            return
        slots = 1 + int(rng.integers(3))
        tables["scheduler"] |= {
            "enable_lora": True,
            "max_loras": slots,
            "max_cpu_loras": slots + (0, 1, 4)[int(rng.integers(3))],
        }
        if rng.random() < 0.5:
            tables["router"]["policy"] = tag_of(LoraAffinityTable)
        for line in lines:
            if rng.random() < 0.7:
                line["adapter"] = f"a{int(rng.integers(5))}"

    def draw_keys(self, rng: np.random.Generator, tables: Tables, drawn: Tables) -> None:
        """A rank, where there are adapters."""
        if tables["scheduler"].get("enable_lora"):
            drawn["max_lora_rank"] = self.values["max_lora_rank"][int(rng.integers(2))]
        else:
            drawn.pop("max_lora_rank", None)

    def draw_made(self, rng: np.random.Generator, tables: Tables, made: Tables) -> None:
        """Requests that are made name adapters."""
        if tables["scheduler"].get("enable_lora"):
            made["adapters"] = 4

    def keeps_model(self, tables: Tables, *, of_fleet: bool = False) -> bool:
        """Its model has dense layers only."""
        return bool(tables["scheduler"].get("enable_lora"))


def _is_dense(model: ModelSpec) -> bool:
    return not model.is_hybrid and model.latent is None and model.experts is None


FEATURE: Final = Lora()
