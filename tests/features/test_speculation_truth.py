"""The second model restates drafts: rates and counts that are changed are found."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from emu.apps.chaos.truth.drafts import Drafts
from emu.apps.chaos.truth.judges import truth_of
from emu.apps.chaos.truth.seats import seats_of
from emu.apps.chaos.truth.tape import Tape
from emu.apps.chaos.worlds import narrow
from tests.chaos.test_truth_of_engines import judged

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "acceptance_rate": 0.5}


def speculating(rng: Any, tables: dict[str, Any]) -> list[dict[str, Any]]:
    lines = narrow.burst(rng, 20, (10, 100), (30, 60))
    tables["scheduler"] = {"policy": "vllm", "num_blocks": 2000, "speculative_config": DRAFTS}
    return lines


def test_drafts_are_held_against_their_rate() -> None:
    config, plan, records, written = judged(speculating, 1)
    tape = truth_of(config, plan, records, written)
    assert tape.judged["accepted_drafts"] == 1
    assert tape.judged["draft_counts"] == 1
    keys = {"acceptance_rate": 0.8}
    drafts = msgspec.structs.replace(config.scheduler.speculative_config, **keys)
    seats = [
        msgspec.structs.replace(
            seat, scheduler=msgspec.structs.replace(seat.scheduler, speculative_config=drafts)
        )
        for seat in seats_of(plan)
    ]
    again = Tape(config, seats, records)
    Drafts(again, written.lines).judge(written.summary)
    assert "are accepted, expected" in again.problems[0]


@pytest.mark.parametrize("key", ["num_drafts", "num_draft_tokens", "num_accepted_tokens"])
def test_drafts_are_counted(key: str) -> None:
    config, plan, records, written = judged(speculating, 1)
    summary = copy.deepcopy(written.summary)
    summary["speculation"][key] += 2 * 60
    problems = truth_of(config, plan, records, written._replace(summary=summary)).problems
    assert "the summary counts" in problems[0]
