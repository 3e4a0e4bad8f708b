"""Which runs can be shared out to processes, and why others cannot.

A run is exact in parts where nothing that happens at a replica can change anything at another one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Final

from emu.cluster.plan import Plan, groups_of, plugins_of
from emu.config.fleet import is_scaled
from emu.config.schema import Config, RandomTable, RoundRobinTable
from emu.errors import InputError
from emu.runs.shard_routes import Routes
from emu.workload.opened import Workload
from emu.world import asks_outside

PARTS_MAX: Final = 255
"""A part's number takes one byte for each request."""


def routes_of(plan: Plan, workload: Workload, jobs: int, *, logs: bool) -> Routes:
    """The routes of a run in so many parts, or one for each replica where there are fewer.

    `logs`: a log is wanted. Raises InputError with the first reason why it needs one process.
    """
    for reason in _reasons(plan.config, plan, workload):
        raise InputError(plan.source, None, "--jobs", f"one run in several processes: {reason}")
    if logs:
        problem = "one run in several processes writes no log: leave out --log-level, or -j"
        raise InputError(plan.source, None, "--jobs", problem)
    return Routes(plan, workload, min(jobs, len(plan.replicas), PARTS_MAX))


def _reasons(config: Config, plan: Plan, workload: Workload) -> Iterator[str]:
    if "fork" not in multiprocessing.get_all_start_methods():
        yield "this system cannot fork"
    policy = config.router.policy
    if not isinstance(config.router, RoundRobinTable | RandomTable):
        yield f"router.policy {policy} looks at all replicas; round_robin and random do not"
    for applies, reason in (*_of_cluster(config, plan), *_of_run(config, workload)):
        if applies:
            yield reason


def _of_cluster(config: Config, plan: Plan) -> Iterator[tuple[bool, str]]:
    replicas = plan.replicas
    names = ", ".join(dict.fromkeys(feature.section for feature in plan.features))
    yield len(plan.models) > 1, "[[models]]: several models share a front end and summaries"
    yield len(replicas) < 2, "there is one replica"
    roles = any(replica.role != "colocated" for replica in replicas)
    yield roles, "roles hand KV over: all replicas must be colocated"
    together = any(replica.shared for replica in replicas) or bool(groups_of(replicas))
    yield together, "replicas share GPUs or keep pace with a group"
    scales = is_scaled(config.autoscale) or config.kv_reject is not None
    yield scales, "[autoscale] and [kv_reject] look at all replicas"
    moves = config.migration.rebalance or config.migration.drain
    yield moves, "[migration] moves requests between replicas"
    yield bool(config.network.tiers), "network.tiers: KV tiers share links"
    yield bool(names), f"figures of features are not put together ({names})"
    outside = bool(plugins_of(config, replicas)) or asks_outside(plan)
    yield outside, "classes of your own and backends outside see one cluster"


def _of_run(config: Config, workload: Workload) -> Iterator[tuple[bool, str]]:
    router, output = config.router, config.output
    struck = bool(config.faults or config.commands)
    yield struck, "[[faults]] and [[commands]] change where requests go"
    looks = bool(router.max_outstanding or router.admission or config.recovery.client_retries)
    yield looks, "admission by load and retries depend on all replicas"
    asked = config.workload
    follows = bool(workload.facts.sessions or asked.concurrency or asked.max_in_flight)
    keys = "workload.concurrency and workload.max_in_flight"
    yield follows, f"sessions, {keys} send a request when another has ended"
    told = bool(output.events or output.trace or output.heartbeat_s)
    yield told, "output.events, output.trace and output.heartbeat_s tell one story in order"
    yield bool(config.limits.simulated_s), "limits.simulated_s cuts all replicas at once"
