"""What the truth says of callers, their number and rate, and of models that have callers each."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from emu.apps.chaos.truth.judges import truth_of
from emu.apps.chaos.worlds.world import draw_world
from tests.chaos.test_truth import Judged, judge_world

LOOP, DENSE, GAMMA, MODELS, DRAFTS, OVERLOAD = 106, 214, 162, 98, 49, 19


def told(judged: Judged, **workload: Any) -> list[str]:
    """What the truth says where the configuration has asked for another workload."""
    config, plan, records, written = judged
    table = msgspec.structs.replace(config.workload, **workload)
    other = msgspec.structs.replace(config, workload=table)
    return truth_of(other, plan, records, written).problems


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "rule", "asked"),
    [
        (LOOP, "closed_loop", {"concurrency": 2}),
        (DENSE, "arrival", {"rate_per_s": 51.0}),
        (DENSE, "arrival", {"upscale": 3}),
    ],
)
def test_lines_come_as_often_as_is_asked_for(seed: int, rule: str, asked: dict[str, Any]) -> None:
    judged = judge_world(draw_world(seed), seed)
    config, plan, records, written = judged
    assert truth_of(config, plan, records, written).judged[rule] > 10
    assert any(problem.startswith("T7: ") for problem in told(judged, **asked))


@pytest.mark.slow
@pytest.mark.parametrize(("cv", "is_found"), [(1.0, True), (0.0, False)])
def test_gaps_of_another_variation_are_found(cv: float, is_found: bool) -> None:
    """0 = as they were drawn."""
    judged = judge_world(draw_world(GAMMA), GAMMA)
    made = judged[0].workload.synthetic
    assert made is not None
    arrivals = msgspec.structs.replace(made.arrivals, cv=cv or made.arrivals.cv)
    found = told(judged, synthetic=msgspec.structs.replace(made, arrivals=arrivals))
    assert any("gaps" in problem for problem in found) == is_found


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["completed", "p99_ttft_ms", "mean_tpot_ms", "slo_attainment"])
def test_a_figure_of_a_model_that_its_rows_do_not_say_is_found(figure: str) -> None:
    config, plan, records, written = judge_world(draw_world(MODELS), MODELS)
    summary = copy.deepcopy(written.summary)
    name = next(iter(summary["models"]))
    summary["models"][name][figure] += 1
    problems = truth_of(config, plan, records, written._replace(summary=summary)).problems
    assert any(f"{figure} of model" in problem for problem in problems)


@pytest.mark.slow
def test_a_step_that_verifies_a_token_more_is_found() -> None:
    config, plan, records, written = judge_world(draw_world(DRAFTS), DRAFTS)
    assert truth_of(config, plan, records, written).judged["verified"] > 10
    changed = [dict(record) for record in records]
    step = next(record for record in changed if record.get("verified", [0])[0])
    step["verified"] = [step["verified"][0], step["verified"][1] + 1, step["verified"][2]]
    problems = truth_of(config, plan, changed, written).problems
    assert any("verifies" in problem for problem in problems)


@pytest.mark.slow
def test_an_overload_of_another_strength_is_found() -> None:
    config, plan, records, written = judge_world(draw_world(OVERLOAD), OVERLOAD)
    assert truth_of(config, plan, records, written).judged["overload"] > 3
    faults = [
        msgspec.structs.replace(fault, factor=fault.factor + 1)
        if fault.kind == "overload"
        else fault
        for fault in config.faults
    ]
    other = msgspec.structs.replace(config, faults=faults)
    problems = truth_of(other, plan, records, written).problems
    assert any("copies arrive" in problem for problem in problems)
