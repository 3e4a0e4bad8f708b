"""The cluster as it is now, for the live page and for scripts. Times are emulated seconds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from emu.apps.serve.event_hub import Passing
from emu.apps.serve.pace import Recent
from emu.apps.serve.service import Service
from emu.apps.serve.world import LiveCluster
from emu.cluster.commands import TARGETS
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S

PERCENTS = (50, 90, 99)


class ReplicaNow(Struct, frozen=True, kw_only=True):
    """One replica."""

    id: int
    state: str
    gpus: int
    machine: int
    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    slowdown: float
    """Of its iterations; 1 = none."""
    commands: list[str]
    """Those that it would take now."""


class PaceNow(Struct, frozen=True, kw_only=True):
    """Whether the machine keeps up."""

    verdict: str
    requests: int
    late: int
    """Requests with a token that came too late."""
    recent: Recent
    recent_verdict: str
    """Of the last half minute."""
    worst_s: float
    first_late_s: float
    is_late_now: bool


class FaultNow(Struct, frozen=True, kw_only=True):
    """A fault in force."""

    number: int
    kind: str
    target: str
    at_s: float
    until_s: float | None


class PlannerNow(Struct, frozen=True, kw_only=True):
    """What the planner saw and wanted last."""

    name: str
    looks: int
    scale_ups: int
    scale_downs: int
    waiting_requests: int
    waiting_tokens: int
    outstanding: int
    tokens_in_migration: int
    looked_s: float
    wanted: Mapping[str, float]
    """Replicas by role, and the planner's own figures."""


class Snapshot(Passing, frozen=True, kw_only=True):
    """Everything at one instant."""

    event: str = "state"
    at_s: float
    speed: float
    model: str
    is_ready: bool
    startup_left_s: float
    """Wall time."""
    is_draining: bool
    outstanding: int
    held: int
    """Arrived requests that no replica has yet."""
    replicas: list[ReplicaNow]
    flows: Mapping[str, int]
    moved_bytes: Mapping[str, int]
    prefill_tokens: int
    decode_tokens: int
    ended: Mapping[str, int]
    latencies: Mapping[str, Mapping[str, float]]
    planner: PlannerNow | None
    pairs: list[list[int]]
    """[source, destination, bytes] of the last minute."""
    pace: PaceNow
    drift_s: float
    loop_lag_s: float
    failures_returned: int
    """Answers that a failure rule spoiled."""
    calls_shed: int
    """Calls refused because this machine is behind."""
    faults: int
    faults_in_force: list[FaultNow]


def snapshot(service: Service) -> Snapshot:
    """The cluster as it is now."""
    cluster = service.cluster
    produced = [replica.view().tokens_produced for replica in cluster.replicas]
    return Snapshot(
        at_s=cluster.kernel.wall_ns() / NS_PER_S,
        speed=service.speed,
        model=", ".join(service.models) if len(service.models) > 1 else service.model,
        is_ready=service.is_ready,
        startup_left_s=round(service.startup_left_s, 3),
        is_draining=service.is_draining,
        outstanding=cluster.gateway.outstanding,
        held=len(cluster.gateway.held) + sum(map(len, cluster.gateway.queues)),
        replicas=[_replica(replica) for replica in cluster.replicas],
        flows=cluster.network.active,
        moved_bytes=cluster.network.moved_bytes,
        prefill_tokens=sum(prefill for prefill, _ in produced),
        decode_tokens=sum(decode for _, decode in produced),
        ended=cluster.stats.by_status,
        latencies=_latencies(cluster),
        planner=_planner(service),
        pairs=service.trends.pairs(),
        pace=_pace(cluster),
        drift_s=round(service.lateness.drift_s, 6),
        loop_lag_s=round(service.lateness.loop_lag_s, 6),
        failures_returned=service.counts.failures_returned,
        calls_shed=service.counts.calls_shed,
        faults=sum(cluster.faults.struck.values()),
        faults_in_force=_faults(cluster),
    )


def _replica(replica: ReplicaHandle) -> ReplicaNow:
    view = replica.view()
    return ReplicaNow(
        id=replica.replica_id,
        state=replica.state.value,
        gpus=len(replica.gpus),
        machine=replica.machine,
        running=view.running_count,
        waiting=view.waiting_count,
        blocks_used=view.blocks_used,
        blocks_total=view.blocks_total,
        slowdown=replica.slowdown,
        commands=[command for command, state in TARGETS if state is replica.state],
    )


def _pace(cluster: LiveCluster) -> PaceNow:
    pace = cluster.pace
    recent = cluster.pace.recent(cluster.kernel.wall_ns())
    return PaceNow(
        verdict=pace.verdict,
        requests=pace.requests,
        late=pace.late,
        worst_s=round(pace.worst_s, 4),
        recent=recent,
        recent_verdict=recent.verdict,
        first_late_s=round(pace.first_late_s, 3),
        is_late_now=pace.late_since_s >= 0,
    )


def _faults(cluster: LiveCluster) -> list[FaultNow]:
    return [
        FaultNow(
            number=number,
            kind=one.fault.kind,
            target=one.target,
            at_s=one.since_ns / NS_PER_S,
            until_s=one.until_s,
        )
        for number, one in cluster.faults.in_force.items()
    ]


def _planner(service: Service) -> PlannerNow | None:
    """None without autoscaling."""
    scaler = service.cluster.scalers[0]
    table = service.plan.config.autoscale
    if table is None or not scaler.is_active:
        return None
    waiting = service.cluster.pools[0].waiting()
    demand = scaler.last_demand
    roles = {"prefill": demand.prefill, "decode": demand.decode, "colocated": demand.colocated}
    return PlannerNow(
        name=table.preset or table.planner,
        looks=scaler.ticks,
        scale_ups=scaler.scale_ups,
        scale_downs=scaler.scale_downs,
        waiting_requests=waiting.requests,
        waiting_tokens=waiting.tokens,
        outstanding=waiting.outstanding,
        tokens_in_migration=service.cluster.tokens_in_migration,
        looked_s=round(scaler.looked_ns / NS_PER_S, 3),
        wanted={**roles, **demand.figures},
    )


def _latencies(cluster: LiveCluster) -> dict[str, dict[str, float]]:
    """Percentiles of the last completed requests, ms."""
    recent = cluster.stats.recent
    if not recent:
        return {}
    table = np.percentile(np.array(recent) * 1e3, PERCENTS, axis=0)
    return {
        name: {f"p{q}": round(float(value), 3) for q, value in zip(PERCENTS, column, strict=True)}
        for name, column in zip(("ttft_ms", "tpot_ms", "e2e_ms"), table.T, strict=True)
    }
