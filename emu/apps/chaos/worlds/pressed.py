"""Worlds built around rules of the truth that plain worlds seldom ask.

A part of the worlds without a rare scene. Each keeps to what its rule is judged on: memory that is
too small, so that requests are preempted and go on first; queues with an order of their own;
machines whose power is counted; groups that step together. A stream of its own decides, so that
other worlds stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, chance, pick
from emu.apps.chaos.worlds.narrow import (
    burst,
    cached,
    crowd,
    featured,
    leaving,
    pieces,
    served,
    sglang,
    small_world,
    tensorrt_llm,
    turns,
    varied,
)
from emu.apps.chaos.worlds.policies import SCHEDULERS
from emu.config.schema import LightLlmTable, VllmTable
from emu.config.tables import tag_of
from emu.features.registry import all_features
from emu.rng import rng_stream

_PART: Final = 0.45
_POWER: Final[Tables] = {
    "base_node_w": 60.0,
    "gpu_idle_w": 60.0,
    "gpu_active_w": 400.0,
    "cpu_idle_w": 50.0,
    "cpu_active_w": 200.0,
    "dram_idle_w_per_dimm": 3.0,
    "dram_pj_per_bit": 5.0,
    "link_idle_w": 1.0,
    "link_pj_per_bit": 8.0,
}


def draw_pressed(seed: int) -> tuple[Tables, list[Tables]] | None:
    """The tables and lines of such a world; None for most seeds."""
    rng = rng_stream(seed, "chaos pressed")
    if not chance(rng, _PART):
        return None
    tables = small_world(rng, seed, replicas_max=3)
    return tables, pick(rng, _SCENES)(rng, tables)


def _memory(rng: Rng, tables: Tables) -> list[Tables]:
    """Prompts that fit, and outputs that do not."""
    block = int(pick(rng, (1, 4, 16)))
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "block_size": block,
        "num_blocks": int(rng.integers(24, 40)) * 16 // block,
        "max_num_seqs": int(pick(rng, (6, 16))),
        "prefix_caching": chance(rng, 0.3),
        "async_scheduling": pick(rng, ("auto", "off", "on")),
    }
    return burst(rng, int(rng.integers(15, 40)), (10, 60), (40, 150))


def _queue(rng: Rng, tables: Tables) -> list[Tables]:
    """More requests than places, with priorities, deadlines and tenants."""
    others = [name for name in SCHEDULERS if name != "fcfs"]
    policy = pick(rng, [*[tag_of(VllmTable)] * 4, *others])
    order = pick(rng, ("priority", "deadline", "fair"))
    places = "max_num_seqs" if policy == tag_of(VllmTable) else "batch_size_cap"
    tables["scheduler"] = {"policy": policy, "num_blocks": 2000, "order": order, places: 3}
    if policy == tag_of(VllmTable):
        tables["scheduler"]["async_scheduling"] = pick(rng, ("off", "off", "auto"))
    elif policy == tag_of(LightLlmTable):
        tables["scheduler"]["max_waiting_iters"] = int(pick(rng, (1, 3)))
    lines = burst(rng, int(rng.integers(20, 40)), (5, 200), (1, 20))
    for line in lines:
        line["tenant"] = f"t{int(rng.integers(3))}"
        if order == "priority":
            line["priority"] = int(rng.integers(3))
        elif order == "deadline" and chance(rng, 0.7):
            line["deadline_ns"] = int(pick(rng, (0, 20_000_000, 500_000_000)))
    return lines


def _power(rng: Rng, tables: Tables) -> list[Tables]:
    """Machines whose power is counted, part by part."""
    tables["scheduler"] = {"policy": tag_of(VllmTable), "num_blocks": 2000}
    tables["power"] = {**_POWER, "gpu_standby_w": 80.0, "gpu_standby_s": float(rng.random())}
    tables["replicas"][0]["tensor_parallel"] = int(pick(rng, (1, 2)))
    tables["replicas"][0]["count"] = 2
    for feature in all_features():
        feature.draw_late(rng, tables)
    lines = burst(rng, int(rng.integers(10, 30)), (20, 400), (2, 60))
    for line in lines[len(lines) // 2 :]:  # a rest that is longer than what counts as standby
        line["arrival_time_ns"] += 3_000_000_000
    return lines


def _group(rng: Rng, tables: Tables) -> list[Tables]:
    """Members of a group that wait for each other, and have different work."""
    tables["replicas"] = [
        {"role": "colocated", "count": int(rng.integers(2, 5)), "data_parallel_group": "A"}
    ]
    tables["scheduler"] = {
        "policy": tag_of(VllmTable),
        "num_blocks": int(pick(rng, (60, 2000))),
        "max_num_batched_tokens": int(pick(rng, (64, 512))),
        "max_num_seqs": 16,
    }
    return burst(rng, int(rng.integers(10, 40)), (5, 300), (1, 60))


_SCENES: Final[Sequence[Callable[[Rng, Tables], list[Tables]]]] = (
    *(_memory, _memory, _memory),
    *(_queue, _queue),
    *(_power, _group, crowd, leaving, turns, varied, served),
    *(cached, cached, featured, featured),
    *(pieces, pieces, sglang, sglang, tensorrt_llm, tensorrt_llm),
)
