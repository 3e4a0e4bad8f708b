"""Named systems: what `autoscale.preset` sets (BlitzScale 6.3).

A preset sets keys of [autoscale]. A key that the user gave with a value other than the schema's
default is the user's: the preset leaves it. (A key given with its default value cannot be told
from one that is not given.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from emu.config.schema import AutoscaleTable, Config, ReplicaTable

_LIVE = {"executor": "blitz", "multicast": "tanz", "nvlink": True, "mutate": True}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "blitzscale": {**_LIVE, "live": True, "prune_sources": True},
        "multicast": {**_LIVE, "live": False, "prune_sources": True},
        "network": {**_LIVE, "multicast": "p2p", "live": False, "prune_sources": False},
        "serverlessllm": {
            "executor": "serverless",
            "loader": "cache",
            "live": False,
            "mutate": False,
        },
        # The original runs AllCache on BlitzScale's steps (revive, spares, mutate), and only the
        # weights come from the machine's memory.
        "allcache": {
            "executor": "blitz",
            "multicast": "none",
            "nvlink": False,
            "loader": "host",
            "live": False,
            "mutate": True,
        },
        "distserve_full": {"executor": "none"},
        "distserve_half": {"executor": "none"},
        "hpa": {"executor": "serverless", "planner": "hpa", "tick_ms": 15_000.0, "live": False},
    }
)
_STATIC_PART: Final = {"distserve_full": (1, 1), "distserve_half": (1, 2)}
_PREFILL_OF_EIGHT: Final = 5
"""Static systems of the paper prefill on five replicas in eight."""


def apply_preset(config: Config) -> Config:
    """The configuration with its preset's keys filled in, and the roles of a static system."""
    table = config.autoscale
    if table is None or not table.preset:
        return config
    default = AutoscaleTable()
    keys = {
        key: value
        for key, value in PRESETS[table.preset].items()
        if getattr(table, key) == getattr(default, key)
    }
    config = msgspec.structs.replace(config, autoscale=msgspec.structs.replace(table, **keys))
    if table.preset in _STATIC_PART:
        replicas = static_roles(config.replicas, *_STATIC_PART[table.preset])
        config = msgspec.structs.replace(config, replicas=replicas)
    return config


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
