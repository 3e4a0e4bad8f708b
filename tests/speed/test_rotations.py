"""Batches of a pipeline, and waves of a group, follow each other as one leap; nothing changes.

Chaos worlds of vLLM's policy on pipelines of two to four stages: arrivals, cancellations, crashes,
pauses, stragglers, roles and commands end such a leap anywhere. As many worlds are run as it takes
to see it end in the first round, later, and with several batches in turn.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import World, draw_world
from emu.replica.flight.staged import Staged
from emu.replica.wave import Part
from emu.rng import rng_stream
from emu.scheduling.rotation import Rotation
from tests.speed.policies import change_policy

SEEDS_MAX = 300
ENDS_MIN = 2000
EVERY_END = {(part, turns) for part in ("first", "later") for turns in (1, 2, 3)}


def world_of(seed: int) -> World | None:
    """The chaos world of a seed on pipelines; None if its replicas need what has one stage."""
    world = draw_world(seed, wide=False)
    tables: dict[str, Any] = world.tables
    groups = tables["replicas"]
    if "autoscale" in tables or tables["network"].get("tiers") or "adapters" in tables:
        return None
    if any("data_parallel_group" in g or g.get("tensor_parallel", 1) > 1 for g in groups):
        return None
    rng = rng_stream(seed, "worlds of pipelines")
    stages = int(rng.integers(2, 5))
    for group in groups:
        group["pipeline_parallel"] = stages
    for node in tables["nodes"]:
        node["gpus"] = node.get("gpus", 8) * stages
    if seed % 2:
        tables["model"] = {"name": "meta-llama/Llama-3.2-1B"}
        tables["latency"] = {"backend": "roofline", "host_overhead": bool(rng.integers(2))}
        if tables["latency"]["host_overhead"]:
            tables["latency"]["jitter"] = bool(rng.integers(2))
    change_policy(tables["scheduler"], "vllm")
    tables["scheduler"] |= {"prefix_caching": False, "async_scheduling": "off"}
    for line in world.lines:
        line["arrival_time_ns"] //= 4
    return world


@pytest.mark.slow
@pytest.mark.doubles
def test_ends_of_rotations_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    advance = Staged.advance

    def advanced(self: Staged, rotation: Rotation, ended: int) -> None:
        turns = len(rotation.turns)
        if ended > rotation.done:
            seen["first" if ended <= turns else "later", turns] += 1
        advance(self, rotation, ended)

    monkeypatch.setattr(Staged, "advance", advanced)
    for seed in range(SEEDS_MAX):
        world = world_of(seed)
        if world is None:
            continue
        verdict = run_world(world, seed, every=40)
        problems = [
            line
            for line in verdict.problems
            if "one pipeline stage" not in line and "drafts in a pipeline" not in line
        ]
        assert problems == [], f"{seed=}: {problems[:3]}"
        if seen.total() > ENDS_MIN and set(seen) >= EVERY_END:
            return
    raise AssertionError(f"the worlds of {SEEDS_MAX} seeds show too little: {seen}")


EVERY_STOP = {"running", "waiting", "pacing"}
STOPS_MIN = 120


def group_of(seed: int) -> World | None:
    """The chaos world of a seed with a data-parallel group; None if it cannot have one."""
    world = draw_world(seed, wide=False)
    tables: dict[str, Any] = world.tables
    groups = tables["replicas"]
    if tables["network"].get("tiers") or groups[0]["role"] != "colocated":
        return None
    if not any("data_parallel_group" in group for group in groups):
        if "autoscale" in tables or "pipeline_parallel" in groups[0]:
            return None
        groups[0] |= {"count": max(2, groups[0]["count"]), "data_parallel_group": "A"}
        for node in tables["nodes"]:
            node["gpus"] = 8
    rng = rng_stream(seed, "worlds of groups")
    if seed % 2:
        shares = bool(rng.integers(2))
        name = "Qwen/Qwen3-30B-A3B" if shares else "meta-llama/Llama-3.2-1B"
        tables["model"] = {"name": name}
        tables["latency"] = {"backend": "roofline", "jitter": bool(rng.integers(2))}
    return world


@pytest.mark.slow
def test_stops_of_waves_that_leap_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    unroll = Part.unroll

    def unrolled(self: Part) -> None:
        if not self.is_pending:
            is_waiting = self.member.is_waiting
            seen["pacing" if self.is_dummy else "waiting" if is_waiting else "running"] += 1
        unroll(self)

    monkeypatch.setattr(Part, "unroll", unrolled)
    for seed in range(SEEDS_MAX):
        world = group_of(seed)
        if world is None:
            continue
        verdict = run_world(world, seed, every=40)
        problems = [line for line in verdict.problems if "input refused" not in line]
        assert problems == [], f"{seed=}: {problems[:3]}"
        if seen.total() > STOPS_MIN and set(seen) == EVERY_STOP:
            return
    raise AssertionError(f"the worlds of {SEEDS_MAX} seeds show too little: {seen}")
