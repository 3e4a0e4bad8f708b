"""What a cluster's books say, read after the run or when it got stuck; changes nothing in it.

Facts for the summary, what is left over that should not be, and the files that are written last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from emu.cluster.plan import ReplicaPlan, groups_of
from emu.config.schema import SloTable
from emu.documents import Document
from emu.errors import InvariantViolation
from emu.replica.states import GPU_ROLE
from emu.replica.view import ReplicaHandle
from emu.report.gap_file import write_gaps
from emu.report.model_figures import ModelFacts
from emu.report.runfiles import write_experts, write_flows
from emu.report.summary import DEFINITIONS, RunFacts, Summary, build_summary, write_summary
from emu.units import NS_PER_S

if TYPE_CHECKING:
    from emu.cluster.cluster import Cluster
    from emu.cluster.recorder import Recorder
    from emu.replica.wave import WaveGroup
    from emu.report.itl import GapStats
    from emu.report.records import RequestStats
    from emu.workload.items import Notes
NS_PER_HOUR: Final = 3600 * 10**9


def run_facts(cluster: Cluster) -> RunFacts:
    """What only the cluster knows of the run, for the summary."""
    of_each = [_held_ns(replica) for replica in cluster.replicas]
    held = _gpu_times(cluster, of_each)
    faults, network = cluster.faults, cluster.network
    scalers = cluster.scalers
    prices = [replica.node.hourly_price for replica in cluster.plan.replicas]
    return RunFacts(
        end_ns=cluster.kernel.now_ns,
        gpu_ns=held.by_role_ns,
        idle_gpu_ns=held.idle_ns,
        peak_flops=_peak_flops(cluster, of_each),
        bytes_moved=network.moved_bytes,
        scale_ups=sum(scaler.scale_ups for scaler in scalers),
        scale_downs=sum(scaler.scale_downs for scaler in scalers),
        loads=_added(scaler.loads for scaler in scalers),
        host_cache_bytes=_added(scaler.host_cache_bytes() for scaler in scalers),
        faults=faults.struck,
        faults_missed=faults.missed,
        energy_j=_energy_j(cluster),
        features=_feature_figures(cluster),
        cost=_cost(cluster, prices) if any(prices) else None,
    )


def _feature_figures(cluster: Cluster) -> dict[str, Document]:
    """What each feature says of the run, by its key in the summary."""
    found: dict[str, Document] = {}
    for feature in cluster.plan.features:
        figures = feature.figures(cluster.replicas, cluster.gateway.doors)
        if figures is not None:
            found[feature.section] = figures
    shared = {group.name: group for group in cluster.waves}
    experts = {
        name: _expert_figures(cluster, members[0], shared[name])
        for name, members in groups_of(cluster.plan.replicas).items()
        if members[0].experts is not None
    }
    if cluster.recovery.ranks is not None:
        for name, losses in cluster.recovery.ranks.figures().items():
            experts[name] |= losses
    if experts:
        found["experts"] = experts
    return found


def _expert_figures(cluster: Cluster, first: ReplicaPlan, group: WaveGroup) -> Document:
    """How evenly the ranks of a group were loaded, and what placing experts anew took."""
    from emu.latency.experts.routed import make_balance  # few groups say how they share

    assert first.experts is not None
    balance = make_balance(first.latency_context(cluster.config), first.experts)
    apart = {"expert_gpus": first.expert_parallel} if first.experts.is_apart else {}
    return {
        **apart,
        "balancedness": None if balance is None else round(balance.balancedness, 4),
        "waves": group.waves,
        "placements": group.placements,
        "placement_s": group.placement_ns / 1e9,
    }


def model_facts(cluster: Cluster) -> list[ModelFacts]:
    """What only the cluster knows of each model, in their order."""
    now_ns = cluster.kernel.now_ns
    facts: list[ModelFacts] = []
    for pool in cluster.pools:
        scaler = pool.scaler
        held = _added(_held_ns(replica) for replica in pool.members)
        facts.append(
            ModelFacts(
                gpu_ns=sum(held.values()),
                loading_gpu_ns=held.get("loading", 0),
                scale_ups=scaler.scale_ups,
                scale_downs=scaler.scale_downs,
                loads=scaler.loads,
                host_copy_bytes=scaler.cache.copy_bytes,
                host_bytes_mean=round(scaler.cache.mean_bytes(now_ns)) if scaler.is_active else 0,
                host_evictions=scaler.cache.evictions,
            )
        )
    return facts


def objectives(cluster: Cluster) -> list[SloTable]:
    """Objectives of each model: its own, or those of [slo]."""
    own = {model.label: model.slo for model in cluster.config.models}
    return [own.get(pool.name) or cluster.config.slo for pool in cluster.pools]


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums key by key."""
    total: dict[str, int] = {}
    for each in counts:
        for key, value in each.items():
            total[key] = total.get(key, 0) + value
    return total


def _cost(cluster: Cluster, prices: list[float]) -> float:
    """Price of the GPU time; `prices` are those of a GPU-hour, by replica."""
    held = (sum(_held_ns(replica).values()) for replica in cluster.replicas)
    return sum(gpu_ns * price for gpu_ns, price in zip(held, prices, strict=True)) / NS_PER_HOUR


class _GpuTimes(msgspec.Struct, frozen=True):
    by_role_ns: dict[str, int]
    idle_ns: int
    """Serving time in which nothing ran."""


def _energy_j(cluster: Cluster) -> dict[str, float] | None:
    power = cluster.config.power
    if power is None:
        return None
    from emu.cluster.energy import energy_j  # most runs do not model it

    moved_bytes, end_ns = cluster.network.moved_bytes, cluster.kernel.now_ns
    return energy_j(power, cluster.plan, cluster.replicas, moved_bytes, end_ns)


def _gpu_times(cluster: Cluster, of_each: Sequence[dict[str, int]]) -> _GpuTimes:
    """What the GPUs did with their time."""
    gpu_ns: dict[str, int] = {}
    idle_ns = 0
    for replica, held in zip(cluster.replicas, of_each, strict=True):
        # One that only keeps pace with its group may be in the middle of a leap.
        busy_ns = replica.view().booked_busy_ns
        serving_ns = 0
        for role, held_ns in held.items():
            gpu_ns[role] = gpu_ns.get(role, 0) + held_ns
            if role in ("prefill", "decode", "colocated"):
                serving_ns += held_ns
        idle_ns += max(0, serving_ns - busy_ns * len(replica.gpus))
    return _GpuTimes(gpu_ns, idle_ns)


def _peak_flops(cluster: Cluster, of_each: Sequence[dict[str, int]]) -> tuple[float, float]:
    """Half-precision FLOPs that the GPUs could have done: while busy, and while held."""
    busy = held = 0.0
    peaks: dict[tuple[int, int], float] = {}
    replicas = zip(cluster.replicas, cluster.plan.replicas, of_each, strict=True)
    for replica, plan, held_ns in replicas:
        kind = cluster.plan.kind_of(plan)
        if kind not in peaks:
            peaks[kind] = plan.gpu.peak_flops("bfloat16") / NS_PER_S
        busy += peaks[kind] * replica.busy_times[1]
        held += peaks[kind] * sum(held_ns.values())
    return busy, held


def _held_ns(replica: ReplicaHandle) -> dict[str, int]:
    """GPU time of one replica by role."""
    gpu_ns: dict[str, int] = {}
    for state, spent_ns in replica.state_ns.items():
        role = GPU_ROLE[state]
        if role:
            gpu_ns[role] = gpu_ns.get(role, 0) + spent_ns * len(replica.gpus)
    return gpu_ns


def expert_loads(cluster: Cluster) -> list[tuple[int, list[int]]]:
    """(replica, tokens of each expert) where a gate spreads them unevenly."""
    return [
        (replica.replica_id, replica.counters.expert_tokens.tolist())
        for replica in cluster.replicas
        if replica.counters.expert_tokens is not None
    ]


def flows_of(cluster: Cluster) -> list[tuple[int, int, str, int, int]]:
    """(source, destination, kind, transfers, bytes) of all that went between replicas."""
    return [
        (*key, arrived.transfers, arrived.size_bytes)
        for key, arrived in cluster.network.arrived.items()
    ]


def leaks(cluster: Cluster) -> list[str]:
    """What is left in the books at the end of a complete run; must be empty."""
    lines = []
    if cluster.gateway.outstanding:
        lines.append(f"{cluster.gateway.outstanding} requests without a terminal event")
    if cluster.tokens_in_migration:
        lines.append(f"{cluster.tokens_in_migration} tokens in migration")
    for replica in cluster.replicas:
        scheduler = replica.scheduler
        if scheduler.blocks_used or scheduler.running_count or scheduler.waiting_count:
            lines.append(
                f"{replica.name}: {scheduler.blocks_used} blocks, "
                f"{scheduler.running_count} running, {scheduler.waiting_count} waiting"
            )
        lines += [f"{replica.name}: {line}" for line in scheduler.recount()]
    return lines


def final_error(cluster: Cluster, error: BaseException | None) -> BaseException | None:
    """The run's error; a run without one fails too if something is left in the books."""
    if error is None:
        left = leaks(cluster)
        if left:
            return InvariantViolation("the books are not zero at the end", story=left)
    return error


def write_results(
    staging: Path,
    cluster: Cluster,
    recorder: Recorder,
    error: BaseException | None,
    *,
    rows: int,
    notes: Notes | None = None,
) -> Summary:
    """What is known only at the end: requests in order, gaps, experts, flows and the summary.

    `rows`: of the workload; `notes`: what of them was skipped or clipped. `error`: what ended the
    run before its time, whose files are then partial.
    """
    stats = recorder.requests.finish(partial=error is not None)
    facts = msgspec.structs.replace(
        run_facts(cluster),
        partial="" if error is None else type(error).__name__,
        workload_rows=rows,
        rows_skipped=notes.skipped if notes else {},
        rows_clipped=notes.clipped if notes else {},
    )
    gaps = recorder.gaps.finish()
    write_gaps(staging / "itl.json", gaps)
    write_experts(staging / "experts.csv", expert_loads(cluster))
    write_flows(staging / "flows.csv", flows_of(cluster))
    summary = summary_of(cluster, recorder, stats, gaps, facts)
    write_summary(staging / "summary.json", summary)
    return summary


def summary_of(
    cluster: Cluster, recorder: Recorder, stats: RequestStats, gaps: GapStats, facts: RunFacts
) -> Summary:
    """The summary of a run, with the figures of each model where there are several."""
    summary = build_summary(stats, gaps, facts, cluster.config.slo)
    if recorder.models is not None:
        summary.definitions["models"] = DEFINITIONS["models"]
        summary.models = recorder.models.finish(model_facts(cluster), objectives(cluster))
    return summary
