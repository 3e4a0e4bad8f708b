"""Builds the actors of a run from its plan: replicas, groups, what moves KV, loops of autoscaling.

Runs once, before the clock does. What the actors share (kernel, network, queue, tiers) has been
made by the cluster, which owns them and the actors too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from emu.autoscale.orders import Action, words
from emu.autoscale.scaler import Scaler
from emu.catalogue import sizes
from emu.cluster.backends import SharedBackends
from emu.cluster.dispatch import Dispatch
from emu.cluster.plan import (
    Plan,
    ReplicaPlan,
    plugins_of,
)
from emu.cluster.tier_book import TierBook
from emu.config.schema import FcfsTable, HpaTable
from emu.kernel.clock import Actor, Kernel
from emu.kv.blocks import BlockPool
from emu.kv.grouped import GroupedPool
from emu.latency.abilities import Abilities, abilities_of
from emu.latency.base import LatencyBackend
from emu.latency.engine import EngineModel
from emu.latency.front_end import Intake, OutputStream
from emu.network.carrier import Carrier
from emu.network.grids import Grid
from emu.replica.ports import Observers
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.table import HANDLERS
from emu.replica.tier_traffic import TierTraffic
from emu.replica.view import ReplicaHandle
from emu.request import Request
from emu.routing.policies import make_router
from emu.routing.signal import Pool as RoutedPool
from emu.scheduling.base import ReplicaLimits, Scheduler
from emu.scheduling.fcfs import PrefillQueue
from emu.scheduling.registry import make_scheduler
from emu.units import ms_to_ns, s_to_ns

if TYPE_CHECKING:
    from emu.autoscale.demand import Demand
    from emu.autoscale.kv_reject import KvRejecter
    from emu.autoscale.snapshot import Snapshot
    from emu.cluster.own_policies import OwnPolicies
    from emu.faults.injector import Handler
    from emu.features.base import Column, Door
    from emu.migration.live import LiveMigrator
    from emu.migration.watcher import Watcher
    from emu.report.history import History

S = ReplicaState
_START: Final = {
    "colocated": S.COLOCATED,
    "prefill": S.PREFILL,
    "decode": S.DECODE,
    "inactive": S.INACTIVE,
}


class Shared(msgspec.Struct, frozen=True):
    """What the actors of a run share: made by the cluster, which owns it."""

    plan: Plan
    kernel: Kernel
    network: Carrier
    backends: SharedBackends
    tiers: TierBook
    observers: Observers
    own_policies: OwnPolicies | None
    has_prefixes: bool
    """Requests may share prefixes: caches are kept."""
    leap: bool | None
    """Overrides the configuration."""
    alike: dict[tuple[int, int], Alike]
    """By kind of replica (`Plan.kind_of`), of those that have been built."""


class Alike(msgspec.Struct, frozen=True):
    """What replicas of a kind have in common."""

    latency: LatencyBackend
    able: Abilities
    limits: Callable[..., ReplicaLimits]
    """Of one of them, by its id and whether it leaps."""
    front_end: EngineModel | None
    """The engine that clients reach through its API server."""
    activation_token_bytes: int


class Pool(Protocol):
    """What the replicas of one model share."""

    queue: PrefillQueue | None
    relay: RelayBoard
    members: list[ReplicaHandle]
    replicas: list[Replica]
    """Those of all models."""


def build_own_policies(
    plan: Plan, kernel: Kernel, replicas: Sequence[ReplicaHandle], watchers: Mapping[int, Watcher]
) -> OwnPolicies | None:
    """What policies of a user's own see; None in a run without any."""
    if not plugins_of(plan.config, plan.replicas):
        return None
    from emu.cluster.own_policies import OwnPolicies

    return OwnPolicies(plan.config, kernel, replicas, watchers)


def build_queue(plan: Plan, served: str) -> PrefillQueue | None:
    """The one queue that all prefill replicas of a model pull from, with the fcfs policy."""
    its = plan.replicas_of_models[served]
    is_fcfs = any(isinstance(r.scheduler, FcfsTable) for r in its)
    has_roles = not any(r.role == "colocated" for r in its)
    scaling = plan.config.autoscale
    if isinstance(scaling, HpaTable):
        has_roles = False  # also where no replica is there at the start: it loads colocated ones
    return PrefillQueue() if is_fcfs and has_roles else None


def build_dispatch(
    shared: Shared,
    pool: Pool,
    actors: Sequence[Actor],
    *,
    match: Callable[[int, Request], int],
    holds: Callable[[int, Request], bool],
) -> Dispatch:
    """Routing of one model's requests. `actors`: of all replicas."""
    config, policies = shared.plan.config, shared.own_policies
    members = pool.members
    plans = [shared.plan.replicas[replica.replica_id] for replica in members]
    served = plans[0].served
    _, table = shared.plan.tables_of_models.get(served, (0, None))
    return Dispatch(
        shared.kernel,
        make_router(
            config.router,
            RoutedPool(
                "prefill" if members[0].model == 0 else f"prefill of {served}",
                config.seed,
                match,
                holds,
            ),
            own=None if policies is None else policies.make,
            look=None if policies is None else policies.look,
        ),
        members,
        actors,
        queue=pool.queue,
        delay_ns=ms_to_ns(config.router.signal_delay_ms),
        max_model_tokens=max(r.max_model_tokens for r in plans),
        outstanding_max=0 if table is None else table.max_outstanding,
    )


def build_replica(shared: Shared, plan: ReplicaPlan, pool: Pool) -> Replica:
    """A replica with its scheduler and latency backend."""
    config, alike = shared.plan.config, _alike(shared, plan)
    latency = alike.latency
    scheduler = _scheduler(shared, plan, alike, pool.queue)
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
        able=alike.able,
    )
    replica.relaying.board = pool.relay
    replica.relaying.peers = pool.replicas
    replica.model = shared.plan.model_indices[plan.served]
    if alike.front_end is not None:
        replica.books.stream = OutputStream(alike.front_end, copies_ids=plan.pipeline_parallel == 1)
    if plan.latency.jitter:
        assert plan.bound is not None  # the plan has looked
        from emu.latency.jitter import Jitter

        replica.pace.set_jitter(Jitter(plan.bound.model, config.seed, plan.replica_id))
    experts, gate = plan.model.experts, plan.latency.expert_routing
    if experts is not None and gate != "balanced" and replica.pace.expert_loads is not None:
        import numpy as np

        replica.counters.expert_tokens = np.zeros(experts.count, dtype=np.int64)
        replica.meter()
    blocks = scheduler.ledger.pool
    if isinstance(blocks, BlockPool | GroupedPool) and blocks.tiers:
        replica.use_tiers(TierTraffic(shared.network, plan.gpus, shared.tiers.kinds, blocks))
    if config.power is not None:
        replica.meter()
        replica.counters.standby_limit_ns = s_to_ns(config.power.gpu_standby_s)
    replica.relaying.activation_token_bytes = alike.activation_token_bytes
    return replica


def _alike(shared: Shared, plan: ReplicaPlan) -> Alike:
    """What a replica shares with others of its kind, found for the first of them."""
    kind, config, table = shared.plan.kind_of(plan), shared.plan.config, plan.scheduler
    if kind not in shared.alike:
        limits = partial(
            ReplicaLimits,
            num_blocks=plan.num_blocks,
            block_size=table.block_size,
            max_model_tokens=plan.max_model_tokens,
            pipeline_stages=plan.pipeline_parallel,
            prefix_caching=table.caches_prefixes and shared.has_prefixes,
            kv_layout=plan.kv_layout,
            state_bytes=plan.state_bytes,
            hands_off=plan.role == "prefill",
            preemptions_max=config.limits.preemptions_per_request,
            forms_ahead=plan.schedules_ahead,
            members=_members(shared.plan, plan),
        )
        latency = shared.backends.of(plan.latency_context(config))
        token = sizes.weight_bytes(1, sizes.activation_dtype(plan.model, plan.dtype))
        able = abilities_of(latency)
        of_token = plan.model.hidden * token
        shared.alike[kind] = Alike(latency, able, limits, plan.front_end, of_token)
    return shared.alike[kind]


def _members(plan: Plan, replica: ReplicaPlan) -> int:
    """Replicas of its group, or 1."""
    name = replica.data_parallel_group
    return sum(one.data_parallel_group == name for one in plan.replicas) if name else 1


def build_intake(plan: Plan) -> Intake | None:
    """The front ends that requests pass before they are routed."""
    replicas = plan.replicas
    takers = [r for r in replicas if r.role in ("colocated", "prefill")] or replicas
    of_kind: dict[tuple[int, int], EngineModel | None] = {}
    own: dict[int, EngineModel] = {}
    for replica in replicas:
        kind = plan.kind_of(replica)
        if kind not in of_kind:
            of_kind[kind] = replica.front_end
        engine = of_kind[kind]
        if engine is not None:
            own[replica.replica_id] = engine
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
    shared: Shared, plan: ReplicaPlan, alike: Alike, queue: PrefillQueue | None
) -> Scheduler:
    table, config = plan.scheduler, shared.plan.config
    policies = shared.own_policies
    own = None if policies is None else partial(policies.make, replica_id=plan.replica_id)
    leap = table.leap if shared.leap is None else shared.leap
    parts = [
        part
        for feature in plan.features
        if (part := feature.scheduler_part(plan, config, own)) is not None
    ]
    must_step = alike.latency.foreign or any(part.forbids_leap for part in parts)
    return make_scheduler(
        table,
        alike.limits(replica_id=plan.replica_id, leap=leap and not must_step),
        queue=queue,
        tiers=shared.tiers.of(plan),
        own=own,
        parts=parts,
    )


def fault_handlers() -> Mapping[str, Handler]:
    """What each kind of fault does; loaded by the first one that strikes."""
    from emu.faults.handlers import HANDLERS

    return HANDLERS


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
