"""Builds the control loop of autoscaling from a plan: sites, weights, rates.

The rates that the planner's equations need (how fast a replica prefills, how fast KV reaches a
decode replica) come from the latency backend and the links where the configuration gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from emu.autoscale.demand import Rates
from emu.autoscale.launch import ScalerWorld
from emu.autoscale.loads import Weights
from emu.autoscale.scaler import Scaler
from emu.autoscale.snapshot import Site
from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import AutoscaleTable
from emu.latency.base import BatchShape
from emu.network.placement import Grid
from emu.network.topology import Topology
from emu.plugins import make_plugin
from emu.replica.replica import Replica
from emu.scheduling.layerwise import can_relay

_REFERENCE_PREFILL_TOKENS: Final = 2048
STATIC: Final = AutoscaleTable(executor="none")


def weights_of(plan: ReplicaPlan) -> Weights:
    """What a replica has to load, GPU by GPU."""
    tp, pp = plan.tensor_parallel, plan.pipeline_parallel
    stages = sizes.stage_weight_bytes(plan.model, tp, pp, plan.expert_parallel, plan.dtype)
    segments = sizes.weight_segments(plan.model, tp, plan.expert_parallel, plan.dtype)
    if pp == 1:
        return Weights(Grid(plan.gpus, tp), segments, (sum(segments),) * tp)
    return Weights(Grid(plan.gpus, tp), segments, tuple(s for s in stages for _ in range(tp)))


def weights_of_all(plans: Sequence[ReplicaPlan]) -> list[Weights]:
    """`weights_of` each; replicas of one table are weighed once."""
    of_table: dict[int, Weights] = {}
    for plan in plans:
        if plan.group not in of_table:
            of_table[plan.group] = weights_of(plan)
    return [
        msgspec.structs.replace(of_table[plan.group], grid=Grid(plan.gpus, plan.tensor_parallel))
        for plan in plans
    ]


def site_of(plan: ReplicaPlan, topology: Topology, replica: Replica) -> Site:
    """Where a replica is."""
    first = topology.gpus[plan.gpus[0]]
    return Site(
        replica_id=plan.replica_id,
        machine=plan.machine,
        domain=first.nvlink_domain,
        leaf=topology.machines[first.machine].leaf,
        nic_bytes_per_s=sum(
            topology.links[topology.gpus[gpu].nic_out].bytes_per_s for gpu in plan.gpus
        ),
        has_nvlink=first.nvlink_out >= 0,
        can_go_live=can_relay(replica.scheduler) and plan.pipeline_parallel == 1,
    )


def rates_of(plan: ReplicaPlan, table: AutoscaleTable, replica: Replica, site: Site) -> Rates:
    """Rp and Rt of section 6.2."""
    prefill = table.tokens_prefilled_per_s
    if prefill == 0:
        tokens = min(_REFERENCE_PREFILL_TOKENS, plan.max_model_tokens)
        backend = replica.latency
        # A real process is not asked before the run, and stored counts know only its batches.
        if backend.foreign or getattr(backend, "replays", False):
            prefill = 10_000.0
        else:
            shape = BatchShape(prefill_new=[tokens], prefill_context=[0], sequences=1)
            prefill = tokens / (replica.latency.iteration_ns(shape) / 1e9)
    transfer = table.tokens_transferred_per_s or site.nic_bytes_per_s / plan.kv_bytes_per_token
    return Rates(prefill, transfer)


def make_scaler(
    world: ScalerWorld,
    plan: Plan,
    replicas: Sequence[Replica],
    own: Callable[..., Any] = make_plugin,
) -> Scaler:
    """The control loop (and, without autoscaling, whoever loads weights by manual command).

    `own`: makes a planner of a user's own.
    """
    config = plan.config
    table = config.autoscale or STATIC
    sites = [
        site_of(its_plan, plan.topology, replica)
        for its_plan, replica in zip(plan.replicas, replicas, strict=True)
    ]
    return Scaler(
        world,
        table,
        rates=rates_of(plan.replicas[0], table, replicas[0], sites[0]),
        sites=sites,
        weights=weights_of_all(plan.replicas),
        topology=plan.topology,
        block_tokens=plan.replicas[0].scheduler.block_size,
        load_deadline_s=config.recovery.load_deadline_s if config.faults else 0.0,
        own=own,
    )
