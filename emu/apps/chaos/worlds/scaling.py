"""Draws of what scales: presets, other planners, bounds that let all replicas go."""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.config.presets import PRESETS
from emu.config.schema import HpaTable, PaperTable
from emu.config.tables import tag_of

LIVE_PRESETS: Final = ("blitzscale", "multicast", "network", "serverlessllm", "allcache")

WITH_COPIES: Final[Tables] = {
    "planner": tag_of(HpaTable),
    "metric": "concurrency",
    "target_value": 3.0,
    "tick_ms": 20.0,
    "executor": "serverless",
    "loader": "cache",
}
"""A pool that soon follows its load, and keeps copies of weights in the memory of its machines."""


def draw_scaling(rng: Rng, tables: Tables) -> None:
    """A named system, another planner, or bounds that let all replicas go."""
    table: Tables | None = tables.get("autoscale")
    groups = tables["replicas"]
    if table is None:
        roles = {group["role"] for group in groups}
        is_apart = any("data_parallel_group" in group for group in groups)
        if roles == {"prefill", "decode"} and not is_apart and chance(rng, 0.1):
            tables["autoscale"] = {"preset": pick(rng, ("distserve_full", "distserve_half"))}
        return
    is_pool = table.get("planner") == tag_of(HpaTable)
    if chance(rng, 0.25):
        preset = "hpa" if is_pool else pick(rng, LIVE_PRESETS)
        kept = {} if preset != "hpa" else {"tick_ms": float(pick(rng, (20.0, 500.0)))}
        for key in PRESETS[preset]:
            table.pop(key, None)
        table |= {"preset": preset, **kept}
    elif not is_pool and chance(rng, 0.3):
        table["planner"] = tag_of(PaperTable)
    if is_pool and chance(rng, 0.4):
        table["scale_up_stabilization_s"] = float(pick(rng, (0.1, 0.5)))
    if not chance(rng, 0.3):
        return
    if is_pool:
        table["min_replicas"] = int(pick(rng, (0, 0, 2)))
        table["max_replicas"] = max(2, table["max_replicas"])
    else:
        table |= {"min_prefill": int(pick(rng, (0, 2))), "min_decode": int(pick(rng, (0, 0, 2)))}
    table["idle_s"] = float(pick(rng, (0.0, 0.1, 1.0)))
