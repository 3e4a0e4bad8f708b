"""Energy of a run by part of the machine, from what the run's books say.

Idle power of everything for the whole run, and on top of it what was done. Pure; called once, at
the end. GPUs draw by their load (`gpu_power.py`), or `gpu_active_w` where that is given. Source of
all else: LLMServingSim 2.0, with these differences: a GPU is active while its replica (or its
pipeline stage) runs an iteration, exchanges included; the processors of a machine are no busier
than all of the time; bytes between stages count at the size of their elements.

Parts: `base`, `gpu`, `cpu`, `memory`, `link`, `nic`, `storage`. Joule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from emu.catalogue import sizes
from emu.cluster.gpu_power import MEASURED, running_j
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import PowerTable
from emu.replica.replica import Replica
from emu.replica.tier_traffic import READ, WRITE
from emu.units import NS_PER_S

if TYPE_CHECKING:
    from emu.catalogue.gpu import GpuSpec
    from emu.latency.offload.backend import OffloadedBackend
    from emu.latency.offload.pim import PimDevice

_BUSY_HOST: Final = 0.7
"""Part of full load of a host whose GPUs run."""
_JOULE_PER_PJ_BYTE: Final = 8e-12
_HOST_KINDS: Final = (READ, WRITE)


def energy_warnings(table: PowerTable, plan: Plan) -> list[str]:
    """What a reader of the energy should know beforehand."""
    if table.gpu_active_w:
        return []
    gpus = {gpu.name: gpu for gpu in plan.gpus_of_nodes}
    told = []
    for name, gpu in sorted(gpus.items()):
        if not gpu.tdp_w:
            told.append(f"power: the limit of {name} is not known: it takes no energy")
        elif name not in MEASURED:
            told.append(
                f"power: {name} is unmeasured: taken to draw the same parts of its {gpu.tdp_w:g} W "
                f"as {MEASURED[0]}; power.gpu_active_w gives your own"
            )
    return told


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
    gpu = _idle_w(table, plan) * seconds
    busy_of_machine = [0] * count
    pim_j = 0.0
    for its_plan, replica in zip(plan.replicas, replicas, strict=True):
        busy_ns, gpu_busy_ns = replica.busy_times
        standby_ns = replica.counters.standby_time_ns(end_ns)
        idle_w = _gpu_idle_w(table, its_plan.gpu)
        if table.gpu_active_w:
            gpu += (table.gpu_active_w - idle_w) * gpu_busy_ns / NS_PER_S
        else:
            gpu += running_j(its_plan.gpu, its_plan.model, replica.counters, gpu_busy_ns, idle_w)
        standby_w = max(0.0, table.gpu_standby_w - idle_w)
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


def _gpu_idle_w(table: PowerTable, gpu: GpuSpec) -> float:
    """Idle power of one GPU: as given, or the catalog's where power is by load."""
    return table.gpu_idle_w if table.gpu_idle_w or table.gpu_active_w else gpu.idle_w


def _idle_w(table: PowerTable, plan: Plan) -> float:
    """Idle power of all GPUs, held by a replica or not."""
    machines = plan.topology.machines
    return sum(
        _gpu_idle_w(table, plan.gpus_of_nodes[machine.table]) * len(machine.gpus)
        for machine in machines
    )


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
