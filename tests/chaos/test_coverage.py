"""What a campaign says it has visited: keys of the schema, parts that faults struck."""

from __future__ import annotations

import functools
from typing import Any

from emu.apps.chaos.not_drawn import NOT_DRAWN
from emu.apps.chaos.schema_keys import keys_of, schema_keys
from emu.apps.chaos.strikes import STRIKES, Place, fault_parts
from emu.apps.chaos.worlds.world import draw_world
from emu.config.faultkinds import FAULT_KINDS


@functools.cache
def drawn() -> frozenset[str]:
    return frozenset().union(*(keys_of(draw_world(seed).tables) for seed in range(1400)))


def test_every_key_is_drawn_or_stands_on_the_list() -> None:
    missing = set(schema_keys()) - drawn() - NOT_DRAWN.keys()
    assert missing == set()


def test_no_key_on_the_list_is_drawn_or_unknown() -> None:
    listed = set(NOT_DRAWN)
    assert listed & drawn() == set()
    assert listed <= set(schema_keys())
    assert drawn() <= set(schema_keys())
    assert len(NOT_DRAWN) <= 43


def test_keys_are_found_in_unions_lists_and_inline_tables() -> None:
    tables: dict[str, Any] = {
        "latency": {"backend": "linear", "base_us": 1.0},
        "scheduler": {"block_size": 1, "prefix_caching": False},
        "nodes": [{"gpus": 1}, {"gpu": {"sm_count": 3}}, {"gpu": "H100"}],
        "faults": [{"at_s": 0.0, "kind": "straggler", "factor": 2.0}],
    }
    assert keys_of(tables) == {
        "latency.backend=linear",
        "latency.backend",
        "latency.base_us",
        "scheduler.policy=vllm",
        "scheduler.block_size",
        "scheduler.prefix_caching",
        "nodes.gpus",
        "nodes.gpu",
        "nodes.gpu.sm_count",
        "faults.kind=straggler",
        "faults.at_s",
        "faults.kind",
        "faults.factor",
    }
    assert keys_of(tables) <= set(schema_keys())


def test_faults_are_counted_by_the_part_that_the_replica_played() -> None:
    places = [Place(0, (0,), "prefill"), Place(0, (1,), "decode"), Place(1, (2,), "inactive")]

    def fault(kind: str, target: str) -> dict[str, Any]:
        return {"at_ns": 0, "event": "fault", "kind": kind, "target": target}

    records = [
        fault("pause", "replica 0"),
        {"at_ns": 1, "event": "state", "replica": 0, "from": "prefill", "to": "old_prefill"},
        {"at_ns": 1, "event": "state", "replica": 2, "from": "inactive", "to": "new_prefill"},
        fault("pause", "replica 0"),
        fault("kv_shrink", "replica 1: 5 blocks"),
        fault("node_crash", "machine 0 (replica 0, replica 1)"),
        fault("gpu_crash", "GPU 2 (replica 2)"),
        fault("transfer_hang", "kv 0 -> 1"),
        fault("load_stuck", "weights of replica 2"),
        fault("swizzle", "2 machines"),
        fault("planner_restart", "planner"),
    ]
    assert fault_parts(records, places) == {
        "pause on prefill": 1,
        "pause on old_prefill": 1,
        "kv_shrink on decode": 1,
        "node_crash on old_prefill": 1,
        "node_crash on decode": 1,
        "gpu_crash on new_prefill": 1,
        "transfer_hang on old_prefill": 1,
        "transfer_hang on decode": 1,
        "load_stuck on new_prefill": 1,
    }


def test_strikes_name_kinds_of_the_catalogue() -> None:
    assert {name.partition(" on ")[0] for name in STRIKES} <= FAULT_KINDS.keys()
