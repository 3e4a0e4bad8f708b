"""The control loops of autoscaling, built from a plan: sites, weights, rates, memory for weights.

The rates that the planner's equations need (how fast a replica prefills, how fast KV reaches a
decode replica) come from the latency backend and the links where the configuration gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from emu.autoscale.demand import Rates
from emu.autoscale.host_cache import HostCache, HostMemory
from emu.autoscale.loader import Weights
from emu.autoscale.ports import ScalerWorld
from emu.autoscale.scaler import Scaler
from emu.autoscale.snapshot import Site
from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan
from emu.cluster.replica_group import override, weights_ep
from emu.config.schema import AutoscaleTable, BlitzTable, CarriedTable
from emu.latency.abilities import abilities_of
from emu.latency.base import BatchShape
from emu.network.grids import Grid
from emu.network.topology import Topology
from emu.replica.replica import Replica
from emu.replica.view import ReplicaHandle
from emu.scheduling.layer_batches import can_relay
from emu.units import GIB

_REFERENCE_PREFILL_TOKENS: Final = 2048
Made = TypeVar("Made")
STATIC: Final = BlitzTable(executor="none")


def weights_of(plan: ReplicaPlan) -> Weights:
    """What a replica has to load, GPU by GPU."""
    tp, pp = plan.tensor_parallel, plan.pipeline_parallel
    ep = weights_ep(plan.experts, plan.expert_parallel)
    stages = sizes.stage_weight_bytes(plan.model, tp, pp, ep, plan.dtype)
    segments = sizes.weight_segments(plan.model, tp, ep, plan.dtype)
    if pp == 1:
        return Weights(Grid(plan.gpus, tp), segments, (sum(segments),) * tp)
    return Weights(Grid(plan.gpus, tp), segments, tuple(s for s in stages for _ in range(tp)))


class EachMade(dict[int, Made]):
    """Something of each replica, by its id, made when it is first asked for: a cluster that does
    not scale needs none of it."""

    def __init__(self, make: Callable[[int], Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, replica_id: int) -> Made:
        made = self[replica_id] = self._make(replica_id)
        return made


def site_of(plan: ReplicaPlan, topology: Topology, replica: Replica) -> Site:
    """Where a replica is."""
    first = topology.gpus[plan.gpus[0]]
    return Site(
        replica_id=plan.replica_id,
        machine=plan.machine,
        domain=first.nvlink_domain,
        leaf=topology.machines[first.machine].leaf,
        nic_bytes_per_s=sum(
            topology.links.bytes_per_s(topology.gpus[gpu].nic_out) for gpu in plan.gpus
        ),
        has_nvlink=first.nvlink_out >= 0,
        can_go_live=can_relay(replica.scheduler) and plan.pipeline_parallel == 1,
    )


def rates_of(plan: ReplicaPlan, table: AutoscaleTable, replica: ReplicaHandle, site: Site) -> Rates:
    """Rp and Rt of section 6.2."""
    prefill = transfer = 0.0
    if isinstance(table, CarriedTable):
        prefill, transfer = table.tokens_prefilled_per_s, table.tokens_transferred_per_s
    if prefill == 0:
        tokens = min(_REFERENCE_PREFILL_TOKENS, plan.max_model_tokens)
        backend = replica.latency
        # A real process is not asked before the run, and stored counts know only its batches.
        if backend.foreign or abilities_of(backend).replays:
            prefill = 10_000.0
        else:
            shape = BatchShape(prefill_new=[tokens], prefill_context=[0], sequences=1)
            prefill = tokens / (replica.latency.iteration_ns(shape) / 1e9)
    return Rates(prefill, transfer or site.nic_bytes_per_s / plan.kv_bytes_per_token)


def make_memory(plan: Plan) -> HostMemory:
    """Memory for weights: without a limit with one model, unless the configuration gives one."""
    table = plan.config.autoscale or STATIC
    if len(plan.models) == 1 and not table.host_cache_gib:
        return HostMemory({})
    limits: dict[int, int] = {}
    for machine in plan.topology.machines:
        gib = table.host_cache_gib or plan.config.nodes[machine.table].host_memory_gib
        limits[machine.index] = int(gib * GIB)
    return HostMemory(limits, table.host_cache_eviction)


class Scalers:
    """Makes the control loop of each model; what they share is made once."""

    def __init__(
        self, plan: Plan, replicas: Sequence[Replica], own: Callable[..., Any] | None = None
    ) -> None:
        """`own`: makes a planner of a user's own."""
        self._own = own
        self._plan = plan
        self._memory = make_memory(plan)
        self._sites = EachMade(lambda at: site_of(plan.replicas[at], plan.topology, replicas[at]))
        self._weights = EachMade(self._weigh)
        self._of_tables: dict[int, Weights] = {}

    def make(self, worlds: Sequence[ScalerWorld]) -> list[Scaler]:
        """The loop of each model (without autoscaling: what loads weights by manual command)."""
        caches = [self._cache(world.members) for world in worlds]
        self._memory.place_pool()
        return [self._scaler(world, cache) for world, cache in zip(worlds, caches, strict=True)]

    def _weigh(self, replica_id: int) -> Weights:
        """Its weights; replicas of one table are weighed once."""
        plan = self._plan.replicas[replica_id]
        known = self._of_tables.get(plan.group)
        if known is None:
            known = self._of_tables[plan.group] = weights_of(plan)
        return msgspec.structs.replace(known, grid=Grid(plan.gpus, plan.tensor_parallel))

    def _table(self, model_name: str) -> AutoscaleTable:
        """[autoscale] with what the model overrides."""
        table = self._plan.config.autoscale or STATIC
        index, model = self._plan.tables_of_models.get(model_name, (0, None))
        if model is None:
            return table
        where = f"models.{index}.autoscale"
        changed: AutoscaleTable = override(table, model.autoscale, where, "config")
        return changed

    def _cache(self, members: Sequence[ReplicaHandle]) -> HostCache:
        first = members[0].replica_id
        name, weights = self._plan.replicas[first].served, self._weights[first]
        machines = [self._plan.replicas[replica.replica_id].machine for replica in members]
        _, model = self._plan.tables_of_models.get(name, (0, None))
        return HostCache(
            self._table(name),
            machines,
            sum(weights.segments) * weights.grid.tensor_parallel,
            memory=self._memory,
            is_pinned=model is not None and model.pinned,
        )

    def _scaler(self, world: ScalerWorld, cache: HostCache) -> Scaler:
        plan, first = self._plan, world.members[0]
        its_plan = plan.replicas[first.replica_id]
        table = _with_start(self._table(its_plan.served), its_plan)
        config = plan.config
        return Scaler(
            world,
            table,
            rates=rates_of(its_plan, table, first, self._sites[first.replica_id]),
            sites=self._sites,
            weights=self._weights,
            topology=plan.topology,
            block_tokens=its_plan.scheduler.block_size,
            cache=cache,
            name="planner" if world.is_only else f"planner of {its_plan.served}",
            load_deadline_ns=config.recovery.load_deadline_ns(has_faults=bool(config.faults)),
            own=self._own,
        )


def _with_start(table: AutoscaleTable, replica: ReplicaPlan) -> AutoscaleTable:
    """A negative `cold_start_s` is the engine's own start, by phases."""
    if table.cold_start_s >= 0:
        return table
    from emu.cluster.start_up import start_up_of  # most starts are given, or none

    found = start_up_of(replica)
    seconds = 0.0 if found is None else found.total_s
    return msgspec.structs.replace(table, cold_start_s=seconds)
