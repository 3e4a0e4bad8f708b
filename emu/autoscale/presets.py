"""Static systems among the presets: which replicas work from the start (BlitzScale 6.3).

The keys that a preset sets are filled in as a file is read (`emu/config/presets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from emu.config.schema import Config, ReplicaTable

_STATIC_PART: Final = {"distserve_full": (1, 1), "distserve_half": (1, 2)}
_PREFILL_OF_EIGHT: Final = 5
"""Static systems of the paper prefill on five replicas in eight."""


def apply_preset(config: Config) -> Config:
    """The configuration with the roles of a static system, if its preset is one."""
    table = config.autoscale
    if table is None or table.preset not in _STATIC_PART:
        return config
    replicas = static_roles(config.replicas, *_STATIC_PART[table.preset])
    return msgspec.structs.replace(config, replicas=replicas)


def static_roles(
    tables: Sequence[ReplicaTable], numerator: int, denominator: int
) -> list[ReplicaTable]:
    """All (or a part) of the replicas work from the start, five of eight as prefill.

    Replicas keep their tables, so that their places do not change. If none is inactive, the user
    has said what the roles are, and nothing changes.
    """
    if not any(table.role == "inactive" for table in tables):
        return list(tables)
    total = sum(table.count for table in tables if table.role != "colocated")
    active = max(2, total * numerator // denominator)
    prefill = min(max(1, round(active * _PREFILL_OF_EIGHT / 8)), active - 1)
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
                changes: dict[str, Any] = {"role": role, "count": count}
                if table.gpus:
                    size = table.tensor_parallel * table.pipeline_parallel
                    first = (max(start, position) - position) * size
                    changes["gpus"] = table.gpus[first : first + count * size]
                result.append(msgspec.structs.replace(table, **changes))
        position += table.count
    return result
