"""Latency backends by name, and those of one run: replicas of the same kind share one.

Backends are pure, and their tables are filled once. The programs that some of them have started end
with the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from emu.catalogue import sizes
from emu.catalogue.lookup import lookup_gpu
from emu.config.own import make_own
from emu.config.schema import (
    AiconfiguratorTable,
    AstraTable,
    LinearTable,
    OwnLatencyTable,
    ProfileTable,
    RooflineTable,
    SchedulerTable,
    VidurLayersTable,
)
from emu.errors import InputError, PluginError, RunError, shown
from emu.latency.abilities import abilities_of
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.collectives import collectives
from emu.latency.context import LatencyContext
from emu.latency.host_costs import HostCosts, host_costs
from emu.latency.make_roofline import engine_steps, make_roofline

if TYPE_CHECKING:
    from emu.latency.moe_gate import Gate
    from emu.latency.offload.pim import PimAttention
    from emu.latency.offload.weights import WeightLoads
    from emu.latency.profile.attention import BlockGrid
    from emu.latency.roofline import RooflineBackend


def make_latency(context: LatencyContext) -> LatencyBackend:
    """The backend that `latency.backend` names, with what is outside the GPU on top of it.

    Raises InputError for what it lacks.
    """
    inner = _corrected(_named(context), context)
    for part in context.parts:
        from emu.latency.added import AddedBackend  # most replicas have none

        inner = AddedBackend(inner, part.pricer(context))
    if context.parts:
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
    from emu.latency.offload.backend import OffloadedBackend

    return OffloadedBackend(
        inner, context.model.layers, loads=loads, pim=pim, interleaves=interleaves
    )


def _overlapped(inner: RooflineBackend, context: LatencyContext) -> LatencyBackend:
    """The roofline with what hides the exchange of tokens with experts, if something does."""
    setting = context.shared_experts
    if setting is not None and setting.is_apart:
        from emu.latency.experts.apart import ApartBackend

        return ApartBackend(inner, setting, context.gpu.sm_count)
    if setting is None or setting.overlap == "none":
        return inner
    from emu.latency.experts.overlap import OverlappedBackend

    return OverlappedBackend(inner, setting, context.gpu.sm_count)


def _corrected(inner: LatencyBackend, context: LatencyContext) -> LatencyBackend:
    """The backend with the corrections of its engine, if it has any."""
    engine = context.engine
    if engine is None or not engine.is_corrected:
        return inner
    if inner.foreign:
        problem = f"{inner.name!r} is outside simulated time and cannot be corrected"
        raise InputError(context.source, None, "engine.learned", problem)
    from emu.latency.corrected import CorrectedBackend

    return CorrectedBackend(inner, engine)


def weight_loads(context: LatencyContext) -> WeightLoads | None:
    """Loads of weights that are not in GPU memory; None if all are."""
    table, source = context.placement, context.source
    if table is None:
        return None
    from emu.latency.offload.weights import GPU, Device, Placement, WeightLoads, device_of

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
    from emu.latency.offload.pim import PimAttention, pim_device

    if not context.node.pim:
        problem = "needs a machine whose memory computes: nodes.N.pim"
        raise InputError(context.source, None, "latency.attention_offload", problem)
    device = pim_device(context.node.pim, context.source, "nodes.pim")
    return PimAttention(device, context.node.host_memory_gib, context.model)


def _named(context: LatencyContext) -> LatencyBackend:
    table = context.table
    has_engine = context.engine is not None
    host = host_costs(has_engine, table.step_overhead_us, overlapped=context.overlapped)
    if isinstance(table, VidurLayersTable):  # before the roofline, which it derives from
        if table.expert_routing != "balanced":
            problem = f"the {table.backend} backend knows no experts one by one"
            raise InputError(context.source, None, "latency.expert_routing", problem)
        return _vidur(context, table, make_roofline(context, table))
    if isinstance(table, RooflineTable):
        return _overlapped(make_roofline(context, table), context)
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
    if isinstance(table, AstraTable):
        from emu.backends.astra.build import make_astra

        return make_astra(context)
    assert isinstance(table, OwnLatencyTable)
    made: LatencyBackend = make_own(table.backend, "latency.backend", table.own, context)
    _watch(made, table.backend)
    return made


def _watch(made: LatencyBackend, path: str) -> None:
    """What a backend of a user's own answers is looked at: a duration is a whole number >= 1."""
    import numpy as np

    cost = made.iteration_ns

    def watched(shape: BatchShape) -> int:
        found = cost(shape)
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
            problem = f"iteration_ns gave {shown(found)}; expected whole ns, at least 1"
            raise PluginError(f"latency.backend: {path}: {problem}")
        return int(found)

    made.iteration_ns = watched  # type: ignore[method-assign]


def _vidur(
    context: LatencyContext, table: VidurLayersTable, inner: LatencyBackend
) -> LatencyBackend:
    from emu.backends.vidur import VidurBackend, VidurLayers, device_name

    model = context.model
    if context.pipeline_parallel > 1:
        problem = "the vidur backend has no pipeline stages"
        raise InputError(context.source, None, "replicas.pipeline_parallel", problem)
    dtype = sizes.activation_dtype(model, context.dtype)
    weights = sizes.weights_told(model, context.dtype)
    if dtype not in ("float16", "bfloat16") or weights != dtype:
        problem = f"Vidur measured 16-bit weights, not {weights}"
        raise InputError(context.source, None, "model.dtype", problem)
    device = device_name(context.gpu.name, table.hardware, context.source)
    layers = VidurLayers(Path(table.path), device, model, context.tensor_parallel)
    return VidurBackend(layers, inner, model.layers)


def _aiconfigurator(
    context: LatencyContext, keys: AiconfiguratorTable, host: HostCosts
) -> LatencyBackend:
    from emu.backends.aiconfigurator.backend import AiconfiguratorBackend
    from emu.backends.aiconfigurator.saved import find_table
    from emu.backends.aiconfigurator.table import Wanted

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


def _profile_gate(context: LatencyContext, table: ProfileTable, ep: int) -> Gate | None:
    """Where tokens go; None without experts."""
    experts = context.model.experts
    if experts is None:
        return None
    from emu.latency.moe_gate import GateShape, make_gate

    shape = GateShape(experts.count, experts.per_token, ep, context.seed)
    return make_gate(table.expert_routing, shape, own=table.expert_routing_own)


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
        gate=_profile_gate(context, table, ep),
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


def range_warnings(pairs: Iterable[tuple[LatencyBackend, SchedulerTable]]) -> list[str]:
    """Where iterations may be larger than what was profiled; each once."""
    found: dict[str, None] = {}
    asked: LatencyBackend | None = None
    limits: SchedulerTable | None = None
    for latency, table in pairs:
        if latency is asked and table is limits:
            continue  # replicas of one table stand together
        asked, limits = latency, table
        beyond = abilities_of(latency).beyond
        if beyond is not None:
            found[beyond(table.tokens_max, table.requests_max)] = None
    return [warning for warning in found if warning]


class SharedBackends:
    """Backends by what they were built from."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[LatencyContext, LatencyBackend]]] = {}
        """By the table that the replica comes from, which is part of a context: a cluster of many
        models has many tables."""

    def of(self, context: LatencyContext) -> LatencyBackend:
        """The backend of this context, made when it is first asked for."""
        made = self._known.setdefault(context.key, [])
        for known, backend in made:
            if known == context:
                return backend
        backend = make_latency(context)
        made.append((context, backend))
        return backend

    async def aclose(self) -> RunError | None:
        """End all programs, whatever else is being cancelled; the first that ended badly."""
        known = [backend for made in self._known.values() for _, backend in made]
        closing = [close for one in known if (close := abilities_of(one).aclose) is not None]
        if not closing:
            return None
        import anyio

        problem: RunError | None = None
        with anyio.CancelScope(shield=True):
            for close in closing:
                try:
                    await close()
                except RunError as raised:
                    problem = problem or raised
        return problem
