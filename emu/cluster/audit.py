"""What a cluster's books say, read after the run or when it got stuck; changes nothing.

Facts for the summary, and what is left over that should not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import PowerTable, SloTable
from emu.errors import InvariantViolation
from emu.replica.prerequisites import READ, WRITE
from emu.replica.replica import Replica
from emu.replica.states import GPU_ROLE
from emu.replica.view import ReplicaHandle
from emu.report.model_figures import ModelFacts
from emu.report.summary import RunFacts
from emu.units import NS_PER_S

if TYPE_CHECKING:
    from emu.cluster.cluster import Cluster
    from emu.latency.offload.backend import OffloadedBackend
    from emu.latency.offload.pim import PimDevice

# --------------------------------------------------------------------------------------------------
# Energy of a run by part of the machine, from what the run's books say.
#
# Owns the rules: idle power of everything for the whole run, and on top of it what was done. Pure;
# called once, at the end. Source: LLMServingSim 2.0, with these differences:
# a GPU is active while its replica (or its pipeline stage) runs an iteration, exchanges included;
# the processors of a machine are no busier than all of the time; bytes between stages count at the
# size of their elements.
#
# Parts: `base`, `gpu`, `cpu`, `memory`, `link`, `nic`, `storage`. Joule.

_BUSY_HOST: Final = 0.7
"""Part of full load of a host whose GPUs run."""
_JOULE_PER_PJ_BYTE: Final = 8e-12
_HOST_KINDS: Final = (READ, WRITE)


def energy_warnings(table: PowerTable, plan: Plan) -> list[str]:
    """What a reader of the energy should know beforehand."""
    if table.gpu_active_w:
        return []
    limits = {r.gpu.name: r.gpu.tdp_w for r in plan.replicas if r.gpu.tdp_w}
    boards = ", ".join(f"{name} draws {watt:g} W at most" for name, watt in limits.items())
    return ["power.gpu_active_w is 0: GPUs take no energy" + (f" ({boards})" if boards else "")]


def energy_j(
    table: PowerTable,
    plan: Plan,
    replicas: Sequence[Replica],
    moved_bytes: Mapping[str, int],
    end_ns: int,
) -> dict[str, float]:
    """Energy of the whole cluster from the start to `end_ns`."""
    from emu.latency.offload.backend import OffloadedBackend

    seconds = end_ns / NS_PER_S
    machines = plan.topology.machines
    count = len(machines)
    host_bytes = sum(moved_bytes.get(kind, 0) for kind in _HOST_KINDS)
    link_bytes = float(sum(moved_bytes.values()) - host_bytes)
    gpu = table.gpu_idle_w * len(plan.topology.gpus) * seconds
    busy_of_machine = [0] * count
    pim_j = 0.0
    for its_plan, replica in zip(plan.replicas, replicas, strict=True):
        busy_ns, gpu_busy_ns = replica.busy_times
        standby_ns = replica.counters.standby_time_ns(end_ns)
        gpu += (table.gpu_active_w - table.gpu_idle_w) * gpu_busy_ns / NS_PER_S
        standby_w = max(0.0, table.gpu_standby_w - table.gpu_idle_w)
        gpu += standby_w * standby_ns / NS_PER_S * len(replica.gpus)
        busy_of_machine[its_plan.machine] += busy_ns
        link_bytes += replica.counters.tokens_run * exchange_bytes_per_token(its_plan)
        latency = replica.latency
        if isinstance(latency, OffloadedBackend):
            host_bytes += _loaded_bytes(latency, its_plan) * replica.counters.iterations
            pim_j += _pim_j(latency, its_plan, replica)
            host_bytes += _attended_bytes(latency, its_plan, replica)
    cpu = _cpu_j(table, busy_of_machine, end_ns)
    memory = sum(_memory_idle_w(table, plan, machine.table) for machine in machines) * seconds
    return {
        "base": table.base_node_w * count * seconds,
        "gpu": gpu,
        "cpu": cpu,
        "memory": memory + pim_j + table.dram_pj_per_bit * host_bytes * _JOULE_PER_PJ_BYTE,
        "link": table.link_idle_w * table.links * count * seconds
        + table.link_pj_per_bit * link_bytes * _JOULE_PER_PJ_BYTE,
        "nic": table.nic_idle_w * table.nics * count * seconds,
        "storage": table.storage_idle_w * table.storage_devices * count * seconds,
    }


def exchange_bytes_per_token(plan: ReplicaPlan) -> float:
    """Bytes over links inside a replica (or its group) for each token that it computes."""
    model, tp, pp = plan.model, plan.tensor_parallel, plan.pipeline_parallel
    ep = plan.expert_parallel or tp
    element = sizes.weight_bytes(1, sizes.activation_dtype(model, plan.dtype))
    hidden = model.hidden * element
    moe = sum(model.is_moe_layer(layer) for layer in range(model.layers))
    reduced = 2 * (model.layers - moe) + moe  # o_proj everywhere, down_proj where there is one
    total = reduced * 2 * (tp - 1) / tp * hidden + (pp - 1) * hidden
    if moe and model.experts is not None and ep > 1:
        scores = model.experts.count * element
        total += moe * (ep - 1) / ep * ((hidden + scores) / ep + hidden)
    return total


def _cpu_j(table: PowerTable, busy_of_machine: Sequence[int], end_ns: int) -> float:
    span_w = table.cpu_active_w - table.cpu_idle_w
    idle_w = table.cpu_idle_w + span_w * table.cpu_utilization
    busy_w = span_w * max(_BUSY_HOST - table.cpu_utilization, 0.0)
    total = 0.0
    for busy_ns in busy_of_machine:
        total += (idle_w * end_ns + busy_w * min(busy_ns, end_ns)) / NS_PER_S
    return total


def _memory_idle_w(table: PowerTable, plan: Plan, node_table: int) -> float:
    """Modules of a machine; where memory computes, its channels."""
    node = plan.config.nodes[node_table]
    if node.pim:
        device = _device(node.pim)
        return device.idle_w * (node.host_memory_gib // device.channel_gib)
    return table.dram_idle_w_per_dimm * (node.host_memory_gib // table.dram_dimm_gib)


def _loaded_bytes(latency: OffloadedBackend, plan: ReplicaPlan) -> int:
    """Weights that all ranks load in an iteration."""
    if latency.loads is None:
        return 0
    by_device = latency.loads.iteration_bytes
    return plan.tensor_parallel * sum(n for name, n in by_device.items() if name != "gpu")


def _pim_j(latency: OffloadedBackend, plan: ReplicaPlan, replica: Replica) -> float:
    if latency.pim is None:
        return 0.0
    device = _device(plan.node.pim)
    work_ns = latency.pim.work_ns(replica.counters.decodes_run, replica.counters.decode_context_run)
    return (device.peak_w - device.idle_w) * work_ns * plan.model.layers / NS_PER_S


def _attended_bytes(latency: OffloadedBackend, plan: ReplicaPlan, replica: Replica) -> int:
    """Queries, keys and values of decodes into memory that attends, and what comes out of it."""
    if latency.pim is None:
        return 0
    model = plan.model
    element = sizes.weight_bytes(1, sizes.activation_dtype(model, plan.dtype))
    token = 2 * (model.heads + model.kv_heads) * model.head_dim * element
    return replica.counters.decodes_run * model.layers * token


def _device(name: str) -> PimDevice:
    from emu.latency.offload.pim import pim_device

    return pim_device(name, "config", "nodes.pim")


# --- What a cluster's books say -------------------------------------------------------------------

NS_PER_HOUR: Final = 3600 * 10**9


def run_facts(cluster: Cluster) -> RunFacts:
    """What only the cluster knows of the run, for the summary."""
    gpu_ns, idle_ns = _gpu_times(cluster)
    faults, network = cluster.faults, cluster.network
    scalers = cluster.scalers
    power, end_ns = cluster.config.power, cluster.kernel.now_ns
    energy = None
    if power is not None:
        energy = energy_j(power, cluster.plan, cluster.replicas, network.moved_bytes, end_ns)
    prices = [replica.node.hourly_price for replica in cluster.plan.replicas]
    return RunFacts(
        end_ns=end_ns,
        gpu_ns=gpu_ns,
        idle_gpu_ns=idle_ns,
        peak_flops=_peak_flops(cluster),
        bytes_moved=network.moved_bytes,
        scale_ups=sum(scaler.scale_ups for scaler in scalers),
        scale_downs=sum(scaler.scale_downs for scaler in scalers),
        loads=_added(scaler.loads for scaler in scalers),
        host_cache_bytes=_added(scaler.host_cache_bytes() for scaler in scalers),
        faults=faults.struck,
        faults_missed=faults.missed,
        energy_j=energy,
        features=_feature_figures(cluster),
        cost=_cost(cluster, prices) if any(prices) else None,
    )


def _feature_figures(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What each feature says of the run, by its key in the summary."""
    found: dict[str, dict[str, Any]] = {}
    for feature in cluster.plan.features:
        figures = feature.figures(cluster.replicas, cluster.gateway.doors)
        if figures is not None:
            found[feature.section] = figures
    return found


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


def _gpu_times(cluster: Cluster) -> tuple[dict[str, int], int]:
    """GPU time by role, and how much of the serving time nothing ran."""
    gpu_ns: dict[str, int] = {}
    idle_ns = 0
    for replica in cluster.replicas:
        # One that only keeps pace with its group may be in the middle of a leap.
        busy_ns = replica.view().booked_busy_ns
        serving_ns = 0
        for role, held_ns in _held_ns(replica).items():
            gpu_ns[role] = gpu_ns.get(role, 0) + held_ns
            if role in ("prefill", "decode", "colocated"):
                serving_ns += held_ns
        idle_ns += max(0, serving_ns - busy_ns * len(replica.gpus))
    return gpu_ns, idle_ns


def _peak_flops(cluster: Cluster) -> tuple[float, float]:
    """Half-precision FLOPs that the GPUs could have done: while busy, and while held."""
    busy = held = 0.0
    for replica, plan in zip(cluster.replicas, cluster.plan.replicas, strict=True):
        peak = plan.gpu.peak_flops("bfloat16") / NS_PER_S
        held_ns = sum(_held_ns(replica).values())
        busy += peak * replica.busy_times[1]
        held += peak * held_ns
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
