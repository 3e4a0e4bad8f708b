"""LoRA adapters: requests name one, replicas have slots for some.

Memory is taken at start for every slot, whatever is loaded: for each matrix `rank` x (inputs +
outputs) at 16 bits. A step with adapted requests computes, for each matrix, two thin products
beside it: rows times inputs x rank and rank x outputs; the weights of every adapter in the batch
are read. Ranks below the greatest one compute as the greatest. None of this is measured: times are
the GPU's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, final

import msgspec

from emu.catalogue.lookup import lookup_model
from emu.catalogue.model import ModelSpec
from emu.config.features import keys_of
from emu.config.schema import Config, LoraAffinityTable, SchedulerTable, VllmTable
from emu.config.tables import Count, Count0, Table, doc, tag_of
from emu.errors import InputError
from emu.features.base import Door, Feature, Figures, OwnPolicy, Place, Served, Tables, parts_of
from emu.features.modes import (
    CACHED_STATES,
    EXPERTS,
    OTHER_BACKEND,
    OTHER_SCHEDULER,
    OUTSIDE,
    STAGES,
    STATES,
    Conflict,
    Seat,
)
from emu.latency.base import BatchShape, Work
from emu.latency.context import LatencyContext, PassPart
from emu.latency.kernels.operations import Ops
from emu.request import Request
from emu.scheduling.parts import STEPS_BY_THE_RULE, Part
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    import numpy as np

    from emu.workload.opened import Facts

_WEIGHT_BYTES: Final = 2
"""Of one weight of an adapter."""
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


@final
class LoraWork(Work):
    """What LoRA adapters add to an iteration."""

    def __init__(self, adapters: int, tokens: int, cold_loads: int, host_loads: int) -> None:
        self.adapters = adapters
        """Different adapters of its members."""
        self.tokens = tokens
        """New tokens of members with an adapter."""
        self.cold_loads = cold_loads
        """Adapters that are read from the disk first."""
        self.host_loads = host_loads
        """Adapters that are copied from host memory first."""


@final
class Adapters(Part):
    """Slots of a replica's adapters: which are on the GPU, which in host memory, which in use.

    Rules of vLLM: at most `slots` different adapters among the running requests; an adapter that a
    step needs and that has no slot takes that of the least recently used one that no member of the
    step needs; the host keeps `host_slots` copies, the least recently used leaves, with its slot.
    An adapter is loaded in the step that first runs it, and the whole batch waits.

    Invariants: adapters with a slot have a copy on the host; those in use are at most `slots`.
    """

    forbids_cohort = "which adapters a step loads depends on its members, one by one"

    slots: int
    host_slots: int
    cold_loads: int
    """Loads from the disk so far."""
    host_loads: int
    """Loads from host memory."""
    hits: int
    """Members of steps, once for each step and adapter, that had a slot already."""

    def __init__(self, slots: int, host_slots: int) -> None:
        assert 0 < slots <= host_slots
        self.slots = slots
        self.host_slots = host_slots
        self.cold_loads = self.host_loads = self.hits = 0
        self._in_use: dict[str, int] = {}
        """Running requests by adapter."""
        self._on_gpu: dict[str, None] = {}
        """Adapters with a slot, the least recently used first."""
        self._host: dict[str, None] = {}

    def may_run(self, request: Request) -> bool:
        """Whether the request may join the running ones."""
        adapter = request.adapter
        return not adapter or adapter in self._in_use or len(self._in_use) < self.slots

    def begin(self, request: Request) -> None:
        """The request runs."""
        if request.adapter:
            self._in_use[request.adapter] = self._in_use.get(request.adapter, 0) + 1
            assert len(self._in_use) <= self.slots

    def end(self, request: Request) -> None:
        """The request runs no more."""
        if request.adapter:
            left = self._in_use[request.adapter] - 1
            if left:
                self._in_use[request.adapter] = left
            else:
                del self._in_use[request.adapter]

    def take(self, needed: Iterable[str]) -> tuple[int, int]:
        """A step needs these adapters, each named once: loads from the disk, and from the host."""
        names = list(needed)
        cold = warm = 0
        for adapter in names:
            if adapter in self._on_gpu:
                self.hits += 1
            elif adapter in self._host:
                warm += 1
            else:
                cold += 1
            self._host.pop(adapter, None)
            self._host[adapter] = None
            if len(self._host) > self.host_slots:
                self._on_gpu.pop(self._leaves_host(names), None)
            if adapter not in self._on_gpu and len(self._on_gpu) >= self.slots:
                del self._on_gpu[next(name for name in self._on_gpu if name not in names)]
            self._on_gpu.pop(adapter, None)
            self._on_gpu[adapter] = None
        self.cold_loads += cold
        self.host_loads += warm
        return cold, warm

    def work(self, members: Sequence[tuple[Request, int]]) -> LoraWork:
        """What the adapters of a batch's members add to it; those without a slot get one."""
        needed: dict[str, None] = {}
        tokens = 0
        for request, new in members:
            if request.adapter:
                needed[request.adapter] = None
                tokens += new
        cold, warm = self.take(needed)
        return LoraWork(len(needed), tokens, cold, warm)

    def _leaves_host(self, names: list[str]) -> str:
        oldest = next(name for name in self._host if name not in names)
        del self._host[oldest]
        return oldest

    def clear(self) -> None:
        """The process has ended: nothing is loaded."""
        self._on_gpu.clear()
        self._host.clear()

    def holds(self, request: Request) -> bool:
        """Whether the request would find its adapter here."""
        return request.adapter in self._on_gpu or request.adapter in self._in_use

    def recount(self, running: Sequence[Request], present: Iterable[Request]) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        counted: dict[str, int] = {}
        for request in running:
            if request.adapter:
                counted[request.adapter] = counted.get(request.adapter, 0) + 1
        problems = []
        if counted != self._in_use:
            problems.append(f"adapters in use {self._in_use}, counted {counted}")
        if len(self._on_gpu) > self.slots or len(self._host) > self.host_slots:
            problems.append(
                f"{len(self._on_gpu)} adapters in {self.slots} slots, "
                f"{len(self._host)} of {self.host_slots} on the host"
            )
        if any(adapter not in self._host for adapter in self._on_gpu):
            problems.append("an adapter has a slot without a copy on the host")
        return problems


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
    return rank * weights * _WEIGHT_BYTES


class LoraPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about adapters on one kind of replica."""

    rank: int
    host_ns: int
    """From host memory to the GPU, one adapter."""
    cold_ns: int
    """From the disk to host memory and to the GPU."""

    def pricer(self, context: LatencyContext) -> LoraPricer:
        """What adapters take on such a replica."""
        ops = Ops(context.gpu, context.kernels.coefficients(context.gpu), _WEIGHT_BYTES)
        return LoraPricer(self, ops, adapted_matrices(context.model, context.tensor_parallel))


class LoraPricer:
    """Prices the loads and the thin products of adapters."""

    component = "lora"

    def __init__(self, plan: LoraPlan, ops: Ops, matrices: Sequence[tuple[int, int, int]]) -> None:
        """`matrices`: as `adapted_matrices`."""
        self.plan = plan
        self._ops = ops
        self._matrices = tuple(matrices)
        self._known: dict[tuple[int, int], int] = {}

    def added_ns(self, shape: BatchShape) -> int:
        """Loads and products of the adapters of a batch."""
        lora = next((work for work in shape.works if isinstance(work, LoraWork)), None)
        if lora is None or not lora.adapters:
            return 0
        return (
            lora.cold_loads * self.plan.cold_ns
            + lora.host_loads * self.plan.host_ns
            + self._products_ns(lora.tokens, lora.adapters)
        )

    def _products_ns(self, tokens: int, adapters: int) -> int:
        found = self._known.get((tokens, adapters))
        if found is None:
            rank, ops, seconds = self.plan.rank, self._ops, 0.0
            for inputs, outputs, count in self._matrices:
                more_bytes = (adapters - 1) * rank * (inputs + outputs) * _WEIGHT_BYTES
                seconds += count * (
                    ops.gemm_s(tokens, rank, inputs, "bfloat16")
                    + ops.gemm_s(tokens, outputs, rank, "bfloat16")
                    + more_bytes / ops.memory_rate
                )
            found = self._known[tokens, adapters] = round(seconds * NS_PER_S)
        return found


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
    files = ("configs/adapters.toml",)
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
        Conflict(CACHED_STATES, _KEY, _MODEL),
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
