"""LoRA adapters of a replica, resolved from its configuration: checks, memory, times of loads.

Pure. What a scheduler, a model or a backend cannot do is refused here, in one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.config.schema import LatencyTable, NodeTable, ReplicaTable, SchedulerTable, VllmTable
from emu.errors import InputError
from emu.units import NS_PER_S

if TYPE_CHECKING:
    from emu.latency.lora import LoraPlan

_KEYS = ("max_loras", "max_cpu_loras", "max_lora_rank")


def _table(scheduler: SchedulerTable) -> VllmTable | None:
    return scheduler if isinstance(scheduler, VllmTable) and scheduler.enable_lora else None


def check_adapters(
    scheduler: SchedulerTable,
    latency: LatencyTable,
    model: ModelSpec,
    replica: ReplicaTable,
    source: str,
) -> None:
    """Refuse what does not go together. InputError names the key."""

    def wrong(key: str, problem: str) -> NoReturn:
        raise InputError(source, None, key, problem)

    table = _table(scheduler)
    if table is None:
        default = VllmTable()
        for key in _KEYS if isinstance(scheduler, VllmTable) else ():
            if getattr(scheduler, key) != getattr(default, key):
                wrong(f"scheduler.{key}", "means nothing without enable_lora = true")
        return
    here = "scheduler.enable_lora"
    if table.policy != "vllm":
        wrong(here, f"policy {table.policy!r} has no adapters; vllm has")
    if 0 < table.max_cpu_loras < table.max_loras:
        wrong("scheduler.max_cpu_loras", f"expected at least max_loras = {table.max_loras}")
    if replica.pipeline_parallel > 1:
        wrong("replicas.pipeline_parallel", "adapters run on one pipeline stage")
    if latency.backend not in ("roofline", "linear"):
        wrong("latency.backend", f"{latency.backend!r} has no cost of adapters; roofline has")
    if replica.placement is not None or latency.attention_offload:
        wrong(here, "weights or attention outside the GPU cannot be combined with adapters")
    if model.special_layers or model.latent is not None or model.experts is not None:
        wrong(here, f"adapters of {model.name}, which has more than dense layers, are not modelled")


def adapter_bytes(scheduler: SchedulerTable, model: ModelSpec, tp: int) -> int:
    """Bytes of all slots on one rank; 0 without adapters."""
    table = _table(scheduler)
    if table is None:
        return 0
    from emu.latency.lora import slot_bytes

    return table.max_loras * slot_bytes(model, tp, table.max_lora_rank)


def lora_plan(
    scheduler: SchedulerTable, model: ModelSpec, tp: int, node: NodeTable, gpu: GpuSpec
) -> LoraPlan | None:
    """What adapters cost on a replica; None without them."""
    table = _table(scheduler)
    if table is None:
        return None
    from emu.latency.lora import LoraPlan, slot_bytes

    one = slot_bytes(model, 1, table.max_lora_rank)
    pcie_gbps = node.pcie_gbps if node.pcie_gbps > 0 else gpu.pcie_gbps
    host_ns = round(slot_bytes(model, tp, table.max_lora_rank) * 8 / (pcie_gbps * 1e9) * NS_PER_S)
    disk_ns = round(one * 8 / (node.ssd_gbps * 1e9) * NS_PER_S)
    return LoraPlan(rank=table.max_lora_rank, host_ns=host_ns, cold_ns=disk_ns + host_ns)
