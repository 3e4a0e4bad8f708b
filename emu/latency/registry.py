"""Latency backends by name, and the collectives that they all share.

One backend object serves all replicas of the same shape: backends are pure, and their tables are
filled once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from emu.catalogue import sizes
from emu.catalogue.draft import Draft
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.catalogue.model import ModelSpec
from emu.config.schema import (
    AiconfiguratorTable,
    LatencyTable,
    LinearTable,
    NetworkTable,
    NodeTable,
    PlacementTable,
    ProfileTable,
    RooflineTable,
    SpeculativeTable,
    VidurLayersTable,
)
from emu.errors import InputError, PluginError
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.eager import eager_calls
from emu.latency.engine import (
    NO_ENGINE,
    EngineModel,
    engine_model,
    fused_bytes_max,
    with_step_overhead,
)
from emu.latency.engine_steps import EngineSteps
from emu.latency.host import HostCosts, host_costs
from emu.latency.roofline.backend import RooflineBackend
from emu.latency.roofline.coefficients import kernels_of, scaled
from emu.latency.roofline.ops import Ops, machine_collective
from emu.latency.sampler import resolve_sampling
from emu.network.collectives import Collectives, CollectiveSystem
from emu.network.dims import NetworkDim
from emu.network.rounds import KINDS, Kind, check_algorithm, parse_algorithm
from emu.plugins import make_plugin
from emu.policy.calls import shown

if TYPE_CHECKING:
    from emu.latency.lora import LoraPlan
    from emu.latency.moe_gate import Gate
    from emu.latency.pim import PimAttention
    from emu.latency.placement import WeightLoads
    from emu.latency.profile.attention import BlockGrid

_BYTES_PER_GIB = 1 << 30
_NVLINK_LATENCY_NS = 1_000
_PCIE_LATENCY_NS = 4_000
"""One step of a ring: between NVLink peers, and through the host bridge (NCCL's small sizes)."""

CollectiveCost = Callable[[str, int, int], int]


class LatencyContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a backend may be built from."""

    table: LatencyTable
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
    drafts: SpeculativeTable | None = None
    """Speculative decoding."""
    draft: Draft | None = None
    """The drafter's layers, if it has any."""
    lora: LoraPlan | None = None
    """LoRA adapters, if requests may name some."""


def link_dims(context: LatencyContext) -> tuple[NetworkDim, NetworkDim]:
    """Links inside a machine (NVLink, else PCIe) and between machines (NICs), of one rank each."""
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
    network, dims = context.network, collective_dims(context)
    ranks = max(context.tensor_parallel, context.expert_parallel, 1)
    wanted: list[Kind] = ["all-reduce"] if ranks > 1 else []
    if context.model.experts is not None and ranks > 1:
        wanted.append("all-to-all")
    for kind in network.collective_algorithms:
        key = "network.collective_algorithms"
        try:
            parse_algorithm(network.collective_algorithms[kind])
        except InputError as error:
            raise InputError(context.source, None, key, error.problem) from None
    if network.congestion and len(dims) > 1:
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


def collectives(context: LatencyContext) -> CollectiveCost:
    """Cost of collectives among the ranks of a replica: rings over NVLink (or PCIe), then NICs."""
    dims = collective_dims(context)
    systems = {
        kind: Collectives(collective_system(context, dims, kind))  # type: ignore[arg-type]
        for kind in KINDS
    }
    plain = systems["all-reduce"]
    known: dict[tuple[str, int, int], int] = {}

    def cost_ns(kind: str, size_bytes: int, members: int) -> int:
        key = (kind, size_bytes, members)
        if key not in known:
            if kind in ("send", "point_to_point"):
                known[key] = plain.message_ns(size_bytes, len(dims) - 1)
            else:
                name: Any = kind.replace("_", "-")
                known[key] = systems[name].collective_ns(
                    name, size_bytes, members, congestion=context.network.congestion
                )
        return known[key]

    return cost_ns


def _gib(gbps: float) -> float:
    return gbps * 1e9 / 8 / _BYTES_PER_GIB


def make_latency(context: LatencyContext) -> LatencyBackend:
    """The backend that `latency.backend` names, with what is outside the GPU on top of it.

    Raises InputError for what it lacks.
    """
    inner = _corrected(_named(context), context)
    if context.drafts is not None:
        inner = _speculative(context, context.drafts, inner)
    if context.lora is not None:
        from emu.latency.lora import ADAPTER_BYTES, LoraBackend, adapted_matrices

        ops = Ops(context.gpu, kernels_of(context.gpu), ADAPTER_BYTES)
        matrices = adapted_matrices(context.model, context.tensor_parallel)
        inner = LoraBackend(inner, context.lora, ops, matrices)
    if context.drafts is not None or context.lora is not None:
        return inner
    loads, pim = weight_loads(context), pim_attention(context)
    interleaves = context.table.sub_batch_interleaving
    if interleaves and (pim is None or context.pipeline_parallel > 1):
        problem = "needs latency.attention_offload, and one pipeline stage"
        raise InputError(context.source, None, "latency.sub_batch_interleaving", problem)
    if loads is None and pim is None:
        return inner
    if inner.foreign:
        problem = "has no weights or attention outside the GPU"
        raise InputError(context.source, None, "latency.backend", f"{inner.name!r} {problem}")
    from emu.latency.offload import OffloadedBackend

    return OffloadedBackend(
        inner, context.model.layers, loads=loads, pim=pim, interleaves=interleaves
    )


def _corrected(inner: LatencyBackend, context: LatencyContext) -> LatencyBackend:
    """The backend with the corrections of its engine, if it has any."""
    engine = engine_of(context.table, context.source)
    if engine is None or not engine.is_corrected:
        return inner
    if inner.foreign:
        problem = f"{inner.name!r} is outside simulated time and cannot be corrected"
        raise InputError(context.source, None, "latency.engine", problem)
    from emu.latency.corrected import CorrectedBackend

    return CorrectedBackend(inner, engine)


def _speculative(
    context: LatencyContext, drafts: SpeculativeTable, inner: LatencyBackend
) -> LatencyBackend:
    """The backend with the drafter's passes behind each step."""
    engine = engine_of(context.table, context.source)
    if engine is not None and engine.is_corrected:
        problem = "its corrections know no drafts (scheduler.speculative_config)"
        raise InputError(context.source, None, "latency.engine", problem)
    step_ns = round(drafts.draft_step_us * 1000) if drafts.draft_step_us >= 0 else -1
    passes = None
    if step_ns < 0 and context.draft is None:
        step_ns = 0  # n-grams are looked up beside the GPU's work
    if step_ns < 0 and context.draft is not None:
        assert isinstance(context.table, RooflineTable)
        from emu.latency.roofline.passes import RooflinePasses

        passes = RooflinePasses(context.draft, _roofline_of(context, context.table, context.draft))
    from emu.latency.speculative import DraftPlan, SpeculativeBackend

    plan = DraftPlan(tokens=drafts.num_speculative_tokens, step_ns=step_ns)
    return SpeculativeBackend(inner, plan, passes)


def _roofline_of(context: LatencyContext, table: RooflineTable, draft: Draft) -> RooflineBackend:
    """The kernels of a drafter's pass; the engine's part of the step is the target's."""
    alone = msgspec.structs.replace(
        context,
        model=draft.spec,
        tensor_parallel=draft.tensor_parallel,
        expert_parallel=min(context.expert_parallel, draft.tensor_parallel),
        table=msgspec.structs.replace(table, host_overhead=False),
        drafts=None,
        draft=None,
    )
    return _roofline(alone, table, has_engine=False)


def weight_loads(context: LatencyContext) -> WeightLoads | None:
    """Loads of weights that are not in GPU memory; None if all are."""
    table, source = context.placement, context.source
    if table is None:
        return None
    from emu.latency.placement import GPU, Device, Placement, WeightLoads, device_of

    placement = Placement(table, context.model.layers, source, context.key)
    if not placement.devices:
        return None
    node = context.node
    pcie_gbps = node.pcie_gbps if node.pcie_gbps > 0 else context.gpu.pcie_gbps
    devices = {
        name: device_of(name, node, pcie_gbps, source, f"{context.key}.placement")
        for name in placement.devices
        if name != GPU
    }
    if placement.is_local_billed:
        devices[GPU] = Device(context.gpu.memory_gbytes_per_s, 0, is_shared=False)
    ep = context.expert_parallel or context.tensor_parallel
    return WeightLoads(
        placement, devices, context.model, context.tensor_parallel, ep, context.dtype
    )


def pim_attention(context: LatencyContext) -> PimAttention | None:
    """Decode attention in memory; None if it runs on the GPU."""
    if not context.table.attention_offload:
        return None
    from emu.latency.pim import PimAttention, pim_device

    if not context.node.pim:
        problem = "needs a machine whose memory computes: nodes.N.pim"
        raise InputError(context.source, None, "latency.attention_offload", problem)
    device = pim_device(context.node.pim, context.source, "nodes.pim")
    return PimAttention(device, context.node.host_memory_gib, context.model)


def _named(context: LatencyContext) -> LatencyBackend:
    table = context.table
    has_engine = engine_of(table, context.source) is not None
    host = host_costs(has_engine, table.step_overhead_us, overlapped=context.overlapped)
    if table.expert_routing != "balanced" and table.backend in (
        "linear",
        "aiconfigurator",
        "vidur",
    ):
        problem = f"the {table.backend} backend knows no experts one by one"
        raise InputError(context.source, None, "latency.expert_routing", problem)
    if isinstance(table, VidurLayersTable):  # before the roofline, which it derives from
        return _vidur(context, table, _roofline(context, table))
    if isinstance(table, RooflineTable):
        return _roofline(context, table)
    if isinstance(table, LinearTable):
        from emu.latency.linear import LinearBackend

        return LinearBackend(
            table.base_us,
            table.per_token_us,
            table.per_context_token_us,
            table.prefill_tokens_per_s,
            stages=context.pipeline_parallel,
            layers=context.model.layers,
        )
    if isinstance(table, ProfileTable):
        return _profile(context, table, host)
    if isinstance(table, AiconfiguratorTable):
        steps = engine_steps(context)
        costs = host if steps is None else steps.host_costs()
        return _aiconfigurator(context, table, costs)
    if table.backend == "astra-sim":
        from emu.astra.factory import make_astra

        return make_astra(context)
    made: LatencyBackend = make_plugin(table.backend, "latency.backend", context)
    _watch(made, table.backend)
    return made


def _watch(made: Any, path: str) -> None:
    """What a backend of a user's own answers is looked at: a duration is a whole number >= 1."""
    cost = made.iteration_ns

    def watched(shape: BatchShape) -> int:
        found = cost(shape)
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
            problem = f"iteration_ns gave {shown(found)}; expected whole ns, at least 1"
            raise PluginError(f"latency.backend: {path}: {problem}")
        return int(found)

    made.iteration_ns = watched


def engine_of(table: LatencyTable, source: str = "config") -> EngineModel | None:
    """The engine that a latency table names; None = kernels alone."""
    if not table.host_overhead or table.engine == NO_ENGINE:
        if isinstance(table, RooflineTable) and table.enforce_eager:
            problem = "needs an engine that launches kernels, not engine none"
            raise InputError(source, None, "latency.enforce_eager", problem)
        return None
    model = engine_model(table.engine, source)
    if isinstance(table, RooflineTable) and table.enforce_eager:
        model = msgspec.structs.replace(model, enforce_eager=True)
    if table.step_overhead_us >= 0:
        model = with_step_overhead(model, table.step_overhead_us)
    return model


def engine_steps(context: LatencyContext) -> EngineSteps | None:
    """The engine's part of a replica's steps; None = kernels alone."""
    table, model = context.table, engine_of(context.table, context.source)
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
        fused_bytes_max=fused_bytes_max(model, context.gpu.architecture, context.tensor_parallel),
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
        kernels_of(gpu),
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


def _roofline(
    context: LatencyContext, table: RooflineTable, *, has_engine: bool = True
) -> RooflineBackend:
    made: type[RooflineBackend] = RooflineBackend
    if context.model.special_layers:
        from emu.latency.roofline.mixed import MixedRooflineBackend

        made = MixedRooflineBackend
    return made(
        context.model,
        context.gpu,
        tp=context.tensor_parallel,
        pp=context.pipeline_parallel,
        ep=context.expert_parallel,
        dtype=context.dtype,
        kv_cache_dtype=context.kv_cache_dtype,
        kernels=scaled(kernels_of(context.gpu), table.compute_efficiency, table.memory_efficiency),
        gate=expert_gate(context, max(1, context.expert_parallel)),
        engine=engine_steps(context) if has_engine else None,
        is_warm=table.warm_up,
        collective_ns=engine_collectives(context),
        round_tokens_to=table.round_tokens_to,
    )


def _vidur(
    context: LatencyContext, table: VidurLayersTable, inner: LatencyBackend
) -> LatencyBackend:
    from emu.latency.vidur import VidurBackend, VidurLayers, device_name

    model = context.model
    if context.pipeline_parallel > 1:
        problem = "the vidur backend has no pipeline stages"
        raise InputError(context.source, None, "replicas.pipeline_parallel", problem)
    dtype = sizes.activation_dtype(model, context.dtype)
    if dtype not in ("float16", "bfloat16") or context.dtype not in ("auto", dtype):
        problem = f"Vidur measured 16-bit weights, not {context.dtype}"
        raise InputError(context.source, None, "model.dtype", problem)
    device = device_name(context.gpu.name, table.hardware, context.source)
    layers = VidurLayers(Path(table.path), device, model, context.tensor_parallel)
    return VidurBackend(layers, inner, model.layers)


def _aiconfigurator(
    context: LatencyContext, keys: AiconfiguratorTable, host: HostCosts
) -> LatencyBackend:
    from emu.latency.aiconfigurator import AiconfiguratorBackend, Wanted, find_table

    if context.pipeline_parallel > 1:
        problem = "the aiconfigurator backend has no pipeline stages"
        raise InputError(context.source, None, "replicas.pipeline_parallel", problem)
    wanted = Wanted(
        spec=context.model,
        gpu=context.gpu.name,
        tensor_parallel=context.tensor_parallel,
        expert_parallel=max(1, context.expert_parallel) if context.model.experts else 1,
        dtype=context.dtype,
        kv_cache_dtype=context.kv_cache_dtype,
        engine=keys.tables,
        source=context.source,
    )
    table = find_table(keys.path, wanted)
    return AiconfiguratorBackend(table, context.model.layers, host)


def _profile(context: LatencyContext, table: ProfileTable, host: HostCosts) -> LatencyBackend:
    from emu.latency.profile.backend import ProfileBackend
    from emu.latency.profile.bundle import find_bundle, read_bundle, variant_name
    from emu.latency.profile.rows import HostMemory, Parallel, ProfileModel

    model = context.model
    if not table.path:
        raise InputError("config", None, "latency.path", "the profile backend needs a bundle")
    dtype = sizes.activation_dtype(model, context.dtype)
    directory = find_bundle(
        table.path,
        hardware=table.hardware or context.gpu.name,
        model=model.name,
        variant=variant_name(dtype, context.kv_cache_dtype),
    )
    ep = context.expert_parallel or context.tensor_parallel
    experts = model.experts
    gate = None
    if experts is not None:
        from emu.latency.moe_gate import GateShape, make_gate

        gate = make_gate(
            table.expert_routing,
            GateShape(experts.count, experts.per_token, ep, context.seed),
        )

    return ProfileBackend(
        read_bundle(directory, context.tensor_parallel),
        ProfileModel(
            layers=model.layers,
            hidden=model.hidden,
            element_bytes=sizes.weight_bytes(1, dtype),
            experts=experts.count if experts is not None else 0,
            moe_layers=tuple(model.is_moe_layer(i) for i in range(model.layers))
            if experts is not None
            else (),
        ),
        Parallel(
            tensor=context.tensor_parallel,
            pipeline=context.pipeline_parallel,
            expert=ep if experts is not None else 1,
        ),
        host_memory=HostMemory(
            gbytes_per_s=context.node.host_memory_gbytes_per_s,
            latency_ns=context.node.host_memory_latency_ns,
            stores_output=not context.hands_off,
        ),
        collective_ns=collectives(context),
        host=host,
        gate=gate,
        grid=block_grid(context, table.hardware),
    )


def block_grid(context: LatencyContext, hardware: str) -> BlockGrid | None:
    """Where the decode kernel's blocks run on this GPU; None = unknown, or another kernel."""
    from emu.latency.profile.attention import BlockGrid

    name = hardware or context.gpu.name
    try:
        gpu = lookup_gpu(name)
    except InputError:
        return None
    heads = sizes.kv_heads_per_rank(context.model, context.tensor_parallel)
    return BlockGrid.of(gpu, heads)
