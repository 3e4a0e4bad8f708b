"""Named systems: what `autoscale.preset` sets (BlitzScale 6.3). Pure.

A preset gives keys of `[autoscale]` that the file leaves out. A key that the file (or `--set`)
gives stands, whatever its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

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


def fill_preset(raw: dict[str, Any]) -> None:
    """Add the keys of the document's preset that it does not give, in place."""
    table = raw.get("autoscale")
    if isinstance(table, dict):
        for key, value in PRESETS.get(table.get("preset", ""), {}).items():
            table.setdefault(key, value)
        if raw.get("models") and table.get("multicast", "none") != "none":
            # With several models no replica may have the weights: one host copy of each is kept.
            table.setdefault("loader", "pool")
