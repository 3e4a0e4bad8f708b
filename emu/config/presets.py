"""Named systems and services: what `autoscale.preset` (BlitzScale 6.3) and `workload.preset` set.

A preset gives keys that the file leaves out. A key that the file (or `--set`) gives stands,
whatever its value. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emu.config.kinds import KINDS
from emu.config.schema import AutoscaleTable, HpaTable
from emu.config.tables import tag_of
from emu.documents import Document, DocumentView

_LIVE = {"executor": "blitz", "multicast": "tanz", "nvlink": True, "mutate": True}

PRESETS: Final[Mapping[str, DocumentView]] = MappingProxyType(
    {
        "blitzscale": {**_LIVE, "live": True, "prune_sources": True},
        "multicast": {**_LIVE, "live": False, "prune_sources": True},
        "network": {**_LIVE, "multicast": "p2p", "live": False, "prune_sources": False},
        "serverlessllm": {
            "executor": "serverless",
            "loader": "cache",
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
        "hpa": {"executor": "serverless", "planner": tag_of(HpaTable), "tick_ms": 15_000.0},
    }
)


_LENGTHS: Final[Mapping[str, tuple[DocumentView, DocumentView]]] = MappingProxyType(
    {
        # The medians that Splitwise (arXiv 2311.18677) gives for Azure's two services; the spreads
        # are round figures.
        "conversation": (
            {"median": 1020.0, "sigma": 0.9, "max": 8192},
            {"median": 129.0, "sigma": 1.0, "max": 2048},
        ),
        "code": (
            {"median": 1500.0, "sigma": 0.9, "max": 8192},
            {"median": 13.0, "sigma": 0.9, "max": 1024},
        ),
        # The means of LMSYS-Chat-1M (arXiv 2309.11998): 69.5 and 214.5 tokens.
        "chat": (
            {"median": 35.0, "sigma": 1.17, "max": 4096},
            {"median": 150.0, "sigma": 0.85, "max": 2048},
        ),
        # The medians of arXiv papers cut to 4K, as Vidur (arXiv 2405.05465) replays them.
        "summarization": (
            {"median": 2730.0, "sigma": 0.4, "max": 4096},
            {"median": 167.0, "sigma": 0.8, "max": 1024},
        ),
        # What a tool gives back, and the call of the next one; round figures.
        "agents": (
            {"median": 400.0, "sigma": 1.0, "max": 8192},
            {"median": 120.0, "sigma": 0.8, "max": 2048},
        ),
    }
)
_REST: Final[Mapping[str, DocumentView]] = MappingProxyType(
    {
        "chat": {"sessions": {"turns_min": 1, "turns_max": 3, "tool_s": 20.0}},
        "agents": {
            "sessions": {"turns_min": 5, "turns_max": 20, "branches": 3, "tool_s": 3.0},
            "prefix_groups": 1,
            "prefix_tokens": 4000,
        },
    }
)
"""A chat has two turns in the mean (LMSYS-Chat-1M); agents share instructions and tools."""
WORKLOADS: Final[Mapping[str, DocumentView]] = MappingProxyType(
    {
        name: MappingProxyType({"prompt": prompt, "output": output, **_REST.get(name, {})})
        for name, (prompt, output) in _LENGTHS.items()
    }
)
"""Keys of [workload.synthetic] by `workload.preset`."""


def _merge(table: Document, keys: DocumentView) -> None:
    """Add what `table` lacks, inner tables key by key."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            inner = table.setdefault(key, {})
            # Lengths of another distribution have keys of their own.
            if isinstance(inner, dict) and not inner.get("distribution"):
                _merge(inner, value)
        else:
            table.setdefault(key, value)


def fill_planner(raw: Document) -> None:
    """Write the kind of [autoscale] that its preset says into the document, in place, where no key
    says it. Types are not checked yet."""
    table = raw.get("autoscale")
    if isinstance(table, dict) and "planner" not in table:
        preset = table.get("preset")
        named = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        table |= {key: value for key, value in named.items() if key == "planner"}


def fill_preset(raw: Document) -> None:
    """Add the keys of the document's presets that it does not give, in place."""
    workload = raw.get("workload")
    if isinstance(workload, dict) and workload.get("preset") and not workload.get("path"):
        _merge(workload.setdefault("synthetic", {}), WORKLOADS[workload["preset"]])
    table = raw.get("autoscale")
    if isinstance(table, dict):
        kind = KINDS[AutoscaleTable].kind_of(table)
        for key, value in PRESETS.get(table.get("preset", ""), {}).items():
            if key in kind.__struct_fields__:
                table.setdefault(key, value)
        if raw.get("models") and table.get("multicast", "none") != "none":
            # With several models no replica may have the weights: one host copy of each is kept.
            table.setdefault("loader", "pool")
