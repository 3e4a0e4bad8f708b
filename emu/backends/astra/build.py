"""The `astra-sim` backend of a replica, from the configuration.

Owns the choice of layer times, the network and memories of one replica (or of the members of a
data-parallel group that share its experts), and where counts come from: embedded executor,
program, cache or replay.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from emu.backends.astra.backend import AstraBackend, Calculates
from emu.backends.astra.calculator import Calculator
from emu.backends.astra.counts import CountStore, fingerprint
from emu.backends.astra.etfile import Dialect
from emu.backends.astra.inputs import InputSetup
from emu.backends.astra.layer_times import BundleTimes, LayerTimes
from emu.backends.astra.memories import Memories, Memory
from emu.backends.astra.oneshot import OneShotCalculator
from emu.backends.astra.roofline_times import RooflineTimes
from emu.backends.astra.rows import TraceGenerator, TraceSetup
from emu.backends.astra.trace import TraceModel
from emu.catalogue import sizes
from emu.config.schema import AstraTable
from emu.errors import InputError
from emu.latency.coefficients import scaled
from emu.latency.collectives import collective_system, link_dims
from emu.latency.context import LatencyContext
from emu.latency.host_costs import host_costs, step_overhead_ns
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile.bundle import find_bundle, read_bundle, variant_name
from emu.latency.roofline import RooflineBackend
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem


def _keys(context: LatencyContext) -> AstraTable:
    table = context.table
    assert isinstance(table, AstraTable)
    return table


def check_astra(context: LatencyContext) -> None:
    """Refuse what the program cannot run. Raises InputError."""
    tp, ep = context.tensor_parallel, _expert_ranks(context)
    if ep > tp and ep % tp:
        problem = f"{ep} ranks do not fill tensor_parallel {tp} evenly"
        raise InputError(context.source, None, "replicas.expert_parallel", problem)
    _memories(context).check(f"{context.source}: [[nodes]]")


def _expert_ranks(context: LatencyContext) -> int:
    has_experts = context.model.experts is not None
    return (context.expert_parallel or context.tensor_parallel) if has_experts else 1


def make_astra(context: LatencyContext) -> AstraBackend:
    """The backend of one kind of replica. Raises InputError for what it lacks."""
    check_astra(context)
    table, tp, pp = _keys(context), context.tensor_parallel, context.pipeline_parallel
    experts, ep = context.model.experts, _expert_ranks(context)
    links = _network(context)
    network = collective_system(context, links.dims)
    memories = _memories(context)
    setup = TraceSetup(
        model=_trace_model(context),
        tensor=tp,
        pipeline=pp,
        expert=ep,
        local_experts=max(1, ep // links.members),
        tensor_dims=links.tensor,
        expert_dims=links.expert,
    )
    gate = None
    if experts is not None:
        shape = GateShape(experts.count, experts.per_token, ep, context.seed)
        gate = make_gate(table.expert_routing, shape, own=table.expert_routing_own)
    costs = host_costs(table.host_overhead, table.step_overhead_us)

    return AstraBackend(
        TraceGenerator(setup, _times(context), gate),
        network,
        memories,
        members=links.members,
        host_ns=lambda shape: step_overhead_ns(costs, shape.sequences),
        faithful=table.faithful,
        calculator=_calculator(context, network, memories),
        store=_store(context, setup, network, memories),
        replay_only=bool(table.replay),
    )


class _Links(NamedTuple):
    """Dimensions (tensor, pipeline, group), and which of them two kinds of collectives use."""

    dims: tuple[NetworkDim, ...]
    tensor: tuple[bool, ...] | None
    expert: tuple[bool, ...] | None
    members: int
    """Replicas that share experts."""


def _network(context: LatencyContext) -> _Links:
    tp, pp = context.tensor_parallel, context.pipeline_parallel
    members = max(1, _expert_ranks(context) // tp)
    inner, outer = link_dims(context)
    here = context.gpus_per_machine
    sizes_of = [(tp, tp), (pp, tp * pp), (members, tp * pp * members)]
    dims = [
        msgspec.structs.replace(inner if reach <= here else outer, npus=size)
        for size, reach in sizes_of
    ]
    while len(dims) > 1 and dims[-1].npus == 1:
        dims.pop()
    if len(dims) == 1:
        return _Links(tuple(dims), None, None, members)
    tensor = (True, *[False] * (len(dims) - 1))
    expert = (tp > 1, False, True) if members > 1 else tensor
    return _Links(tuple(dims), tensor, expert, members)


def _memories(context: LatencyContext) -> Memories:
    node = context.node
    return Memories(
        remote=Memory(
            memory_type="PER_NODE_MEMORY_EXPANSION",
            gbytes_per_s=node.host_memory_gbytes_per_s,
            latency_ns=node.host_memory_latency_ns,
        ),
        cxl=Memory(
            memory_type="MEMORY_POOL",
            gbytes_per_s=node.cxl_gbytes_per_s,
            latency_ns=node.cxl_latency_ns,
            devices=node.cxl_devices,
        )
        if node.cxl_gib
        else None,
        local=Memory(
            memory_type="PER_NPU_MEMORY_EXPANSION",
            gbytes_per_s=context.gpu.memory_gbytes_per_s,
        ),
    )


def _trace_model(context: LatencyContext) -> TraceModel:
    model = context.model
    dtype = sizes.activation_dtype(model, context.dtype)
    experts = model.experts
    return TraceModel(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
        element_bytes=sizes.weight_bytes(1, dtype),
        kv_element_bytes=sizes.weight_bytes(1, context.kv_cache_dtype),
        experts=experts.count if experts else 0,
        expert_ffn=experts.ffn if experts else 0,
    )


def _times(context: LatencyContext) -> LayerTimes:
    table, model = _keys(context), context.model
    if table.compute == "profile":
        if not table.path:
            problem = 'compute = "profile" needs a bundle'
            raise InputError("config", None, "latency.path", problem)
        directory = find_bundle(
            table.path,
            hardware=table.hardware or context.gpu.name,
            model=model.name,
            variant=variant_name(
                sizes.activation_dtype(model, context.dtype), context.kv_cache_dtype
            ),
        )
        return BundleTimes(read_bundle(directory, context.tensor_parallel))
    backend = RooflineBackend(
        model,
        context.gpu,
        tp=context.tensor_parallel,
        ep=context.expert_parallel,
        dtype=context.dtype,
        kv_cache_dtype=context.kv_cache_dtype,
        kernels=scaled(
            context.kernels.coefficients(context.gpu),
            table.compute_efficiency,
            table.memory_efficiency,
        ),
        collective_ns=_no_collectives,
        round_tokens_to=table.round_tokens_to,
    )
    return RooflineTimes(backend, model)


def _no_collectives(kind: str, size_bytes: int, ranks: int) -> int:
    """Collectives are nodes of the graphs here."""
    return 0


def _calculator(
    context: LatencyContext, network: CollectiveSystem, memories: Memories
) -> Calculates | None:
    table = _keys(context)
    if not table.binary or table.replay:
        return None
    found = shutil.which(table.binary)
    if found is None:
        problem = f"no program that may be run: {table.binary}"
        raise InputError(context.source, None, "latency.binary", problem)
    binary = Path(found).absolute()
    npus = 1
    for dim in network.dims:
        npus *= dim.npus
    if table.dialect != "oneshot":
        setup = input_setup(network, memories)
        return Calculator(binary, setup, npus, dialect=table.dialect, timeout_s=table.timeout_s)
    setup = input_setup(network, memories, "upstream")
    kept = [dim.npus > 1 for dim in network.dims]
    return OneShotCalculator(binary, setup, max(2, npus), kept=kept, timeout_s=table.timeout_s)


def input_setup(
    network: CollectiveSystem, memories: Memories, dialect: Dialect = "fork"
) -> InputSetup:
    """What a program's input files say."""
    if dialect == "fork":
        return InputSetup(network=network, memories=memories)
    # The published program takes no dimension of one NPU; a lone NPU is given a neighbor.
    kept = [index for index, dim in enumerate(network.dims) if dim.npus > 1]
    dims = tuple(network.dims[index] for index in kept)
    if not dims:
        kept, dims = [0], (msgspec.structs.replace(network.dims[0], npus=2),)
    algorithms = tuple(network.algorithm(index) for index in kept)
    system = msgspec.structs.replace(network, dims=dims, algorithms=algorithms)
    return InputSetup(network=system, memories=memories, dialect="upstream")


def _store(
    context: LatencyContext, setup: TraceSetup, network: CollectiveSystem, memories: Memories
) -> CountStore | None:
    table = _keys(context)
    path = table.replay or table.cache
    if not path:
        return None
    system = fingerprint(
        setup,
        network,
        memories,
        context.gpu,
        {
            "model": context.model.name,
            "dtype": [context.dtype, context.kv_cache_dtype],
            "compute": [table.compute, table.path, table.hardware, table.round_tokens_to],
            "efficiency": [table.compute_efficiency, table.memory_efficiency],
            "routing": [table.expert_routing, context.seed],
            "faithful": table.faithful,
        },
    )
    return CountStore(Path(path), system, must_exist=bool(table.replay))
