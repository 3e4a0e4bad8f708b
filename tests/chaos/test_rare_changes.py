"""Changes of state that random worlds hardly ever meet: a world for each, run under all checks.

A spare closes in the instant in which it becomes one. It is reused while it is still open only if
it stands still: a replica that was paused before it became a spare, and that the planner gives a
role before it goes on.
"""

from __future__ import annotations

from typing import Any

from emu.apps.chaos.trial import Verdict, run_world
from emu.apps.chaos.worlds.world import World
from tests.cluster.helpers import LINEAR

DECODES = (1, 2)


def verdict_of(
    faults: list[dict[str, Any]],
    *,
    inputs: int,
    outputs: int,
    replicas: list[dict[str, Any]],
    autoscale: dict[str, Any],
    blocks: int = 4000,
) -> Verdict:
    """Forty requests after half a second of calm."""
    lines = [
        {"input_toks": inputs, "output_toks": outputs, "arrival_time_ns": 500_000_000 + i * 1000}
        for i in range(40)
    ]
    tables: dict[str, Any] = {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"count": 4, "gpus": 1, "gpu": "A100-SXM4-80GB", "nic_gbps": 100.0}],
        "replicas": replicas,
        "scheduler": {"policy": "fcfs", "num_blocks": blocks},
        "latency": LINEAR,
        "autoscale": {"executor": "blitz", "mutate": False, "spare_ttl_ms": 60_000.0, **autoscale},
        "recovery": {"progress_deadline_ms": 5000.0, "restart_s": 0.5},
        "faults": faults,
    }
    verdict = run_world(World(tables, lines, heals=True), 0, every=1)
    assert verdict.problems == []
    assert verdict.ends == {"completed": len(lines)}
    return verdict


def spare_that_stands_still(*more: dict[str, Any], pause_s: float = 1.0, **demand: Any) -> Verdict:
    """One prefill and two decode replicas; the idle ones are paused, and one is too many."""
    pauses = [
        {"at_s": 0.0, "kind": "pause", "replica": replica, "duration_s": pause_s}
        for replica in DECODES
    ]
    return verdict_of(
        [*pauses, *more],
        replicas=[{"role": "prefill", "count": 1}, {"role": "decode", "count": 2}],
        **demand,
    )


MORE_PREFILL: dict[str, Any] = {
    "inputs": 2000,
    "outputs": 1,
    "autoscale": {"max_prefill": 2, "max_decode": 1, "prefill_lower_s": 0.05},
}


def test_an_open_spare_is_reused_for_decode() -> None:
    autoscale = {"max_prefill": 1, "decode_lower": 0.1, "decode_upper": 0.2}
    seen = spare_that_stands_still(inputs=500, outputs=100, autoscale=autoscale, blocks=300)
    assert seen.transitions["shutting_null -> decode"] == 1


def test_an_open_spare_is_reused_for_prefill_and_closes_when_it_goes_on() -> None:
    seen = spare_that_stands_still(**MORE_PREFILL)
    assert seen.transitions["shutting_null -> aus_prefill"] == 1
    assert seen.transitions["aus_prefill -> prefill"] == 1


def test_it_crashes_before_it_is_closed() -> None:
    crash = {"at_s": 0.4, "kind": "replica_crash", "stage": "aus_prefill"}
    seen = spare_that_stands_still(crash, **MORE_PREFILL)
    assert seen.transitions["shutting_null -> aus_prefill"] == 1
    assert seen.transitions["aus_prefill -> failed"] == 1


def test_a_replica_that_still_gives_work_back_crashes() -> None:
    crash = {"at_s": 0.0, "kind": "replica_crash", "stage": "refractory_prefill"}
    seen = verdict_of(
        [crash],
        inputs=2000,
        outputs=2,
        replicas=[{"role": r, "count": 1} for r in ("prefill", "decode", "inactive")],
        autoscale={"live": True, "multicast": "chain", "max_prefill": 2, "max_decode": 1},
    )
    assert seen.transitions["refractory_prefill -> failed"] == 1


def test_a_live_load_that_is_given_up_leaves_no_kv_behind() -> None:
    """The source dies while halves of prompts wait at the new replica for a destination."""
    faults = [
        {"at_s": 0.0, "kind": "destination_refuses", "duration_s": 3.0},
        {"at_s": 1.3, "kind": "replica_crash", "stage": "source", "duration_s": 0.5},
    ]
    seen = verdict_of(
        faults,
        inputs=2000,
        outputs=2,
        replicas=[
            {"role": "prefill", "count": 1},
            {"role": "decode", "count": 2},
            {"role": "inactive", "count": 1},
        ],
        autoscale={"live": True, "multicast": "chain", "max_prefill": 2, "min_decode": 2},
    )
    assert seen.transitions["new_prefill -> inactive"] == 1
