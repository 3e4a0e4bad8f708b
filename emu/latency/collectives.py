"""The collectives of a replica's ranks, from its context: their network, cost, and checks.

Rings over NVLink (or PCIe) and NICs by what `[network]` says, or as an engine's kernels run them on
measured kinds of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from emu.config.schema import (
    NetworkTable,
)
from emu.errors import InputError
from emu.latency.context import LatencyContext
from emu.latency.kernels.machine import machine_collective

if TYPE_CHECKING:  # a replica of one rank needs none of the formulas of collectives
    from emu.network.collectives import Collectives
    from emu.network.dimensions import NetworkDim
    from emu.network.rounds import CollectiveSystem, Kind


_BYTES_PER_GIB = 1 << 30
_NVLINK_LATENCY_NS = 1_000
_PCIE_LATENCY_NS = 4_000
"""One step of a ring: between NVLink peers, and through the host bridge (NCCL's small sizes)."""

CollectiveCost = Callable[[str, int, int], int]


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
    if ranks * context.pipeline_parallel == 1 and not _said(network, _KEYS):
        return
    dims = collective_dims(context)
    if context.table.backend == "astra-sim":
        for name in _said(network, ("collective_splits", "collective_algorithms", "congestion")):
            problem = "the executor runs whole collectives of one algorithm without congestion"
            raise InputError(context.source, None, f"network.{name}", problem)
    _check_names(network, context.source)
    if network.congestion:
        _check_congestion(network, len(dims), context.source)
    for kind in _wanted_kinds(context, ranks):
        _check_kind(context, kind, ranks, dims)
    if context.table.backend == "roofline":
        _check_shapes(context, dims)


_KEYS: Final = ("collective_algorithm", "collective_algorithms", "collective_splits", "congestion")


def _said(network: NetworkTable, names: Sequence[str]) -> list[str]:
    """Those of these keys that have another value than without them."""
    given, plain = msgspec.structs.asdict(network), msgspec.structs.asdict(NetworkTable())
    return [name for name in names if given[name] != plain[name]]


def _check_names(network: NetworkTable, source: str) -> None:
    """Every algorithm by kind is one that there is."""
    from emu.network.rounds import parse_algorithm

    for name in network.collective_algorithms.values():
        try:
            parse_algorithm(name)
        except InputError as error:
            key = "network.collective_algorithms"
            raise InputError(source, None, key, error.problem) from None


def _check_congestion(network: NetworkTable, dims: int, source: str) -> None:
    """Shared links are simulated for whole algorithms without windows, on one dimension."""
    from emu.network.rounds import parse_algorithm

    named = [("collective_algorithm", str(network.collective_algorithm))]
    named += [("collective_algorithms", one) for one in network.collective_algorithms.values()]
    for key, name in named:
        parsed = parse_algorithm(name)
        if parsed.is_one or parsed.window:
            problem = f"{name} is not supported with congestion"
            raise InputError(source, None, f"network.{key}", problem)
    if dims > 1:
        problem = "knows one dimension: replicas inside a machine"
        raise InputError(source, None, "network.congestion", problem)


def _wanted_kinds(context: LatencyContext, ranks: int) -> list[Kind]:
    """The collectives that the replica's layers ask for."""
    wanted: list[Kind] = ["all-reduce"] if ranks > 1 else []
    if context.model.experts is not None and ranks > 1:
        wanted.append("all-to-all")
    if context.tensor_parallel > 1 and context.table.backend in ("roofline", "astra-sim"):
        wanted.append("all-gather")  # of the logits
    return wanted


def _check_kind(
    context: LatencyContext, kind: Kind, ranks: int, dims: Sequence[NetworkDim]
) -> None:
    """The algorithm of one kind runs on these ranks."""
    from emu.network.rounds import check_algorithm

    is_own = kind in context.network.collective_algorithms
    key = "network.collective_algorithm" + ("s" if is_own else "")
    system = collective_system(context, dims, kind)
    for npus in [ranks] if system.is_one else [min(ranks, dim.npus) for dim in dims]:
        try:
            check_algorithm(system.algorithm(0), kind, npus)
        except InputError as error:
            raise InputError(context.source, None, key, error.problem) from None


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
    systems: dict[Kind, Collectives] = {}
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
                wanted = kind.replace("_", "-")
                name, system = next(one for one in systems.items() if one[0] == wanted)
                known[key] = system.collective_ns(
                    name, size_bytes, members, congestion=context.network.congestion
                )
        return known[key]

    return cost_ns


def _systems(context: LatencyContext) -> dict[Kind, Collectives]:
    """The collectives of a replica's ranks, by kind."""
    from emu.network.collectives import Collectives
    from emu.network.rounds import KINDS

    dims = collective_dims(context)
    return {kind: Collectives(collective_system(context, dims, kind)) for kind in KINDS}


def _gib(gbps: float) -> float:
    return gbps * 1e9 / 8 / _BYTES_PER_GIB


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
