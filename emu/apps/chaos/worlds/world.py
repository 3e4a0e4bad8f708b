"""Random worlds: a cluster, policies, a workload and faults, all drawn from one seed.

Swarm testing: each world switches a random part of the possibilities off and gives the rest
different weights, because uniform mixes cancel themselves out. Delays come from few values, so that
things often happen at the same instant. Worlds are small: some thousand events.

A world is a configuration as plain tables plus the lines of its workload, so that any of them can
be written down as a file. Streams are separate: faults do not change the cluster or the requests.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.apps.chaos.worlds.cluster import draw_cluster
from emu.apps.chaos.worlds.corners import draw_corners
from emu.apps.chaos.worlds.drawing import Tables, chance, pick
from emu.apps.chaos.worlds.engines import draw_engines
from emu.apps.chaos.worlds.experts import draw_lost_ranks, draw_shared_experts
from emu.apps.chaos.worlds.faults import draw_faults, ground_of
from emu.apps.chaos.worlds.kinds import draw_kinds
from emu.apps.chaos.worlds.later import draw_later
from emu.apps.chaos.worlds.models import draw_models, draw_states
from emu.apps.chaos.worlds.policies import ROUTERS, draw_policies, draw_recovery
from emu.apps.chaos.worlds.pressed import draw_pressed
from emu.apps.chaos.worlds.requests import draw_lines
from emu.apps.chaos.worlds.scenes import draw_rare
from emu.apps.chaos.worlds.tour import draw_tour
from emu.apps.chaos.worlds.wide import draw_wide
from emu.config.kinds import KINDS, Struct
from emu.config.rules import drop_idle
from emu.config.schema import RouterTable
from emu.config.tables import tag_of
from emu.rng import rng_stream

KINDS_OF_CLUSTER: Final = (
    *["colocated"] * 3,
    "group",
    *["pool"] * 2,
    *["roles"] * 5,
    *["scaled"] * 5,
)
"""Colocated: fixed, in a data-parallel group, scaled as a pool. Split: fixed, scaled."""


class World(msgspec.Struct):
    """A configuration and its workload."""

    tables: Tables
    lines: list[Tables]
    heals: bool
    """Every fault ends and every replica comes back: all requests must end soon after that."""


def is_newer(kind: Struct) -> bool:
    """A router that is drawn by a stream of its own, so that worlds without it stay the same."""
    return issubclass(kind, RouterTable) and tag_of(kind) not in ROUTERS and not kind.asks


def _made(seed: int, *, wide: bool, lost_ranks: bool) -> World | None:
    """The world of a seed that is a stop of a tour, a scene, or a group that loses a rank."""
    if not (wide or lost_ranks):
        return None
    rare = draw_lost_ranks(seed) if lost_ranks else None
    tour = None if lost_ranks else draw_tour(seed) or draw_kinds(seed) or draw_corners(seed)
    if rare is None and tour is None:
        rare = draw_shared_experts(seed) or draw_rare(seed)
    narrow = None if rare is not None else tour or draw_pressed(seed)
    if rare is not None:
        tables, lines, faults = rare
    elif narrow is not None:
        tables, lines = narrow
    else:
        return None
    own = tables.get("recovery", {})
    heals = draw_recovery(rng_stream(seed, "chaos world"), tables)
    tables["recovery"] |= own
    form = tables.get("workload", {}).get("format")  # idle until the lines are in a file
    drop_idle(tables)
    if form:
        tables["workload"]["format"] = form
    return World(tables if rare is None else tables | {"faults": faults}, lines, heals)


def draw_world(
    seed: int, *, requests_max: int = 60, wide: bool = True, lost_ranks: bool = False
) -> World:
    """The world of a seed.

    `wide`: also keys that plain worlds leave at their defaults (`wide.py`); tests that change
    a world's model, policy or costs take a plain one. `lost_ranks`: a group that shares experts
    and loses a rank (`experts.py`), whatever the seed.
    """
    made = _made(seed, wide=wide, lost_ranks=lost_ranks)
    if made is not None:
        return made
    rng = rng_stream(seed, "chaos world")
    tables: Tables = {"seed": seed}
    kind = pick(rng, KINDS_OF_CLUSTER)
    draw_cluster(rng, tables, kind)
    draw_policies(rng, tables, kind)
    lines = draw_lines(rng_stream(seed, "chaos workload"), requests_max, tables)
    draw_models(seed, tables, lines)
    if wide:
        draw_states(seed, tables)
    heals = draw_recovery(rng, tables)
    span_s = max(line["arrival_time_ns"] for line in lines) / 1e9
    if wide:
        span_s = draw_wide(seed, tables, lines)
    if tables.get("autoscale", {}).get("loader") in ("disk", "cache"):
        # Weights that never come from a disk in time would be loaded for ever.
        tables["recovery"]["load_deadline_s"] *= 4
    if "models" in tables and "autoscale" in tables:
        # What is left of a fleet may be too little for the least that each model is to have.
        heals = tables["recovery"]["replace"] = True
    newer = [name for name, kind in KINDS[RouterTable].kinds.items() if is_newer(kind)]
    later = rng_stream(seed, "chaos routers")
    if newer and chance(later, 0.2):
        tables["router"]["policy"] = pick(later, newer)
    draw_later(seed, tables)
    drop_idle(tables)
    ground = ground_of(tables, heals=heals)
    faults = draw_faults(rng_stream(seed, "chaos faults"), ground, span_s + 0.5)
    if faults:
        tables["faults"] = faults
    if wide:
        draw_engines(seed, tables)
    return World(tables, lines, heals)
