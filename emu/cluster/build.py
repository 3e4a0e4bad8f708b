"""Builds the actors of a run from its plan: replicas, groups, what moves KV, loops of autoscaling.

Runs once, before the clock does. What the actors share (kernel, network, queue, tiers) has been
made by the cluster, which owns them and the actors too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from emu.autoscale.demand import Rates
from emu.autoscale.host_cache import HostCache, HostMemory
from emu.autoscale.loader import Weights
from emu.autoscale.orders import Action, words
from emu.autoscale.ports import ScalerWorld
from emu.autoscale.scaler import Scaler
from emu.autoscale.snapshot import Site
from emu.catalogue import sizes
from emu.cluster.backends import SharedBackends
from emu.cluster.gateway import Dispatch
from emu.cluster.plan import (
    Place,
    Plan,
    ReplicaPlan,
    groups_of,
    override,
    plugins_of,
    tier_place,
    tier_users,
)
from emu.config.names import is_import_path
from emu.config.schema import AutoscaleTable
from emu.errors import InvariantViolation
from emu.kernel.clock import Actor, Kernel
from emu.kv.tiers import LowerTier, chunk_tokens_for
from emu.latency.abilities import abilities_of
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.front_end import Intake, OutputStream
from emu.network.carrier import Carrier
from emu.network.grids import Grid
from emu.network.topology import Topology
from emu.plugins import make_plugin
from emu.replica.ports import Observers
from emu.replica.prerequisites import TierTraffic
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.table import HANDLERS
from emu.replica.view import ReplicaHandle
from emu.replica.wave import GRAPH_TOKENS_MAX, WaveGroup
from emu.request import Request
from emu.routing.policies import make_router
from emu.scheduling.base import ReplicaLimits, Scheduler
from emu.scheduling.fcfs import PrefillQueue, can_relay
from emu.scheduling.registry import make_scheduler
from emu.units import GIB, ms_to_ns, s_to_ns

if TYPE_CHECKING:
    from emu.autoscale.demand import Demand
    from emu.autoscale.kv_reject import KvRejecter
    from emu.autoscale.snapshot import Snapshot
    from emu.cluster.insight import Insight
    from emu.config.schema import Config
    from emu.faults.injector import Handler
    from emu.features.base import Column, Door
    from emu.migration.destinations import OnTaken
    from emu.migration.live import LiveMigrator, LiveWorld
    from emu.migration.ports import MigrationWorld
    from emu.migration.watcher import Watcher
    from emu.report.history import History


# --------------------------------------------------------------------------------------------------
# Which replica has which KV tiers: host memory and CXL, private or shared.
#
# Owns the sizes. A tier of `cpu` is a machine's host memory (or the part that `cpu_tier_gib`
# names); `cxl` is the CXL memory reachable from it. Shared (`network.tier_shared`), all replicas of
# a machine see one pool; for CXL, all replicas of all machines that name the same pool. Private,
# they divide it evenly. (LLMServingSim gives each instance the whole capacity: LLMServingSim 2.0,
# defect 7.)


class TierBook:
    """The tiers of a cluster, made once, handed out by replica."""

    def __init__(self, plan: Plan) -> None:
        network = plan.config.network
        self.kinds: tuple[str, ...] = tuple(network.tiers)
        self._network = network
        self._users = tier_users(network, plan.replicas)
        self._pools: dict[Place, LowerTier] = {}
        self._at: dict[Place, list[LowerTier]] = {}
        """All tiers of a place, each once."""

    def lose(self, kind: str, machine: int) -> list[int]:
        """The memory or CXL pool of a machine loses its KV (a fault); replicas that had a part."""
        places = [
            place
            for place, users in self._users.items()
            if place[0] == kind and any(user.machine == machine for user in users)
        ]
        for place in places:
            for tier in self._at[place]:
                tier.clear()
        return sorted(user.replica_id for place in places for user in self._users[place])

    def of(self, replica: ReplicaPlan) -> Sequence[LowerTier]:
        """The tiers behind a replica's GPU pool, nearest first."""
        return [self._tier(kind, replica) for kind in self.kinds]

    def _tier(self, kind: str, replica: ReplicaPlan) -> LowerTier:
        network, place = self._network, tier_place(kind, replica)
        node = replica.node
        gib = node.cxl_gib
        if kind == "cpu":
            gib = min(network.cpu_tier_gib or node.host_memory_gib, node.host_memory_gib)
        if network.tier_shared and place in self._pools:
            return self._pools[place]
        sharers = 1 if network.tier_shared else len(self._users[place])
        tier = LowerTier(
            kind,
            capacity_bytes=int(gib * GIB) // sharers,
            chunk_tokens=chunk_tokens_for(replica.scheduler.block_size, network.tier_block_tokens),
            bytes_per_token=replica.kv_bytes_per_token,
            shared=network.tier_shared,
        )
        if network.tier_shared:
            self._pools[place] = tier
        self._at.setdefault(place, []).append(tier)
        return tier


# --- Builds the actors of a run from its plan -----------------------------------------------------

S = ReplicaState
_START: Final = {
    "colocated": S.COLOCATED,
    "prefill": S.PREFILL,
    "decode": S.DECODE,
    "inactive": S.INACTIVE,
}


class Shared(NamedTuple):
    """What the actors of a run share: made by the cluster, which owns it."""

    plan: Plan
    kernel: Kernel
    network: Carrier
    backends: SharedBackends
    tiers: TierBook
    observers: Observers
    insight: Insight | None


def build_insight(
    plan: Plan, kernel: Kernel, replicas: Sequence[ReplicaHandle], watchers: Mapping[int, Watcher]
) -> Insight | None:
    """What policies of a user's own see; None in a run without any."""
    if not any(True for _ in plugins_of(plan.config, plan.replicas)):
        return None
    from emu.cluster.insight import Insight

    return Insight(plan.config, kernel, replicas, watchers)


def build_queue(plan: Plan, served: str) -> PrefillQueue | None:
    """The one queue that all prefill replicas of a model pull from, with the fcfs policy."""
    its = plan.replicas_of_models[served]
    is_fcfs = any(r.scheduler.policy == "fcfs" for r in its)
    has_roles = not any(r.role == "colocated" for r in its)
    scaling = plan.config.autoscale
    if scaling is not None and scaling.planner == "hpa":
        has_roles = False  # also where no replica is there at the start: it loads colocated ones
    return PrefillQueue() if is_fcfs and has_roles else None


def build_dispatch(
    shared: Shared,
    members: Sequence[ReplicaHandle],
    actors: Sequence[Actor],
    queue: PrefillQueue | None,
    *,
    match: Callable[[int, Request], int],
    holds: Callable[[int, Request], bool],
) -> Dispatch:
    """Routing of one model's requests. `actors`: of all replicas."""
    config, insight = shared.plan.config, shared.insight
    plans = [shared.plan.replicas[replica.replica_id] for replica in members]
    served = plans[0].served
    _, table = shared.plan.tables_of_models.get(served, (0, None))
    return Dispatch(
        shared.kernel,
        make_router(
            config.router.policy,
            seed=config.seed,
            pool="prefill" if members[0].model == 0 else f"prefill of {served}",
            match=match,
            holds=holds,
            own=make_plugin if insight is None else insight.make,
            look=None if insight is None else insight.look,
        ),
        members,
        actors,
        queue=queue,
        delay_ns=ms_to_ns(config.router.signal_delay_ms),
        max_model_tokens=max(r.max_model_tokens for r in plans),
        outstanding_max=0 if table is None else table.max_outstanding,
    )


def build_replica(
    shared: Shared,
    plan: ReplicaPlan,
    *,
    board: RelayBoard,
    peers: Sequence[Replica],
    queue: PrefillQueue | None,
    has_prefixes: bool,
    leap: bool | None,
) -> Replica:
    """A replica with its scheduler and latency backend. `leap` overrides the configuration."""
    config = shared.plan.config
    latency = shared.backends.of(plan.latency_context(config))
    scheduler = _scheduler(shared, plan, latency, queue, has_prefixes=has_prefixes, leap=leap)
    name = f"replica {plan.replica_id}"
    replica = Replica(
        plan.replica_id,
        shared.kernel,
        shared.observers,
        scheduler,
        latency,
        HANDLERS,
        shared.kernel.lock(f"kv lock of {name}"),
        state=_START[plan.role],
        grid=Grid(plan.gpus, plan.tensor_parallel),
        machine=plan.machine,
        stages=plan.pipeline_parallel,
        layers=plan.model.layers,
    )
    replica.relaying.board = board
    replica.relaying.peers = peers
    replica.model = shared.plan.model_indices[plan.served]
    if plan.has_front_end and plan.engine is not None:
        replica.books.stream = OutputStream(plan.engine)
    if plan.latency.jitter:
        assert plan.bound is not None  # the plan has looked
        from emu.latency.jitter import Jitter

        replica.pace.set_jitter(Jitter(plan.bound.model, config.seed, plan.replica_id))
    experts, gate = plan.model.experts, plan.latency.expert_routing
    if experts is not None and plan.latency.backend == "profile" and gate != "balanced":
        import numpy as np

        replica.counters.expert_tokens = np.zeros(experts.count, dtype=np.int64)
        replica.meter()
    blocks = scheduler.block_pool
    if blocks is not None and blocks.tiers:
        replica.use_tiers(TierTraffic(shared.network, plan.gpus, shared.tiers.kinds, blocks))
    if config.power is not None:
        replica.meter()
        replica.counters.standby_limit_ns = s_to_ns(config.power.gpu_standby_s)
    replica.relaying.activation_token_bytes = plan.model.hidden * sizes.weight_bytes(
        1, sizes.activation_dtype(plan.model, plan.dtype)
    )
    return replica


def build_intake(shared: Shared) -> Intake | None:
    """The front ends that requests pass before they are routed."""
    replicas = shared.plan.replicas
    takers = [r for r in replicas if r.role in ("colocated", "prefill")] or replicas
    engines = {r.replica_id: r.engine for r in replicas if r.has_front_end}
    own = {replica_id: engine for replica_id, engine in engines.items() if engine is not None}
    models = [own[r.replica_id] for r in takers if r.replica_id in own]
    return Intake(models, own) if models and len(models) == len(takers) else None


def build_doors(plan: Plan) -> Sequence[Door]:
    """What requests pass at the gateway because of features."""
    doors = [feature.door(plan.config, plan.replicas) for feature in plan.features]
    return [door for door in doors if door is not None]


def build_columns(plan: Plan) -> Sequence[Column]:
    """What features add to `requests.csv`."""
    return [
        column
        for feature in plan.features
        for column in feature.columns(plan.config, plan.replicas)
    ]


def _scheduler(
    shared: Shared,
    plan: ReplicaPlan,
    latency: LatencyBackend,
    queue: PrefillQueue | None,
    *,
    has_prefixes: bool,
    leap: bool | None,
) -> Scheduler:
    table, insight, config = plan.scheduler, shared.insight, shared.plan.config
    own = make_plugin if insight is None else partial(insight.make, replica_id=plan.replica_id)
    parts = [
        part
        for feature in plan.features
        if (part := feature.scheduler_part(plan, config, own)) is not None
    ]
    must_step = latency.foreign or any(part.forbids_leap for part in parts)
    limits = ReplicaLimits(
        num_blocks=plan.num_blocks,
        block_size=table.block_size,
        max_model_tokens=plan.max_model_tokens,
        pipeline_stages=plan.pipeline_parallel,
        prefix_caching=table.caches_prefixes and has_prefixes,
        leap=not must_step and (table.leap if leap is None else leap),
        kv_layout=plan.kv_layout,
    )
    return make_scheduler(
        table,
        limits,
        queue=queue,
        preemptions_max=config.limits.preemptions_per_request,
        tiers=shared.tiers.of(plan),
        ahead=plan.schedules_ahead,
        own=own,
        parts=parts,
    )


def join_waves(plan: Plan, replicas: Sequence[Replica]) -> None:
    """Replicas of a data-parallel group start their iterations together."""
    for name, members in groups_of(plan.replicas).items():
        first = members[0]
        is_shared = first.model.experts is not None and first.expert_parallel > 1
        padded = 0
        if is_shared and first.latency.host_overhead and first.latency.backend == "profile":
            padded = min(GRAPH_TOKENS_MAX, 2 * first.scheduler.requests_max)
        wave = WaveGroup(name, shares_experts=is_shared, padded_tokens_max=padded)
        for member in members:
            wave.join(replicas[member.replica_id])


def decode_policy(config: Config) -> str:
    """Where KV goes. `first_free` empties replicas for a planner that can take them away."""
    if config.router.decode_policy != "auto":
        return config.router.decode_policy
    return "least_used" if config.autoscale is None else "first_free"


def _oddities(plan: Plan, model_name: str) -> Sequence[str]:
    """`autoscale.faithful` of a model."""
    _, model = plan.tables_of_models.get(model_name, (0, None))
    if model is not None and "faithful" in model.autoscale:
        named: Sequence[str] = model.autoscale["faithful"]
        return named
    return () if plan.config.autoscale is None else plan.config.autoscale.faithful


def _note_taken(
    kernel: Kernel,
    history: History,
    source: int,
    requests: Sequence[Request],
    uses: Sequence[tuple[int, int, int]],
    destination: int,
) -> None:
    history.taken(kernel.now_ns, source, requests, uses, destination)


def build_watchers(
    shared: Shared,
    replicas: Sequence[Replica],
    worlds: Sequence[MigrationWorld],
    history: History | None,
) -> dict[int, Watcher]:
    """The watchers that hand over prefilled KV, by the replica's id. `worlds`: of each model."""
    if all(plan.role == "colocated" for plan in shared.plan.replicas):
        return {}
    from emu.migration.destinations import Destinations
    from emu.migration.outbound import Kv
    from emu.migration.watcher import Watcher, name_of

    on_taken: OnTaken | None = None
    if history is not None and history.follows_steps:
        on_taken = partial(_note_taken, shared.kernel, history)
    plans, config, insight = shared.plan.replicas, shared.plan.config, shared.insight
    policy = decode_policy(config)
    own = see = None
    if insight is not None and is_import_path(policy):
        own, see = insight.placement(), insight.view
    watchers: dict[int, Watcher] = {}
    tables = [
        {
            (plan.scheduler.policy, plan.scheduler.block_size)
            for plan in (plans[r.replica_id] for r in world.members)
        }
        for world in worlds
    ]
    holds_halves = ["split_lock" in _oddities(shared.plan, name) for name in shared.plan.models]
    for replica, plan in zip(replicas, plans, strict=True):
        if plan.role == "colocated":
            continue
        world = worlds[replica.model]
        search = Destinations(
            replica,
            world,
            holder=name_of(replica.replica_id),
            policy=policy,
            are_alike=len(tables[replica.model]) == 1,
            own=own,
            see=see,
            on_taken=on_taken,
        )
        kv = Kv(
            block_size=plan.scheduler.block_size,
            bytes_per_token=plan.kv_bytes_per_token,
            layerwise=config.network.kv_transfer == "layerwise",
            connector_ns=round(config.network.connector_us * 1000),
            connector_block_ns=round(config.network.connector_block_us * 1000),
            has_first_token=config.network.first_token == "decode",
            holds_halves=holds_halves[replica.model],
        )
        watcher = Watcher(
            replica,
            world,
            search,
            kv,
            layers=plan.model.layers,
            attempts_max=config.recovery.max_retries,
            lease_ns=ms_to_ns(config.recovery.lease_ms),
        )
        replica.connect(watcher)
        watchers[replica.replica_id] = watcher
    return watchers


def fault_handlers() -> Mapping[str, Handler]:
    """What each kind of fault does; loaded by the first one that strikes."""
    from emu.faults.handlers import HANDLERS

    return HANDLERS


def build_live(shared: Shared, world: LiveWorld) -> LiveMigrator | None:
    """The actor that moves running requests, if there is one."""
    table, insight = shared.plan.config.migration, shared.insight
    if not (table.rebalance or table.drain):
        return None
    from emu.migration.live import LiveMigrator

    replicas = shared.plan.replicas
    decoding = next((r for r in replicas if r.role == "decode"), replicas[0])
    return LiveMigrator(
        world,
        table,
        block_size=decoding.scheduler.block_size,
        kv_bytes_per_token=decoding.kv_bytes_per_token,
        own=insight.migration() if insight is not None and is_import_path(table.policy) else None,
        see=None if insight is None else insight.view,
    )


def build_rejecter(
    shared: Shared,
    members: Sequence[ReplicaHandle],
    *,
    on_capacity: Callable[[ReplicaHandle], None],
    on_changed: Callable[[ReplicaHandle, bool], None],
) -> KvRejecter | None:
    """The actor that keeps KV from replicas that are far fuller than the rest, if there is one."""
    table = shared.plan.config.kv_reject
    if table is None or not table.enabled:
        return None
    from emu.autoscale.kv_reject import KvRejecter

    return KvRejecter(shared.kernel, members, table, on_capacity=on_capacity, on_changed=on_changed)


def tell_decisions(
    history: History,
    kernel: Kernel,
    scalers: Sequence[Scaler],
    rejecters: Sequence[KvRejecter | None],
    live: LiveMigrator | None,
) -> None:
    """Planners, KV rejection and rebalancing tell the history what they see and decide."""

    def look(planner: str, seen: Snapshot, wanted: Demand, actions: Sequence[Action]) -> None:
        history.look(kernel.now_ns, planner, seen, wanted, map(words, actions))

    for scaler in scalers:
        scaler.tell_looks(look)
    for rejecter in rejecters:
        if rejecter is not None:
            rejecter.tell_uses(lambda uses, held: history.uses(kernel.now_ns, uses, held))
    if live is not None:
        live.tell_choices(
            lambda request, source, destination: history.choice(
                kernel.now_ns, request, source, destination
            )
        )


# --------------------------------------------------------------------------------------------------
# The control loops of autoscaling: sites, weights, rates, and GPUs that replicas take turns on.
#
# The rates that the planner's equations need (how fast a replica prefills, how fast KV reaches a
# decode replica) come from the latency backend and the links where the configuration gives none.


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


def rates_of(plan: ReplicaPlan, table: AutoscaleTable, replica: ReplicaHandle, site: Site) -> Rates:
    """Rp and Rt of section 6.2."""
    prefill = table.tokens_prefilled_per_s
    if prefill == 0:
        tokens = min(_REFERENCE_PREFILL_TOKENS, plan.max_model_tokens)
        backend = replica.latency
        # A real process is not asked before the run, and stored counts know only its batches.
        if backend.foreign or abilities_of(backend).replays:
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
        machines = [self._sites[replica.replica_id].machine for replica in members]
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


class GpuSharing:
    """Books of shared GPUs."""

    def __init__(
        self,
        plan: Plan,
        replicas: Sequence[ReplicaHandle],
        members: Sequence[Sequence[ReplicaHandle]],
        scalers: Sequence[Scaler],
        outstanding: Callable[[int], int],
    ) -> None:
        """`members`: the replicas of each model; `scalers`: of each model, made later.
        `outstanding`: requests of a model."""
        self.version = 0
        self._models = plan.models
        self._replicas = replicas
        self._members = members
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

    def is_free(self, replica: ReplicaHandle) -> bool:
        """No other replica is on its GPUs, and no model without any is to get them first."""
        if replica.replica_id not in self._shared:
            return True
        if self._starving and replica.model not in self._starving:
            return False
        own, owner = replica.replica_id, self._owner
        return all(owner.get(gpu, own) == own for gpu in replica.gpus)

    def on_moved(self, replica: ReplicaHandle, before: ReplicaState) -> None:
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

    def _take(self, replica: ReplicaHandle) -> None:
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
        has_none = all(r.state in (S.INACTIVE, S.FAILED) for r in self._members[asking])
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
            for replica in self._members[model]
            if scaler.may_drop(replica)
        ]
        name = self._models[asking]
        for _, replica_id, scaler in sorted(spares, key=lambda spare: spare[:2])[:replicas]:
            scaler.drop(self._replicas[replica_id], f"{name} needs its GPUs")
        if len(spares) >= replicas or not has_none:
            return
        loads = [
            (self._outstanding(model) / len(self._members[model]), model, scaler)
            for model, scaler in others
            if scaler.can_spare()
        ]
        if loads and not any(scaler.is_yielding for _, scaler in others):
            min(loads, key=lambda load: load[:2])[2].yield_one(name)
