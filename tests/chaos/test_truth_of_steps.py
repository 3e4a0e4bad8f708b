"""What the truth says of steps of the roofline: the second model agrees with the first one."""

from __future__ import annotations

import pytest

from emu.apps.chaos.truth.judges import truth_of
from emu.apps.chaos.truth.made_times import made_of
from emu.apps.chaos.truth.step_times import is_restated
from emu.apps.chaos.truth.steps import step_of
from emu.apps.chaos.worlds.kinds import AT, EVERY, draw_kinds
from emu.apps.chaos.worlds.world import draw_world
from emu.cluster.backends import make_latency
from emu.latency.base import BatchShape
from emu.scheduling.base import add_chunk
from tests.chaos.test_truth import judge_world

KINDS = [AT + EVERY * stop for stop in range(4)]
"""Seeds of such stops: dense models, experts, layers that differ, ranks."""
BATCHES = (
    [(0, 100, 1)],
    [(row, 50 * row, 1) for row in range(4)],
    [(row, 700, 1) for row in range(23)],
    [(0, 0, 100), (1, 300, 1)],
    [(0, 2000, 300), (1, 0, 5), (2, 0, 1)],
)


@pytest.mark.parametrize("seed", KINDS)
def test_both_models_of_a_step_agree(seed: int) -> None:
    config, plan, _, _ = judge_world(draw_world(seed), seed)
    compared = 0
    for replica in plan.replicas:
        context = replica.latency_context(config)
        if not is_restated(context):
            continue
        backend, times = make_latency(context), made_of(context)
        for members in BATCHES:
            shape = BatchShape(sequences=len(members))
            for _, before, new in members:
                add_chunk(shape, new, before)
            due = times.stages(step_of(members))
            compared += due == due
            assert backend.stage_ns(shape) == pytest.approx(due, rel=1e-5, abs=1000, nan_ok=True)
            if context.expert_parallel > context.tensor_parallel:
                shape.group_tokens, shape.group_tokens_max = 40, 90  # nothing is padded
                due = times.stages(step_of(members, 90, 40))
                assert backend.stage_ns(shape) == pytest.approx(due, rel=1e-5, abs=1000)
    assert compared >= 10


@pytest.mark.parametrize("seed", KINDS)
def test_a_step_that_takes_longer_is_found(seed: int) -> None:
    config, plan, records, written = judge_world(draw_world(seed), seed)
    truth = truth_of(config, plan, records, written)
    assert truth.problems == []
    assert truth.judged["kernels"] > 20
    first = next(at for at, one in enumerate(records) if one["event"] == "ran" and len(one) == 5)
    later = {**records[first], "at_ns": records[first]["at_ns"] + 30_000}
    changed = [*records[:first], later, *records[first + 1 :]]
    problems = truth_of(config, plan, changed, written).problems
    assert any("its kernels take" in problem for problem in problems)


def test_worlds_of_kinds_are_counted() -> None:
    assert draw_kinds(KINDS[0]) is not None
    assert draw_kinds(KINDS[0] + 1) is None
