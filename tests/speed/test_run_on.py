"""A batch that ends prompts runs on into the decodes that follow it, and nothing changes.

Chaos worlds of colocated replicas with vLLM's policy and counted blocks: arrivals, cancellations,
crashes, pauses, stragglers and commands cut such a batch at its first step and later. Every cut must
leave what stepping would have left. As many worlds are run as it takes to see every kind of cut.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import World, draw_world
from emu.rng import rng_stream
from emu.scheduling.base import Batch, Progress
from emu.scheduling.running import RunningSet
from tests.speed.policies import change_policy

SEEDS_MAX = 400
ENDS_MIN = 100
EVERY_CUT = {"all", "first only", "cut", "split later"}


def world_of(seed: int) -> World | None:
    """The chaos world of a seed, made to run on; None if its replicas have roles or tiers."""
    world = draw_world(seed, wide=False)
    tables: dict[str, Any] = world.tables
    groups = tables["replicas"]
    if groups[0]["role"] != "colocated" or "autoscale" in tables or tables["network"].get("tiers"):
        return None
    if any("data_parallel_group" in g or "pipeline_parallel" in g for g in groups):
        return None
    rng = rng_stream(seed, "worlds that run on")
    tables["model"] = {"name": "meta-llama/Llama-3.2-1B"}
    tables["latency"] = {"backend": "roofline", "host_overhead": bool(rng.integers(2))}
    tables["router"]["signal_delay_ms"] = 0.0
    change_policy(tables["scheduler"], "vllm")
    tables["scheduler"] |= {
        "prefix_caching": False,
        "async_scheduling": ("auto", "on", "off")[int(rng.integers(3))],
        "max_num_batched_tokens": 2048,
    }
    return world


@pytest.mark.doubles
@pytest.mark.slow
def test_cuts_of_batches_that_ran_on_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    complete, split = RunningSet.complete, RunningSet.split

    def completed(
        self: RunningSet, batch: Batch, steps: int, now_ns: int, longest_ns: int
    ) -> Progress:
        if batch.run_on is not None:
            how = "all" if steps == batch.max_steps else "first only" if steps == 1 else "cut"
            seen[how] += 1
        return complete(self, batch, steps, now_ns, longest_ns)

    def was_split(
        self: RunningSet, batch: Batch, steps: int, now_ns: int, longest_ns: int
    ) -> Progress:
        if batch.run_on is not None:
            seen["split after the first" if steps == 1 else "split later"] += 1
        return split(self, batch, steps, now_ns, longest_ns)

    monkeypatch.setattr(RunningSet, "complete", completed)
    monkeypatch.setattr(RunningSet, "split", was_split)
    for seed in range(SEEDS_MAX):
        world = world_of(seed)
        if world is None:
            continue
        verdict = run_world(world, seed, every=40)
        assert verdict.problems == [], f"{seed=}: {verdict.problems[:3]}"
        if seen.total() > ENDS_MIN and set(seen) >= EVERY_CUT:
            return
    raise AssertionError(f"the worlds of {SEEDS_MAX} seeds show too little: {seen}")
