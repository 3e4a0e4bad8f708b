"""Builds the actors of a run from its plan: replicas, the groups they form, what moves their KV.

Runs once, before the clock does. What the actors share (kernel, network, queue, tiers) has been
made by the cluster, which owns them and the actors too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from emu.autoscale.actions import Action, words
from emu.catalogue import sizes
from emu.catalogue.lookup import lookup_gpu
from emu.cluster.backends import SharedBackends, tower_costs
from emu.cluster.gateway import Dispatch
from emu.cluster.plan import Place, Plan, ReplicaPlan, groups_of, plugins_of, tier_place, tier_users
from emu.config.names import is_import_path
from emu.config.schema import VllmTable
from emu.kernel.clock import Actor, Kernel
from emu.kv.tiers import LowerTier, chunk_tokens_for
from emu.latency.base import LatencyBackend
from emu.latency.context import engine_of
from emu.latency.engine_steps import Intake, OutputStream
from emu.network.carrier import Carrier
from emu.network.placement import Grid
from emu.plugins import make_plugin
from emu.replica.ports import Observers
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.table import HANDLERS
from emu.replica.tiering import TierTraffic
from emu.replica.wave import GRAPH_TOKENS_MAX, WaveGroup
from emu.request import Request
from emu.routing.policies import make_router
from emu.scheduling.base import ReplicaLimits, Scheduler
from emu.scheduling.fcfs import PrefillQueue
from emu.scheduling.registry import make_scheduler
from emu.units import GIB, gbps_to_bytes_per_s, ms_to_ns, s_to_ns

if TYPE_CHECKING:
    from emu.autoscale.kv_reject import KvRejecter
    from emu.autoscale.planner import Demand
    from emu.autoscale.scaler import Scaler
    from emu.autoscale.snapshot import Snapshot
    from emu.cluster.insight import Insight
    from emu.config.schema import Config
    from emu.faults.injector import Handler
    from emu.latency.features import EncoderFleet
    from emu.migration.live import LiveMigrator, LiveWorld
    from emu.migration.watcher import MigrationWorld, OnTaken, Watcher
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
    plan: Plan, kernel: Kernel, replicas: Sequence[Replica], watchers: Mapping[int, Watcher]
) -> Insight | None:
    """What policies of a user's own see; None in a run without any."""
    if not any(True for _ in plugins_of(plan.config, plan.replicas)):
        return None
    from emu.cluster.insight import Insight

    return Insight(plan.config, kernel, replicas, watchers)


def build_queue(plan: Plan, served: str) -> PrefillQueue | None:
    """The one queue that all prefill replicas of a model pull from, with the fcfs policy."""
    its = [r for r in plan.replicas if r.served == served]
    is_fcfs = any(r.scheduler.policy == "fcfs" for r in its)
    has_roles = not any(r.role == "colocated" for r in its)
    scaling = plan.config.autoscale
    if scaling is not None and scaling.planner == "hpa":
        has_roles = False  # also where no replica is there at the start: it loads colocated ones
    return PrefillQueue() if is_fcfs and has_roles else None


def build_dispatch(
    shared: Shared,
    members: Sequence[Replica],
    actors: Sequence[Actor],
    queue: PrefillQueue | None,
    *,
    match: Callable[[int, Request], int],
    holds_adapter: Callable[[int, Request], bool],
) -> Dispatch:
    """Routing of one model's requests. `actors`: of all replicas."""
    config, insight = shared.plan.config, shared.insight
    plans = [shared.plan.replicas[replica.replica_id] for replica in members]
    served = plans[0].served
    limits = {model.label: model.max_outstanding for model in config.models}
    return Dispatch(
        shared.kernel,
        make_router(
            config.router.policy,
            seed=config.seed,
            pool="prefill" if members[0].model == 0 else f"prefill of {served}",
            match=match,
            holds_adapter=holds_adapter,
            own=make_plugin if insight is None else insight.make,
        ),
        members,
        actors,
        queue=queue,
        delay_ns=ms_to_ns(config.router.signal_delay_ms),
        max_model_tokens=max(r.max_model_tokens for r in plans),
        is_own=is_import_path(config.router.policy),
        outstanding_max=limits.get(served, 0),
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
    replica.board = board
    replica.peers = peers
    replica.model = shared.plan.models.index(plan.served)
    if plan.has_front_end and plan.engine is not None:
        replica.stream = OutputStream(plan.engine)
    if plan.latency.jitter:
        engine = engine_of(plan.latency)
        assert engine is not None  # the plan has looked
        from emu.latency.engine_steps import Jitter

        replica.set_jitter(Jitter(engine, config.seed, plan.replica_id))
    experts, gate = plan.model.experts, plan.latency.expert_routing
    if experts is not None and plan.latency.backend == "profile" and gate != "balanced":
        import numpy as np

        replica.expert_tokens = np.zeros(experts.count, dtype=np.int64)
        replica.meter()
    blocks = scheduler.block_pool
    if blocks is not None and blocks.tiers:
        replica.tier_traffic = TierTraffic(shared.network, plan.gpus, shared.tiers.kinds, blocks)
    if config.power is not None:
        replica.meter()
        replica.standby_limit_ns = s_to_ns(config.power.gpu_standby_s)
    replica.activation_token_bytes = plan.model.hidden * sizes.weight_bytes(
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


def build_encoders(plan: Plan) -> EncoderFleet | None:
    """Encoders of images on GPUs of their own, if there are any."""
    table = plan.config.encoders
    if table is None:
        return None
    from emu.latency.features import EncoderFleet, embedding_bytes

    first = plan.replicas[0]
    gpu = lookup_gpu(table.gpu) if table.gpu else first.gpu
    context = msgspec.structs.replace(
        first.latency_context(plan.config), gpu=gpu, tensor_parallel=1, expert_parallel=1
    )
    return EncoderFleet(
        tower_costs(context),
        table.count,
        cache_tokens=table.cache_tokens,
        token_bytes=embedding_bytes(first.model),
        bytes_per_s=gbps_to_bytes_per_s(table.nic_gbps or first.node.nic_gbps),
        latency_ns=round(first.node.nic_latency_us * 1000),
    )


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
    eviction = None
    if insight is not None and is_import_path(getattr(table, "eviction", "")):
        eviction = insight.eviction(getattr(table, "eviction", ""), plan.replica_id)
    # Which blocks are kept back changes between the steps of a leap.
    keeps_back = isinstance(table, VllmTable) and table.retain_s > 0
    must_step = latency.foreign or keeps_back
    limits = ReplicaLimits(
        num_blocks=plan.num_blocks,
        block_size=table.block_size,
        max_model_tokens=plan.max_model_tokens,
        pipeline_stages=plan.pipeline_parallel,
        prefix_caching=table.caches_prefixes and has_prefixes,
        leap=not must_step and (table.leap if leap is None else leap),
        kv_layout=plan.kv_layout,
        prompts_present=config.workload.skip_prefill,
    )
    return make_scheduler(
        table,
        limits,
        queue=queue,
        preemptions_max=config.limits.preemptions_per_request,
        tiers=shared.tiers.of(plan),
        ahead=plan.schedules_ahead,
        seed=config.seed,
        own=None if insight is None else partial(insight.make, replica_id=plan.replica_id),
        eviction=eviction,
        encodes=not plan.encodes_apart,
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


def _oddities(config: Config, model_name: str) -> Sequence[str]:
    """`autoscale.faithful` of a model."""
    for model in config.models:
        if model.label == model_name and "faithful" in model.autoscale:
            named: Sequence[str] = model.autoscale["faithful"]
            return named
    return () if config.autoscale is None else config.autoscale.faithful


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
    from emu.migration.outbound import Kv
    from emu.migration.watcher import Destinations, Watcher, name_of

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
            holds_halves="split_lock" in _oddities(config, plan.served),
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
    members: Sequence[Replica],
    *,
    on_capacity: Callable[[Replica], None],
    on_changed: Callable[[Replica, bool], None],
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
