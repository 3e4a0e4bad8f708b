"""Replicas of `[[models]]`, or of a static system (BlitzScale 6.3)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from emu.config.fleet import STATIC_PARTS, expand_models, prefill_part
from emu.config.schema import Config, ReplicaTable


def apply_preset(config: Config) -> Config:
    """The configuration with the replicas of its models, or the roles of a static preset."""
    table = config.autoscale
    if config.models:
        return expand_models(config)
    if table is None or table.preset not in STATIC_PARTS:
        return config
    replicas = static_roles(config.replicas, *STATIC_PARTS[table.preset])
    return msgspec.structs.replace(config, replicas=replicas)


def static_roles(
    tables: Sequence[ReplicaTable], numerator: int, denominator: int
) -> list[ReplicaTable]:
    """All (or a part) of the replicas work from the start, five of eight as prefill.

    Replicas keep their tables, so that their places do not change. If none is inactive, the user
    has said what the roles are, and nothing changes.
    `numerator` / `denominator` is the part of the replicas that works.
    """
    if not any(table.role == "inactive" for table in tables):
        return list(tables)
    total = sum(table.count for table in tables if table.role != "colocated")
    active = max(2, total * numerator // denominator)
    prefill = prefill_part(active)
    result: list[ReplicaTable] = []
    position = 0
    for table in tables:
        if table.role == "colocated":
            result.append(table)
            continue
        for start, end, role in (
            (0, prefill, "prefill"),
            (prefill, active, "decode"),
            (active, total, "inactive"),
        ):
            count = min(end, position + table.count) - max(start, position)
            if count > 0:
                gpus = table.gpus
                if gpus:
                    size = table.tensor_parallel * table.pipeline_parallel
                    first = (max(start, position) - position) * size
                    gpus = gpus[first : first + count * size]
                made = {"role": role, "count": count, "gpus": gpus}
                result.append(msgspec.structs.replace(table, **made))
        position += table.count
    return result
