"""Builds what moves KV between replicas: watchers of prefilled KV, and what moves running requests.

Loaded only by runs in which KV moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from emu.catalogue import sizes
from emu.cluster.build import Shared
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.names import is_import_path
from emu.config.schema import Config
from emu.kernel.clock import Kernel
from emu.migration.destinations import Choosing, Destinations, OnTaken, Taken
from emu.migration.live import LiveMigrator, LiveWorld
from emu.migration.outbound import Kv, Outbound
from emu.migration.ports import MigrationWorld
from emu.migration.watcher import Watcher, name_of
from emu.replica.replica import Replica
from emu.units import ms_to_ns

if TYPE_CHECKING:
    from emu.report.history import History


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


def _note_taken(kernel: Kernel, history: History, taken: Taken) -> None:
    history.taken(kernel.now_ns, taken)


def build_watchers(
    shared: Shared,
    replicas: Sequence[Replica],
    worlds: Sequence[MigrationWorld],
    history: History | None,
) -> dict[int, Watcher]:
    """The watchers that hand over prefilled KV, by the replica's id. `worlds`: of each model."""
    on_taken: OnTaken | None = None
    if history is not None and history.follows_steps:
        on_taken = partial(_note_taken, shared.kernel, history)
    plans, config, policies = shared.plan.replicas, shared.plan.config, shared.own_policies
    policy = decode_policy(config)
    choosing = Choosing(policy, on_taken=on_taken)
    if policies is not None and is_import_path(policy):
        choosing.own, choosing.see = policies.placement(), policies.view  # one for all
    tables = [
        {
            (plan.scheduler.policy, plan.scheduler.block_size, plan.kv_layout)
            for plan in (plans[r.replica_id] for r in world.members)
        }
        for world in worlds
    ]
    copies = _copies(plans)
    watchers: dict[int, Watcher] = {}
    for replica, plan in zip(replicas, plans, strict=True):
        if plan.role == "colocated":
            continue
        world, model = worlds[replica.model], replica.model
        search = Destinations(
            replica,
            world,
            choosing,
            holder=name_of(replica.replica_id),
            are_alike=len(tables[model]) == 1,
        )
        outbound = Outbound(
            replica.replica_id,
            search,
            _kv_of(plan, shared.plan, copies.get(plan.served, {})),
            world.next_batch_id,
            attempts_max=config.recovery.max_retries,
            lease_ns=ms_to_ns(config.recovery.lease_ms),
        )
        watcher = Watcher(replica, world, outbound, layers=plan.model.layers)
        replica.connect(watcher)
        watchers[replica.replica_id] = watcher
    return watchers


def _kv_of(plan: ReplicaPlan, whole: Plan, needed: Mapping[int, int]) -> Kv:
    """What its KV is like, and what moving it costs; `needed`: copies by destination."""
    network = whole.config.network
    return Kv(
        block_size=plan.page_tokens,
        bytes_per_token=plan.kv_bytes_per_token,
        state_bytes=plan.state_bytes,
        copies=needed,
        layerwise=network.kv_transfer == "layerwise",
        connector_ns=round(network.connector_us * 1000),
        connector_block_ns=round(network.connector_block_us * 1000),
        has_first_token=network.first_token == "decode",
        holds_halves="split_lock" in _oddities(whole, plan.served),
    )


def _copies(plans: Sequence[ReplicaPlan]) -> dict[str, dict[int, int]]:
    """Times that destinations need a source's KV, where it is not once, by served model."""
    found: dict[str, dict[int, int]] = {}
    for one in plans:
        if one.tensor_parallel > 1:
            copies = sizes.kv_copies(one.model, one.kv_dtype, one.tensor_parallel)
            if copies > 1:
                found.setdefault(one.served, {})[one.replica_id] = copies
    return found


def build_live(shared: Shared, world: LiveWorld) -> LiveMigrator:
    """The actor that moves running requests."""
    table, policies = shared.plan.config.migration, shared.own_policies
    is_own = policies is not None and is_import_path(table.policy)
    replicas = shared.plan.replicas
    decoding = next((r for r in replicas if r.role == "decode"), replicas[0])
    return LiveMigrator(
        world,
        table,
        block_size=decoding.page_tokens,
        kv_bytes_per_token=decoding.kv_bytes_per_token,
        state_bytes=decoding.state_bytes,
        own=policies.migration() if policies is not None and is_own else None,
        see=None if policies is None else policies.view,
    )
