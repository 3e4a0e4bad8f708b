"""Properties of disaggregated worlds over random clusters, commands and workloads, no faults.

Each world runs with and without leaps, under a full recount of the books every few events, and an
independent judge reads its history afterwards: conservation of requests, tokens, blocks and
bytes, one inbound batch per destination, locks and states in agreement, legal transitions only,
identical results. `EMU_SOAK=1` (make soak) runs 2,000 examples instead of 200.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import World, draw_world

EXAMPLES = 2_000 if os.environ.get("EMU_SOAK") else 200


def calm_world(seed: int) -> World:
    """The world of a seed without its faults."""
    world = draw_world(seed, requests_max=16)
    world.tables.pop("faults", None)
    return world


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(st.integers(0, 2**31))
def test_books_and_history_of_random_worlds_with_roles(seed: int) -> None:
    world = calm_world(seed)
    roles = {table.get("role") for table in world.tables.get("replicas", [])}
    assume("decode" in roles)
    verdict = run_world(world, seed, every=25)
    assert verdict.problems == [], f"seed {seed}: " + "; ".join(verdict.problems)
    assert sum(verdict.ends.values()) > 0
