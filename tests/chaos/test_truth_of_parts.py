"""What the truth says of the parts that the tour visits: real runs agree, changed ones do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from emu.apps.chaos.truth.judges import truth_of
from emu.apps.chaos.truth.made import judge_made
from emu.apps.chaos.truth.seats import seats_of
from emu.apps.chaos.truth.tape import Tape
from emu.apps.chaos.worlds.tour import EVERY, draw_tour
from emu.apps.chaos.worlds.world import draw_world
from tests.chaos.test_truth import Judged, judge_world

ADAPTERS, MASKS, GROUPS, MADE = 6, 26, 34, 54
"""Seeds of such stops."""


def problems(judged: Judged, **changed: Any) -> list[str]:
    """What the truth says where parts of what was written differ."""
    config, plan, records, written = judged
    return truth_of(config, plan, records, written._replace(**changed)).problems


@pytest.mark.parametrize(
    ("seed", "section", "key"),
    [
        (ADAPTERS, "adapters", "hits"),
        (ADAPTERS, "adapters", "cold_loads"),
        (MASKS, "guided", "masks"),
    ],
)
def test_counts_of_features_are_those_of_the_steps(seed: int, section: str, key: str) -> None:
    judged = judge_world(draw_world(seed), seed)
    assert problems(judged) == []
    summary = copy.deepcopy(judged[3].summary)
    summary[section][key] += 1
    assert any(key in problem for problem in problems(judged, summary=summary))


@pytest.mark.parametrize("seed", [ADAPTERS, MASKS])
def test_steps_with_features_take_their_time(seed: int) -> None:
    """One that is later by a microsecond is found, in one of many places at least."""
    config, plan, records, written = judge_world(draw_world(seed), seed)
    found = 0
    for place in [at for at, one in enumerate(records) if one["event"] == "ran"][3:40:12]:
        changed = [*records[:place], {**records[place], "at_ns": 10**12}, *records[place + 1 :]]
        found += bool(truth_of(config, plan, changed, written).problems)
    assert found


def test_events_of_groups_are_fewer() -> None:
    config, plan, records, written = judge_world(draw_world(GROUPS), GROUPS)
    assert truth_of(config, plan, records, written).judged["output_events"] > 10
    whole = [
        {**one, "last_out": one["last_out"] + 1} if one["event"] == "ended" else one
        for one in records
    ]
    assert any("with its client" in p for p in truth_of(config, plan, whole, written).problems)


def test_made_workloads_that_keep_another_law_are_found() -> None:
    config, plan, records, written = judge_world(draw_world(MADE), MADE)

    def told(key: str, factor: int) -> list[str]:
        rows = [{**row, key: str(factor * int(row[key]))} for row in written.rows]
        tape = Tape(config, seats_of(plan), records)
        judge_made(tape, rows)
        return tape.problems

    assert told("arrival_ns", 1) == []
    assert any("arriv" in problem for problem in told("arrival_ns", 2))
    assert any("prompts" in problem for problem in told("prompt_toks", 3))


def test_the_tour_comes_by_at_every_fourth_seed_with_every_stop() -> None:
    assert [seed for seed in range(20) if draw_tour(seed)] == [2, 6, 10, 14, 18]
    kinds = {str(draw_world(seed).tables["scheduler"]) for seed in range(2, 2 + 26 * EVERY, EVERY)}
    assert len(kinds) >= 12
