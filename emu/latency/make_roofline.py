"""The roofline of a replica, made from its context; and the engine's part of its steps.

It is made here and not in `emu/cluster/backends.py`, because features have layers of their own to
cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from emu.config.schema import AiconfiguratorTable, RooflineTable
from emu.latency.coefficients import Kernels, scaled
from emu.latency.collectives import engine_collectives
from emu.latency.context import LatencyContext
from emu.latency.engine_steps import EngineSteps
from emu.latency.sampling import resolve_sampling

if TYPE_CHECKING:  # a replica of one rank needs none of the formulas of collectives
    from emu.latency.abilities import FirstSize
    from emu.latency.eager import EagerCalls
    from emu.latency.engine import EngineModel
    from emu.latency.moe_gate import Gate
    from emu.latency.roofline import RooflineBackend


def host_calls(context: LatencyContext, engine: EngineModel) -> EagerCalls:
    """What the host calls in a step of a replica that is neither compiled nor captured."""
    from emu.latency.eager import eager_calls  # no server of vLLM's runs so by default

    model = context.model
    has_shared = model.experts is not None and bool(model.experts.shared_ffn)
    is_split = model.expert_dtype == "mxfp4" or has_shared or not engine.eager_experts_whole
    one_call = not is_split or context.gpu.architecture == "blackwell"
    return eager_calls(model, context.tensor_parallel, one_call=one_call)


def engine_steps(context: LatencyContext) -> EngineSteps | None:
    """The engine's part of a replica's steps; None = kernels alone."""
    table, model = context.table, context.engine
    if model is None:
        return None
    assert isinstance(table, RooflineTable | AiconfiguratorTable)
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
        eager=host_calls(context, model) if model.enforce_eager or not model.compiled else None,
        is_grouped=context.expert_parallel > context.tensor_parallel,
        hands_off=context.hands_off,
    )


def expert_gate(context: LatencyContext, ranks: int) -> Gate | None:
    """The gate that `latency.expert_routing` names; None if experts are chosen evenly."""
    experts = context.model.experts
    if experts is None or context.table.expert_routing == "balanced":
        return None
    from emu.latency.moe_gate import GateShape, make_gate

    shape = GateShape(experts.count, experts.per_token, ranks, context.seed)
    table = context.table
    return make_gate(table.expert_routing, shape, own=table.expert_routing_own)


def _changed(kernels: Kernels, table: RooflineTable) -> Kernels:
    """An engine's kernels as `[latency]` changes them."""
    found = scaled(kernels, table.compute_efficiency, table.memory_efficiency)
    return msgspec.structs.replace(
        found,
        marlin=table.mxfp4_experts == "marlin",
        cutlass=table.nvfp4_experts == "cutlass",
        generated=table.fp8_block_products == "flashinfer",
    )


def _fuses_shared(context: LatencyContext) -> bool:
    """Whether the shared expert runs in the kernels of the routed ones, which a rank has all of."""
    if context.shared_experts is not None or context.expert_parallel > 1:
        return False
    return context.kernels.fuses_shared(context.model, context.gpu.architecture)


def make_roofline(
    context: LatencyContext, table: RooflineTable, *, has_engine: bool = True
) -> RooflineBackend:
    """The roofline of a replica. `has_engine` False: its kernels alone."""
    from emu.latency.roofline import RooflineBackend  # other backends need none

    made: type[RooflineBackend] = RooflineBackend
    if context.model.special_layers:
        from emu.latency.mixed_roofline import MixedRooflineBackend

        made = MixedRooflineBackend
    kernels, routed = context.kernels.coefficients(context.gpu), None
    if context.shared_experts is not None:
        from emu.latency.experts.deepgemm import with_deepgemm
        from emu.latency.experts.routed import RoutedExperts

        routed = RoutedExperts(context, context.shared_experts)
        if context.shared_experts.is_exchange:
            kernels = with_deepgemm(kernels, context.gpu)
    engine = engine_steps(context) if has_engine else None
    compiled_later: tuple[FirstSize, ...] = ()
    if engine is not None and not table.warm_up:
        from emu.latency.first_sizes import first_sizes  # most servers are warm

        compiled_later = first_sizes(context, engine.graph_limit)
    return made(
        context.model,
        context.gpu,
        tp=context.tensor_parallel,
        pp=context.pipeline_parallel,
        ep=context.expert_parallel,
        dtype=context.dtype,
        kv_cache_dtype=context.kv_cache_dtype,
        kernels=_changed(kernels, table),
        routed=routed,
        gate=expert_gate(context, max(1, context.expert_parallel)),
        engine=engine,
        is_warm=table.warm_up,
        collective_ns=engine_collectives(context),
        round_tokens_to=table.round_tokens_to,
        fuses_shared=_fuses_shared(context),
        first_sizes=compiled_later,
    )
