"""Draws that make a world wide: keys of the schema that plain worlds leave at their defaults.

A stream of its own decides, so that the plain part of a world stays as it was drawn. What a
world's own policies and backends refuse is not drawn for it: a refusal is a finding.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.worlds.asked import draw_made, draw_sessions
from emu.apps.chaos.worlds.drawing import TIMES_S, Rng, Tables, chance, pick
from emu.apps.chaos.worlds.figures import draw_figures
from emu.apps.chaos.worlds.fleet import draw_fleet
from emu.apps.chaos.worlds.models import features_in, keeps_other_things
from emu.apps.chaos.worlds.scaling import draw_scaling
from emu.apps.chaos.worlds.shapes import draw_shapes
from emu.rng import rng_stream

SLOWEST: Final = 20
"""A drawn model on drawn GPUs may be so many times slower than the coefficients of plain worlds."""


def draw_wide(seed: int, tables: Tables, lines: list[Tables]) -> float:
    """Widen two worlds in three, each by some of its possibilities.

    Returns about how long requests arrive, in seconds. A workload that is made from distributions
    leaves no lines.
    """
    rng = rng_stream(seed, "chaos wide")
    span_s: float = max(line["arrival_time_ns"] for line in lines) / 1e9
    if chance(rng, 1 / 3):
        return span_s
    if chance(rng, 0.5):
        draw_figures(rng, tables, lines)
    _latencies(rng_stream(seed, "chaos latencies"), tables)
    draw_scaling(rng, tables)
    if chance(rng, 0.15) and _can_be_fleet(tables):
        draw_fleet(rng, tables, lines)
    elif chance(rng, 0.6):
        draw_shapes(rng, tables)
        tables["limits"]["simulated_s"] *= SLOWEST
    if chance(rng, 0.2):
        draw_sessions(rng, lines)
    if chance(rng, 0.12):
        span_s = draw_made(rng, tables)
        lines.clear()
    roles = {group["role"] for group in tables.get("replicas", ())}
    if roles != {"colocated"} or keeps_other_things(tables["model"].get("name", "")):
        for feature in features_in(tables):
            if feature.key.startswith("workload."):  # those of [scheduler] went with their shapes
                feature.withdraw(tables)
    return span_s


def _can_be_fleet(tables: Tables) -> bool:
    """Several models know no tiers, and no groups that step together, here."""
    return (
        not tables["network"].get("tiers")
        and not any("data_parallel_group" in group for group in tables["replicas"])
        and not any("pipeline_parallel" in group for group in tables["replicas"])
        and not any(feature.keeps_model(tables, of_fleet=True) for feature in features_in(tables))
        and tables["model"]["name"] == "meta-llama/Llama-3.1-8B"
        and "preset" not in tables.get("autoscale", {})
    )


def _latencies(rng: Rng, tables: Tables) -> None:
    """Some replicas become slower or faster by command, and some of these are turned back."""
    if not chance(rng, 0.2):
        return
    commands: list[Tables] = []
    for replica in range(sum(group["count"] for group in tables["replicas"])):
        at_s = float(pick(rng, TIMES_S))
        factors = (float(pick(rng, (0.5, 1.7, 4.0))), 1.0)[: 1 + chance(rng, 0.5)]
        for factor in factors if chance(rng, 0.5) else ():
            turned = {"at_s": at_s, "replica": replica, "command": "set_latency"}
            commands.append({**turned, "factor": factor})
            at_s += float(pick(rng, TIMES_S))
    if commands:
        tables["commands"] = [*tables.get("commands", ()), *commands]
