"""Parts of a configuration that a run cannot use, in words."""

from __future__ import annotations

from collections.abc import Iterator

from emu.cluster.plan import Plan
from emu.config.fleet import is_scaled
from emu.config.schema import Config
from emu.config.tables.routing import LoraAffinityTable, PrefixAwareTable
from emu.workload.opened import Workload


def unused_parts(config: Config, plan: Plan, workload: Workload) -> Iterator[str]:
    """A line for each part without effect."""
    router, facts = config.router, workload.facts
    limit, count = config.workload.limit, workload.count
    if limit and config.workload.path and count < limit:
        yield f"workload.limit = {limit}, and {config.workload.path} has {count} requests"
    roles = {replica.role for replica in plan.replicas}
    waiting = sum(replica.role == "inactive" for replica in plan.replicas)
    if waiting and not is_scaled(config.autoscale) and not config.commands:
        are = "replica is" if waiting == 1 else "replicas are"
        yield f"{waiting} {are} inactive to the end: give [autoscale] preset or [[commands]]"
    if router.decode_policy != "auto" and roles <= {"colocated"}:
        yield f"router.decode_policy = {router.decode_policy} chooses nothing: no replica decodes"
    if isinstance(router, PrefixAwareTable) and not facts.has_prefixes:
        yield "router.policy = prefix_aware has nothing to go by: no prompts share a prefix"
    if isinstance(router, LoraAffinityTable) and "adapter" not in facts.asks:
        yield "router.policy = lora_affinity has nothing to go by: no request names an adapter"
