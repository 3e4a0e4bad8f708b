"""The third tour and the rules that it visits: real runs agree, changed ones do not."""

from __future__ import annotations

import copy
import csv
import io
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from emu.apps.chaos.truth.helpers import judge_helpers
from emu.apps.chaos.truth.judges import truth_of
from emu.apps.chaos.truth.seats import seats_of
from emu.apps.chaos.truth.tape import Tape
from emu.apps.chaos.worlds.corners import AT, EVERY, draw_corners
from emu.apps.chaos.worlds.forms import FORMS, written
from emu.apps.chaos.worlds.world import draw_world
from emu.cluster.plan import Plan
from tests.chaos.test_truth import Judged, judge_world

BLOCKS, STATES, REFUSALS, SPARES, HELPERS = 0, 16, 40, 136, 144
"""Seeds of such stops."""


def problems(judged: Judged, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the truth says of another history."""
    config, plan, _, its = judged
    return truth_of(config, plan, list(records), its).problems


def test_it_comes_by_at_every_eighth_seed_with_every_stop() -> None:
    assert [seed for seed in range(40) if draw_corners(seed)] == [0, 8, 16, 24, 32]
    stops = range(AT, AT + 11 * EVERY, EVERY)
    assert len({str(draw_world(seed).tables) for seed in stops}) == 11


def test_an_offer_that_is_refused_waits_twice_as_long_each_time() -> None:
    judged = judge_world(draw_world(REFUSALS), REFUSALS)
    records = judged[2]
    refused = [at for at, one in enumerate(records) if one.get("kind") == "destination_refuses"]
    source = records[refused[0]]["target"].partition(" ->")[0]
    its = [at for at in refused if records[at]["target"].startswith(f"{source} ->")]
    later = next(b for a, b in itertools.pairwise(its) if records[a]["at_ns"] < records[b]["at_ns"])
    early = {**records[later], "at_ns": records[later]["at_ns"] - 15_000_000}
    changed = sorted([*records[:later], early, *records[later + 1 :]], key=lambda one: one["at_ns"])
    assert not any("offers again" in problem for problem in problems(judged, records))
    assert any("offers again" in problem for problem in problems(judged, changed))


def test_of_the_spares_of_a_model_the_oldest_makes_room() -> None:
    judged = judge_world(draw_world(SPARES), SPARES)
    gone = [
        at
        for at, one in enumerate(judged[2])
        if (one.get("from"), one.get("to")) == ("shutting_null", "inactive")
    ]
    first, last = gone[0], gone[2]
    changed = list(judged[2])
    names = changed[first]["replica"], changed[last]["replica"]
    changed[first] = {**changed[first], "replica": names[1]}
    changed[last] = {**changed[last], "replica": names[0]}
    assert any("before older ones" in problem for problem in problems(judged, changed))


def test_helpers_get_batches_in_the_order_in_which_they_asked() -> None:
    judged = judge_world(draw_world(HELPERS), HELPERS)
    config, plan, records, its = judged
    assert truth_of(config, plan, records, its).judged["helpers"] > 5
    swapped = [
        {**one, "replica": {0: 1, 1: 0}.get(one["replica"], one["replica"])}
        if one["event"] == "batch" and one["at_ns"] > 50_000_000
        else one
        for one in records
    ]
    tape = Tape(config, seats_of(plan), swapped)
    judge_helpers(tape)
    assert any("asked before" in problem for problem in tape.problems)


@pytest.mark.parametrize("more", [-2, 2])
def test_blocks_are_those_that_the_memory_has_room_for(more: int) -> None:
    config, plan, records, its = judge_world(draw_world(STATES), STATES)
    replica = plan.replicas[0]
    memory = msgspec.structs.replace(
        replica.memory, num_blocks=replica.memory.num_blocks + more * 1000
    )
    other = msgspec.structs.replace(replica, memory=memory)
    changed = msgspec.structs.replace(plan, replicas=(other, *plan.replicas[1:]))
    assert isinstance(changed, Plan)
    found = truth_of(config, changed, records, its).problems
    assert any("has room for" in problem for problem in found)


def test_a_trace_that_names_blocks_is_found_to_the_last_one_begun() -> None:
    judged = judge_world(draw_world(BLOCKS), BLOCKS)
    config, plan, records, its = judged
    assert truth_of(config, plan, records, its).judged["remembered"] > 10
    lines = copy.deepcopy(its.lines)
    for line in lines:
        line["hash_ids"] = line["hash_ids"][: line["input_toks"] // 512]
    found = truth_of(config, plan, records, its._replace(lines=lines)).problems
    assert any("tokens of row" in problem for problem in found)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_form_has_the_times_and_lengths_of_its_lines(form: str) -> None:
    line = {"arrival_time_ns": 1_007_000_000, "input_toks": 31, "output_toks": 7}
    text = written([line], {"format": form}).decode()
    if form == "mooncake":
        row = json.loads(text)
        assert (row["timestamp"], row["input_length"], row["output_length"]) == (1007, 31, 7)
        return
    (cells,) = list(csv.reader(io.StringIO(text)))[1:]
    assert {"31", "7"} <= set(cells)
    assert any("1007" in cell or "1.007" in cell or "01.007" in cell for cell in cells)
