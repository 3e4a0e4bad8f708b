"""The cluster as it is now, for the live page and for scripts."""

from __future__ import annotations

import numpy as np

from emu.apps.serve.service import Service
from emu.cluster.commands import TARGETS
from emu.units import NS_PER_S


def snapshot(service: Service) -> dict[str, object]:
    """The cluster as it is now."""
    cluster = service.cluster
    kernel = cluster.kernel
    replicas = []
    prefill_tokens = decode_tokens = 0
    for replica in cluster.replicas:
        view = replica.view()
        prefill, decode = view.tokens_produced
        prefill_tokens += prefill
        decode_tokens += decode
        replicas.append(
            {
                "id": replica.replica_id,
                "state": replica.state.value,
                "gpus": len(replica.gpus),
                "machine": replica.machine,
                "running": view.running_count,
                "waiting": view.waiting_count,
                "blocks_used": view.blocks_used,
                "blocks_total": view.blocks_total,
                "slowdown": replica.slowdown,
                "commands": [c for c, state in TARGETS if state is replica.state],
            }
        )
    gateway = cluster.gateway
    return {
        "event": "state",
        "at_s": kernel.wall_ns() / NS_PER_S,
        "speed": service.speed,
        "model": ", ".join(service.models) if len(service.models) > 1 else service.model,
        "is_ready": service.is_ready,
        "startup_left_s": round(service.startup_left_s, 3),
        "is_draining": service.is_draining,
        "outstanding": gateway.outstanding,
        "held": len(gateway.held) + sum(map(len, gateway.queues)),
        "replicas": replicas,
        "flows": cluster.network.active,
        "moved_bytes": cluster.network.moved_bytes,
        "prefill_tokens": prefill_tokens,
        "decode_tokens": decode_tokens,
        "ended": cluster.stats.by_status,
        "latencies": _latencies(service),
        "planner": _planner(service),
        "pairs": service.trends.pairs(),
        "pace": {
            "verdict": cluster.pace.verdict,
            "requests": cluster.pace.requests,
            "late": cluster.pace.late,
            "worst_s": round(cluster.pace.worst_s, 4),
            "first_late_s": round(cluster.pace.first_late_s, 3),
            "is_late_now": cluster.pace.late_since_s >= 0,
        },
        "drift_s": round(service.drift_s, 6),
        "loop_lag_s": round(service.loop_lag_s, 6),
        "failures_returned": service.failures_returned,
        "faults": sum(cluster.faults.struck.values()),
        "faults_in_force": [
            {
                "number": number,
                "kind": one.fault.kind,
                "target": one.target,
                "at_s": one.since_ns / NS_PER_S,
                "until_s": one.until_s,
            }
            for number, one in cluster.faults.in_force.items()
        ],
    }


def _planner(service: Service) -> dict[str, object] | None:
    """What the planner saw and wanted last; None without autoscaling."""
    scaler = service.cluster.scalers[0]
    table = service.plan.config.autoscale
    if table is None or not scaler.is_active:
        return None
    requests, tokens, outstanding = service.cluster.pools[0].waiting()
    demand = scaler.last_demand
    return {
        "name": table.preset or table.planner,
        "looks": scaler.ticks,
        "scale_ups": scaler.scale_ups,
        "scale_downs": scaler.scale_downs,
        "waiting_requests": requests,
        "waiting_tokens": tokens,
        "outstanding": outstanding,
        "tokens_in_migration": service.cluster.tokens_in_migration,
        "looked_s": round(scaler.looked_ns / NS_PER_S, 3),
        "wanted": {
            "prefill": demand.prefill,
            "decode": demand.decode,
            "colocated": demand.colocated,
            **demand.figures,
        },
    }


def _latencies(service: Service) -> dict[str, dict[str, float]]:
    """Percentiles of the last completed requests, ms."""
    recent = service.cluster.stats.recent
    if not recent:
        return {}
    table = np.percentile(np.array(recent) * 1e3, [50, 90, 99], axis=0)
    return {
        name: {
            f"p{q}": round(float(value), 3) for q, value in zip((50, 90, 99), column, strict=True)
        }
        for name, column in zip(("ttft_ms", "tpot_ms", "e2e_ms"), table.T, strict=True)
    }
