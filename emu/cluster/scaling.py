"""Builds the control loop of autoscaling from a plan: sites, weights, rates.

The rates that the planner's equations need (how fast a replica prefills, how fast KV reaches a
decode replica) come from the latency backend and the links where the configuration gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from emu.autoscale.loads import HostCache, HostMemory, Weights
from emu.autoscale.planner import Rates
from emu.autoscale.scaler import Scaler, ScalerWorld
from emu.autoscale.snapshot import Site
from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan, override
from emu.config.schema import AutoscaleTable
from emu.errors import InvariantViolation
from emu.latency.base import BatchShape
from emu.network.placement import Grid
from emu.network.topology import Topology
from emu.plugins import make_plugin
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.scheduling.layerwise import can_relay
from emu.units import GIB

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
        self, plan: Plan, replicas: Sequence[Replica], own: Callable[..., Any] = make_plugin
    ) -> None:
        """`own`: makes a planner of a user's own."""
        self._own = own
        self._plan = plan
        self._memory = make_memory(plan)
        self._sites = [
            site_of(its_plan, plan.topology, replica)
            for its_plan, replica in zip(plan.replicas, replicas, strict=True)
        ]
        self._weights = weights_of_all(plan.replicas)

    def make(self, worlds: Sequence[ScalerWorld]) -> list[Scaler]:
        """The loop of each model (without autoscaling: what loads weights by manual command)."""
        caches = [self._cache(world.members) for world in worlds]
        self._memory.place_pool()
        return [self._scaler(world, cache) for world, cache in zip(worlds, caches, strict=True)]

    def _table(self, model_name: str) -> AutoscaleTable:
        """[autoscale] with what the model overrides."""
        config = self._plan.config
        table = config.autoscale or STATIC
        for index, model in enumerate(config.models):
            if model.label == model_name:
                where = f"models.{index}.autoscale"
                changed: AutoscaleTable = override(table, model.autoscale, where, "config")
                return changed
        return table

    def _cache(self, members: Sequence[Replica]) -> HostCache:
        first = members[0].replica_id
        name, weights = self._plan.replicas[first].served, self._weights[first]
        machines = [self._sites[replica.replica_id].machine for replica in members]
        pinned = {model.label for model in self._plan.config.models if model.pinned}
        return HostCache(
            self._table(name),
            machines,
            sum(weights.segments) * weights.grid.tensor_parallel,
            memory=self._memory,
            is_pinned=name in pinned,
        )

    def _scaler(self, world: ScalerWorld, cache: HostCache) -> Scaler:
        plan, first = self._plan, world.members[0]
        its_plan = plan.replicas[first.replica_id]
        table = self._table(its_plan.served)
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


# --------------------------------------------------------------------------------------------------
# GPUs that several models share: which replica has them now, and which gives way.
#
# A GPU belongs to one replica at a time: the one on it that is neither inactive nor failed. A model
# that lacks room asks for it. Spares of other models (weights loaded, nothing to do) leave at once,
# the one that became a spare first first. If the model has no replica at all, one replica of
# another model that has more than its minimum is to be shut: of the model that has the fewest
# requests for each of its replicas.

S = ReplicaState


class GpuSharing:
    """Books of shared GPUs."""

    def __init__(
        self,
        plan: Plan,
        replicas: Sequence[Replica],
        scalers: Sequence[Scaler],
        outstanding: Callable[[int], int],
    ) -> None:
        """`scalers`: of each model, made later. `outstanding`: requests of a model."""
        self.version = 0
        self._models = plan.models
        self._replicas = replicas
        self._scalers = scalers
        self._outstanding = outstanding
        self._shared = frozenset(r.replica_id for r in plan.replicas if r.shared)
        self._owner: dict[int, int] = {}
        """Replica by GPU."""
        self._starving: list[int] = []
        """Models that want replicas and have none."""
        for replica in replicas:
            if replica.replica_id in self._shared and replica.state is not S.INACTIVE:
                self._take(replica)

    def owner(self, gpu: int) -> int | None:
        """The replica that has a shared GPU now; None = no replica."""
        return self._owner.get(gpu)

    def is_free(self, replica: Replica) -> bool:
        """No other replica is on its GPUs, and no model without any is to get them first."""
        if replica.replica_id not in self._shared:
            return True
        if self._starving and replica.model not in self._starving:
            return False
        own, owner = replica.replica_id, self._owner
        return all(owner.get(gpu, own) == own for gpu in replica.gpus)

    def on_moved(self, replica: Replica, before: ReplicaState) -> None:
        """A replica has changed its state: its GPUs are taken, or free."""
        if replica.replica_id not in self._shared:
            return
        was_there = before not in (S.INACTIVE, S.FAILED)
        is_there = replica.state not in (S.INACTIVE, S.FAILED)
        if is_there and not was_there:
            self._take(replica)
        elif was_there and not is_there:
            for gpu in replica.gpus:
                del self._owner[gpu]
            self.version += 1
            for scaler in self._scalers:
                scaler.look()

    def _take(self, replica: Replica) -> None:
        for gpu in replica.gpus:
            if gpu in self._owner:
                raise InvariantViolation(
                    f"I14: GPU {gpu}: replicas {self._owner[gpu]} and {replica.replica_id}"
                )
            self._owner[gpu] = replica.replica_id
        self.version += 1

    def make_room(self, asking: int, replicas: int) -> None:
        """Spares of other models go; a model without any replica may ask for more.

        Until it has one, no other model that has replicas gets any GPU.
        `asking` is the index of the model.
        """
        has_none = all(r.state in (S.INACTIVE, S.FAILED) for r in self._members(asking))
        if replicas <= 0 or not has_none:
            if asking in self._starving:
                self._starving.remove(asking)
                self.version += 1
            if replicas <= 0:
                return
        elif asking not in self._starving:
            self._starving.append(asking)
            self.version += 1
        others = [(model, scaler) for model, scaler in enumerate(self._scalers) if model != asking]
        spares = [
            (scaler.shut_since_ns(replica), replica.replica_id, scaler)
            for model, scaler in others
            for replica in self._members(model)
            if scaler.may_drop(replica)
        ]
        name = self._models[asking]
        for _, replica_id, scaler in sorted(spares, key=lambda spare: spare[:2])[:replicas]:
            scaler.drop(self._replicas[replica_id], f"{name} needs its GPUs")
        if len(spares) >= replicas or not has_none:
            return
        loads = [
            (self._outstanding(model) / len(self._members(model)), model, scaler)
            for model, scaler in others
            if scaler.can_spare()
        ]
        if loads and not any(scaler.is_yielding for _, scaler in others):
            min(loads, key=lambda load: load[:2])[2].yield_one(name)

    def _members(self, model: int) -> list[Replica]:
        return [replica for replica in self._replicas if replica.model == model]
