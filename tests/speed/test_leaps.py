"""Leaps change nothing: the same bytes with and without them, over random worlds.

The worlds are those of the chaos campaign (schedulers, arrivals, preemption, prefix caching,
roles, scaling, commands, cancellations, faults). Half of them get costs from the roofline
instead, of dense, mixture-of-experts and sliding-window models, because the scheduler that forms
batches ahead runs only with it. A third of the worlds is short of KV blocks, so that requests are
preempted. `make soak` runs 300 seeds; the suite a few.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import World, draw_world
from emu.rng import rng_stream
from tests.speed.policies import change_policy

SOAK_SEEDS = 300
GROWING = ("vllm", "vllm_v0", "sarathi")
"""Policies whose requests take blocks as they grow, and may lose them."""
MODELS = ("meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-30B-A3B")


def world_of(seed: int) -> World:
    """The chaos world of a seed; every other one with the roofline and a drawn model."""
    world = draw_world(seed, wide=False)
    if seed % 2:
        rng = rng_stream(seed, "leap worlds")
        tables: dict[str, Any] = world.tables
        tables["model"] = {"name": MODELS[int(rng.integers(len(MODELS)))]}
        tables["latency"] = {"backend": "roofline", "host_overhead": bool(rng.integers(4))}
        scheduler = tables["scheduler"]
        if "autoscale" not in tables and rng.random() < 0.7:
            change_policy(scheduler, "vllm")
        if scheduler["policy"] == "vllm":
            scheduler["async_scheduling"] = ("auto", "on", "off")[int(rng.integers(3))]
    return world


def tight(world: World, seed: int) -> World:
    """Every third world is a burst on blocks for little more than one request: preemptions."""
    if seed % 3:
        return world
    rng = rng_stream(seed, "tight worlds")
    turns = [turn for line in world.lines for turn in line.get("sub_requests", [line])]
    for turn in turns:
        if "output_tok_ids" not in turn and rng.random() < 0.7:
            turn["output_toks"] = 120
    for line in world.lines:
        line["arrival_time_ns"] //= 8
    scheduler: dict[str, Any] = world.tables["scheduler"]
    longest = max(turn["input_toks"] + turn["output_toks"] for turn in turns)
    scheduler["num_blocks"] = int(longest * rng.uniform(1.1, 2.0)) // scheduler["block_size"] + 2
    if "autoscale" not in world.tables and scheduler["policy"] not in GROWING:
        change_policy(scheduler, GROWING[int(rng.integers(len(GROWING)))])
    scheduler["max_num_seqs" if scheduler["policy"] == "vllm" else "batch_size_cap"] = 64
    if scheduler["policy"] == "fcfs":
        del scheduler["batch_size_cap"]
    return world


def check(seed: int) -> None:
    """Run the world twice; nothing may be wrong, differences least of all."""
    verdict = run_world(tight(world_of(seed), seed), seed, every=10**9)
    assert verdict.problems == [], f"{seed=}: {verdict.problems[:3]}"
    assert sum(verdict.ends.values()) > 0, f"{seed=}: nothing was run"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_leaps_change_nothing(seed: int) -> None:
    check(seed)


@pytest.mark.soak
@pytest.mark.skipif(not os.environ.get("EMU_SOAK"), reason="long: make soak")
@pytest.mark.parametrize("seed", range(24, SOAK_SEEDS + 24))
def test_leaps_change_nothing_in_many_worlds(seed: int) -> None:
    check(seed)
