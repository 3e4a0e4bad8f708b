"""The second model restates engines, front ends, KV that leaves: what is changed in a record is
found."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

import emu.apps.chaos.trial as trial
from emu.apps.chaos.truth.judges import Written, truth_of
from emu.apps.chaos.truth.seats import seats_of
from emu.apps.chaos.truth.tape import Tape
from emu.apps.chaos.truth.variation import judge_variation
from emu.apps.chaos.worlds import narrow
from emu.apps.chaos.worlds.world import World
from emu.rng import rng_stream

Records = list[dict[str, Any]]
Scene = Callable[[Any, dict[str, Any]], list[dict[str, Any]]]


@functools.cache
def judged(scene: Scene, seed: int) -> tuple[Any, Any, Records, Written]:
    """What the truth was given of one world of a scene, in which nothing is wrong."""
    rng = rng_stream(seed, "test")
    tables: dict[str, Any] = {
        "seed": 2,
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "nodes": [{"count": 2, "gpus": 2, "gpu": "A100-SXM4-80GB", "host_memory_gib": 64.0}],
        "replicas": [{"role": "colocated", "count": 1}],
        "latency": {"backend": "linear", "base_us": 1000.0, "per_token_us": 50.0},
        "router": {"policy": "load"},
        "workload": {"oversized": "reject"},
        "network": {},
    }
    lines = scene(rng, tables)
    tables.pop("faults", None)
    found: list[tuple[Any, Any, Records, Written]] = []

    def grab(config: Any, plan: Any, records: Records, written: Written) -> Any:
        found.append((config, plan, records, written))
        return truth_of(config, plan, records, written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "truth_of", grab)
        verdict = trial.run_world(World(tables, lines, heals=True), 1)
    assert verdict.problems == []
    return found[0]


def _of(records: Records, event: str) -> Records:
    return [record for record in records if record["event"] == event]


def _shorter_piece(records: Records) -> None:
    batch = next(b for b in _of(records, "batch") if any(m[2] > 2 for m in b["members"]))
    next(m for m in batch["members"] if m[2] > 2)[2] -= 1


def _youngest_first(records: Records) -> None:
    """Two requests that came one after the other have changed places in the queue."""
    queued = _of(records, "queued")
    rows = [record["row"] for record in queued]
    for record, row in zip(queued, reversed(rows), strict=True):
        record["row"] = row


def _later_transfer(records: Records) -> None:
    [r for r in _of(records, "transfer") if r["kind"] == "kv"][-1]["latency_ns"] += 1


def _later_first_token(records: Records) -> None:
    next(r for r in _of(records, "ended") if r["status"] == "completed")["first_out"] += 1


def _later_last_token(records: Records) -> None:
    next(r for r in _of(records, "ended") if r["status"] == "completed")["last_out"] += 1


def _later_intake(records: Records) -> None:
    _of(records, "queued")[3]["at_ns"] += 1


def _refused_for_nothing(records: Records) -> None:
    done = next(r for r in _of(records, "ended") if r["status"] == "completed")
    done["status"], done["reason"] = "rejected", "overloaded"


def _finds_a_block_more(records: Records) -> None:
    began: set[int] = set()
    for member in (member for batch in _of(records, "batch") for member in batch["members"]):
        if member[0] not in began and member[1]:
            member[1] += 4
            member[2] = max(1, member[2] - 4)
            return
        began.add(member[0])


def _finds_nothing(records: Records) -> None:
    began: set[int] = set()
    for batch in _of(records, "batch"):
        for member in batch["members"]:
            if member[0] not in began and member[1]:
                member[1:] = [0, member[1] + member[2]]
                batch.pop("recalls", None)
                return
            began.add(member[0])


@pytest.mark.parametrize(
    ("scene", "seed", "change", "finding"),
    [
        (narrow.pieces, 1, _shorter_piece, "should"),
        (narrow.tensorrt_llm, 1, _shorter_piece, "should"),
        (narrow.sglang, 1, _youngest_first, "first in the queue"),
        (narrow.leaving, 1, _later_transfer, "late, should be"),
        (narrow.leaving, 1, _later_first_token, "has its first token"),
        (narrow.served, 1, _later_last_token, "are with its client"),
        (narrow.served, 1, _later_intake, "is with its engine at"),
        (narrow.crowd, 1, _refused_for_nothing, "requests in the system"),
        (narrow.cached, 1, _finds_a_block_more, "tokens of row"),
        (narrow.cached, 2, _finds_nothing, "tokens of row"),
    ],
)
def test_what_is_changed_is_found(
    scene: Scene, seed: int, change: Callable[[Records], None], finding: str
) -> None:
    config, plan, records, written = judged(scene, seed)
    assert truth_of(config, plan, records, written).problems == []
    changed = copy.deepcopy(records)
    change(changed)
    found = truth_of(config, plan, changed, written).problems
    assert any(finding in line for line in found), found


@pytest.mark.parametrize("more_ns", [60_000, -60_000])
def test_steps_with_another_middle_are_found(more_ns: int) -> None:
    config, plan, records, _ = judged(narrow.varied, 3)
    changed = copy.deepcopy(records)
    for record in _of(changed, "ran"):
        record["at_ns"] += more_ns
        record.pop("stages", None)
    tape = Tape(config, seats_of(plan), changed)
    judge_variation(tape)
    assert any("half of the steps" in line for line in tape.problems)


def test_a_timeseries_that_counts_twice_is_found() -> None:
    config, plan, records, written = judged(narrow.pieces, 1)
    total = 0
    series = []
    for row in written.series:
        total += int(row["completed"])
        series.append({**row, "completed": str(total)})
    found = truth_of(config, plan, records, written._replace(series=series)).problems
    assert any("timeseries.csv counts" in line for line in found)


def test_a_mean_wait_of_another_part_is_found() -> None:
    config, plan, records, written = judged(narrow.pieces, 1)
    load = written.summary["load"]
    changed = {**load, "mean_wait_last_quarter_ms": load["mean_wait_ms"] * 0.9}
    summary = {**written.summary, "load": changed}
    found = truth_of(config, plan, records, written._replace(summary=summary)).problems
    assert any(line.startswith("T4: mean_wait_last_quarter_ms") for line in found)


def test_a_turn_that_waits_for_several_waits_for_the_last_of_them() -> None:
    config, plan, records, written = judged(narrow.crowd, 1)
    lines = copy.deepcopy(list(written.lines))
    session = next(line for line in lines if "sub_requests" in line)
    session["sub_requests"][1]["tool_duration_ns"] += 1_000_000_000
    found = truth_of(config, plan, records, written._replace(lines=lines)).problems
    assert any(line.startswith("T7: request") and "arrives at" in line for line in found)
