"""What a latency backend is built from: the replica's facts, its collectives, its engine.

Backends are made of it by name in `emu/cluster/backends.py`; the roofline is made here, because
features have layers of their own to cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.schema import (
    LatencyTable,
    NetworkTable,
    NodeTable,
    PlacementTable,
    RooflineTable,
)
from emu.errors import InputError
from emu.latency.coefficients import Kernels, kernels_of, scaled
from emu.latency.eager import eager_calls
from emu.latency.engine import EngineModel
from emu.latency.engine_steps import EngineSteps
from emu.latency.kernels.machine import machine_collective
from emu.latency.sampling import resolve_sampling

if TYPE_CHECKING:  # a replica of one rank needs none of the formulas of collectives
    from emu.latency.moe_gate import Gate
    from emu.latency.parts import Pricer
    from emu.latency.roofline import RooflineBackend
    from emu.network.collectives import Collectives
    from emu.network.dimensions import NetworkDim
    from emu.network.rounds import CollectiveSystem, Kind

_BYTES_PER_GIB = 1 << 30
_NVLINK_LATENCY_NS = 1_000
_PCIE_LATENCY_NS = 4_000
"""One step of a ring: between NVLink peers, and through the host bridge (NCCL's small sizes)."""

CollectiveCost = Callable[[str, int, int], int]


class KernelPaths(Protocol):
    """Which kernels run on a GPU: an engine's (`emu/engines/`), or those that no engine chooses."""

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """What part of the GPU's peaks they reach."""
        ...

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """The largest all-reduce that is one kernel with residual and norm behind it; 0 = none."""
        ...


class PlainKernels(msgspec.Struct, frozen=True):
    """Kernels without an engine."""

    def coefficients(self, gpu: GpuSpec) -> Kernels:
        """The set that is fitted to the GPU, or to its architecture."""
        return kernels_of(gpu)

    def fused_bytes_max(self, architecture: str, ranks: int) -> int:
        """Nothing is fused."""
        return 0


class PassPart(Protocol):
    """A feature in what a backend is built from; equal ones take the same, so that replicas of
    one kind share a backend."""

    def pricer(self, context: LatencyContext) -> Pricer:
        """What its operations take on a replica of this kind."""
        ...


class LatencyContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a backend may be built from."""

    table: LatencyTable
    engine: EngineModel | None = None
    """What happens between kernels; None = kernels alone."""
    kernels: KernelPaths = PlainKernels()
    network: NetworkTable
    model: ModelSpec
    gpu: GpuSpec
    node: NodeTable
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    dtype: str
    kv_cache_dtype: str
    gpus_per_machine: int
    seed: int
    hands_off: bool
    """A prefill replica: its last output leaves over the network."""
    placement: PlacementTable | None = None
    source: str = "config"
    key: str = "replicas"
    """Where the replica's table stands, for errors."""
    overlapped: bool = True
    """The engine schedules the next step while one runs."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    parts: tuple[PassPart, ...] = ()
    """What features add to its passes, in the order in which they are added."""


def link_dims(context: LatencyContext) -> tuple[NetworkDim, NetworkDim]:
    """Links inside a machine (NVLink, else PCIe) and between machines (NICs), of one rank each."""
    from emu.network.dimensions import NetworkDim

    node, gpu, network = context.node, context.gpu, context.network
    nvlink_gbps = node.nvlink_gbps if node.nvlink_gbps >= 0 else gpu.nvlink_gbps
    pcie_gbps = node.pcie_gbps if node.pcie_gbps > 0 else gpu.pcie_gbps
    inner_gbps, inner_ns = (
        (nvlink_gbps, _NVLINK_LATENCY_NS) if nvlink_gbps > 0 else (pcie_gbps, _PCIE_LATENCY_NS)
    )
    outer_ns = round(node.nic_latency_us * 1000)
    if network.link_latency_ns >= 0:
        inner_ns = outer_ns = network.link_latency_ns
    if node.nvlink_latency_ns >= 0:
        inner_ns = node.nvlink_latency_ns
    inside, between = (*network.topology, *("FullyConnected",) * 2)[:2]
    return (
        NetworkDim(topology=inside, npus=1, gib_per_s=_gib(inner_gbps), latency_ns=inner_ns),
        NetworkDim(topology=between, npus=1, gib_per_s=_gib(node.nic_gbps), latency_ns=outer_ns),
    )


def collective_system(
    context: LatencyContext, dims: Sequence[NetworkDim], kind: Kind | None = None
) -> CollectiveSystem:
    """What [network] says of collectives on these dimensions; `kind` None = those not named."""
    from emu.network.rounds import CollectiveSystem

    network = context.network
    name: str = network.collective_algorithm
    if kind is not None:
        name = network.collective_algorithms.get(kind, name)
    return CollectiveSystem(
        dims=tuple(dims),
        algorithms=(name,) * len(dims),
        splits=network.collective_splits,
        active_chunks=network.collective_active_chunks,
        local_mem_gbytes_per_s=context.gpu.memory_gbytes_per_s,
        endpoint_delay_ns=network.endpoint_delay_ns,
    )


def collective_dims(context: LatencyContext) -> list[NetworkDim]:
    """Dimensions of a replica's ranks: those of a machine, then machines."""
    inner, outer = link_dims(context)
    ranks = max(context.tensor_parallel, context.expert_parallel, 1) * context.pipeline_parallel
    inside = min(ranks, context.gpus_per_machine)
    dims = [msgspec.structs.replace(inner, npus=inside)]
    if ranks > inside:
        outside = -(-ranks // inside)
        dims.append(msgspec.structs.replace(outer, npus=outside))
    return dims


def check_collectives(context: LatencyContext) -> None:
    """Refuse algorithms that the replica's ranks cannot run. Raises InputError with the key."""
    network, ranks = context.network, max(context.tensor_parallel, context.expert_parallel, 1)
    if ranks * context.pipeline_parallel == 1 and not _says(network):
        return
    from emu.network.rounds import check_algorithm, parse_algorithm

    dims = collective_dims(context)
    wanted: list[Kind] = ["all-reduce"] if ranks > 1 else []
    if context.model.experts is not None and ranks > 1:
        wanted.append("all-to-all")
    if context.tensor_parallel > 1 and context.table.backend in ("roofline", "astra-sim"):
        wanted.append("all-gather")  # of the logits
    if context.table.backend == "astra-sim":
        for name in ("collective_splits", "collective_algorithms", "congestion"):
            if getattr(network, name) != getattr(NetworkTable(), name):
                problem = "the executor runs whole collectives of one algorithm without congestion"
                raise InputError(context.source, None, f"network.{name}", problem)
    for kind in network.collective_algorithms:
        key = "network.collective_algorithms"
        try:
            parse_algorithm(network.collective_algorithms[kind])
        except InputError as error:
            raise InputError(context.source, None, key, error.problem) from None
    if network.congestion:
        named = [("collective_algorithm", str(network.collective_algorithm))]
        named += [("collective_algorithms", one) for one in network.collective_algorithms.values()]
        for key, name in named:
            parsed = parse_algorithm(name)
            if parsed.is_one or parsed.window:
                problem = f"{name} is not supported with congestion"
                raise InputError(context.source, None, f"network.{key}", problem)
        if len(dims) > 1:
            problem = "knows one dimension: replicas inside a machine"
            raise InputError(context.source, None, "network.congestion", problem)
    for kind in wanted:
        is_own = kind in network.collective_algorithms
        key = "network.collective_algorithm" + ("s" if is_own else "")
        system = collective_system(context, dims, kind)
        sizes = [ranks] if system.is_one else [min(ranks, dim.npus) for dim in dims]
        for npus in sizes:
            try:
                check_algorithm(system.algorithm(0), kind, npus)
            except InputError as error:
                raise InputError(context.source, None, key, error.problem) from None
    if context.table.backend == "roofline":
        _check_shapes(context, dims)


def _says(network: NetworkTable) -> bool:
    """Whether a key of collectives has another value than without it."""
    plain = NetworkTable()
    names = ("collective_algorithm", "collective_algorithms", "collective_splits", "congestion")
    return any(getattr(network, name) != getattr(plain, name) for name in names)


def _check_shapes(context: LatencyContext, dims: list[NetworkDim]) -> None:
    """Ranks that talk to each other fill machines evenly, in the groups that layers ask for."""
    from emu.network.collectives import Collectives

    tensor, expert = context.tensor_parallel, context.expert_parallel
    groups = {"tensor_parallel": tensor}
    if context.model.experts is not None and expert > tensor:
        groups["expert_parallel"] = expert // tensor
    shapes = Collectives(collective_system(context, dims, "all-reduce"))
    for key, ranks in groups.items():
        try:
            shapes.shape(ranks)
        except InputError as error:
            raise InputError(context.source, None, f"replicas.{key}", error.problem) from None


def collectives(context: LatencyContext) -> CollectiveCost:
    """Cost of collectives among the ranks of a replica: rings over NVLink (or PCIe), then NICs."""
    systems: dict[str, Collectives] = {}
    known: dict[tuple[str, int, int], int] = {}

    def cost_ns(kind: str, size_bytes: int, members: int) -> int:
        key = (kind, size_bytes, members)
        if key not in known:
            if not systems:
                systems.update(_systems(context))
            if kind in ("send", "point_to_point"):
                plain = systems["all-reduce"]
                known[key] = plain.message_ns(size_bytes, len(plain.system.dims) - 1)
            else:
                name: Any = kind.replace("_", "-")
                known[key] = systems[name].collective_ns(
                    name, size_bytes, members, congestion=context.network.congestion
                )
        return known[key]

    return cost_ns


def _systems(context: LatencyContext) -> dict[str, Collectives]:
    """The collectives of a replica's ranks, by kind."""
    from emu.network.collectives import Collectives
    from emu.network.rounds import KINDS

    dims = collective_dims(context)
    return {
        kind: Collectives(collective_system(context, dims, kind))  # type: ignore[arg-type]
        for kind in KINDS
    }


def _gib(gbps: float) -> float:
    return gbps * 1e9 / 8 / _BYTES_PER_GIB


def engine_steps(context: LatencyContext) -> EngineSteps | None:
    """The engine's part of a replica's steps; None = kernels alone."""
    table, model = context.table, context.engine
    if model is None:
        return None
    return EngineSteps(
        model,
        resolve_sampling(table.sampling, table.penalties, context.model.name),
        layers=context.model.layers,
        vocab=context.model.vocab,
        gbytes_per_s=context.gpu.memory_gbytes_per_s,
        max_num_seqs=context.max_num_seqs,
        max_num_batched_tokens=context.max_num_batched_tokens,
        overlapped=context.overlapped,
        fused_bytes_max=context.kernels.fused_bytes_max(
            context.gpu.architecture, context.tensor_parallel
        ),
        eager=eager_calls(context.model, context.tensor_parallel) if model.enforce_eager else None,
    )


def engine_collectives(context: LatencyContext) -> CollectiveCost:
    """Cost of collectives as an engine's kernels run them on measured kinds of machines.

    The analytic network answers instead for ranks on several machines, and wherever the
    configuration gives its parameters.
    """
    analytic = collectives(context)
    node, gpu, network = context.node, context.gpu, context.network
    ranks = max(context.tensor_parallel, context.expert_parallel, 1) * context.pipeline_parallel
    default = NetworkTable()
    is_given = (
        network.collective_algorithm != default.collective_algorithm
        or network.collective_algorithms
        or network.topology
        or network.collective_splits > 1
        or network.congestion
        or network.endpoint_delay_ns != default.endpoint_delay_ns
        or network.link_latency_ns >= 0
        or node.nvlink_latency_ns >= 0
    )
    if is_given or ranks > context.gpus_per_machine:
        return analytic
    return machine_collective(
        gpu,
        context.kernels.coefficients(gpu),
        nvlink_gbps=node.nvlink_gbps if node.nvlink_gbps >= 0 else None,
        pcie_gbps=node.pcie_gbps if node.pcie_gbps > 0 else None,
        send_ns=analytic,
    )


def expert_gate(context: LatencyContext, ranks: int) -> Gate | None:
    """The gate that `latency.expert_routing` names; None if experts are chosen evenly."""
    experts = context.model.experts
    if experts is None or context.table.expert_routing == "balanced":
        return None
    from emu.latency.moe_gate import GateShape, make_gate

    shape = GateShape(experts.count, experts.per_token, ranks, context.seed)
    return make_gate(context.table.expert_routing, shape)


def make_roofline(
    context: LatencyContext, table: RooflineTable, *, has_engine: bool = True
) -> RooflineBackend:
    """The roofline of a replica. `has_engine` False: its kernels alone."""
    from emu.latency.roofline import RooflineBackend  # other backends need none

    made: type[RooflineBackend] = RooflineBackend
    if context.model.special_layers:
        from emu.latency.mixed import MixedRooflineBackend

        made = MixedRooflineBackend
    return made(
        context.model,
        context.gpu,
        tp=context.tensor_parallel,
        pp=context.pipeline_parallel,
        ep=context.expert_parallel,
        dtype=context.dtype,
        kv_cache_dtype=context.kv_cache_dtype,
        kernels=scaled(
            context.kernels.coefficients(context.gpu),
            table.compute_efficiency,
            table.memory_efficiency,
        ),
        gate=expert_gate(context, max(1, context.expert_parallel)),
        engine=engine_steps(context) if has_engine else None,
        is_warm=table.warm_up,
        collective_ns=engine_collectives(context),
        round_tokens_to=table.round_tokens_to,
    )
