"""The roofline of a kind of replica, from what its backend is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.config.schema import RooflineTable
from emu.latency.coefficients import kernels_of, scaled
from emu.latency.context import LatencyContext, engine_collectives, engine_steps
from emu.latency.roofline import RooflineBackend

if TYPE_CHECKING:
    from emu.latency.moe_gate import Gate


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
        kernels=scaled(kernels_of(context.gpu), table.compute_efficiency, table.memory_efficiency),
        gate=expert_gate(context, max(1, context.expert_parallel)),
        engine=engine_steps(context) if has_engine else None,
        is_warm=table.warm_up,
        collective_ns=engine_collectives(context),
        round_tokens_to=table.round_tokens_to,
    )
