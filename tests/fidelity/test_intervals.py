"""Intervals that are stated for groups of points from all other groups."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from emu.apps.fidelity.points.intervals import Interval, held, intervals_of


def stated(metric: str, groups: dict[str, list[float]]) -> list[Interval]:
    """Intervals where each group is left out by itself."""
    return intervals_of({metric: {name: {name: values} for name, values in groups.items()}})


def test_a_group_has_no_say_in_its_own_interval() -> None:
    near = [0.95, 1.0, 1.05]
    found = {
        one.group: one
        for one in stated("tpot_ms", {"a": near, "b": near, "c": near, "far": [2.0, 2.1]})
    }
    middle = (0.95 * 1.05) ** (1 / 3)
    squares = sum(math.log(value / middle) ** 2 for value in near)
    # Three groups of one mean: Student's t of two degrees of freedom; points have six.
    half = 2.9200 * math.sqrt(3 * squares / 6)
    assert found["far"].low == pytest.approx(middle * math.exp(-half), rel=1e-4)
    assert found["far"].high == pytest.approx(middle * math.exp(half), rel=1e-4)
    assert found["far"].inside == 0.0
    assert all(found[name].high > 2.0 for name in "abc"), "what lies far widens the others"


def test_one_row_that_is_far_off_widens_nothing_where_groups_are_many() -> None:
    even = {str(group): [0.9, 1.0, 1.1] for group in range(30)}
    far = even | {"30": [0.9, 1.0, 1000.0]}
    found = [stated("m", groups | {"asked": [1.0]})[-1] for groups in (even, far)]
    assert found[0].group == "asked"
    assert (found[0].low, found[0].high) == (found[1].low, found[1].high) == (0.9, 1.1)


def test_of_many_groups_the_interval_holds_the_share_and_a_little_more() -> None:
    """Nineteen groups of one value: 0.9 of 20/19 leaves out half a group on either side."""
    groups = {str(number): [float(number)] for number in range(1, 20)}
    asked = next(one for one in stated("m", groups | {"asked": [5.0]}) if one.group == "asked")
    assert (asked.low, asked.high) == (1.0, 19.0)
    groups = {str(number): [float(number)] for number in range(1, 61)}
    asked = next(one for one in stated("m", groups | {"asked": [5.0]}) if one.group == "asked")
    assert (asked.low, asked.high) == (3.0, 58.0)


def test_groups_weigh_the_same_however_many_points_they_have() -> None:
    few = stated("m", {"one": [1.5], "many": [1.0] * 2, "asked": [1.2]})
    many = stated("m", {"one": [1.5], "many": [1.0] * 99, "asked": [1.2]})
    asked = [next(one for one in found if one.group == "asked") for found in (few, many)]
    assert asked[0].low == pytest.approx(asked[1].low)
    assert math.sqrt(asked[0].low * asked[0].high) == pytest.approx(math.sqrt(1.5))


def test_nine_of_ten_points_of_new_groups_are_inside() -> None:
    """Groups that differ from each other as much as their points do."""
    draw = random.Random(1)
    groups = {}
    for group in range(60):
        mean = draw.gauss(0.1, 0.2)
        groups[str(group)] = [math.exp(draw.gauss(mean, 0.2)) for _ in range(8)]
    (whole,) = held(stated("m", groups))
    assert 0.85 <= whole.inside <= 0.95
    assert whole.width_percent == pytest.approx(110, rel=0.2)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 6.3138), (2, 2.9200), (3, 2.3534), (5, 2.0150), (7, 1.8946)]
)
def test_few_groups_state_wide_intervals(freedom: int, t: float) -> None:
    """Two means that differ say little of how far a third may be."""
    values = [math.exp(0.1 * (-1) ** number) for number in range(freedom + 1)]
    groups = {str(number): [value] for number, value in enumerate(values)} | {"asked": [1.0]}
    asked = next(one for one in stated("m", groups) if one.group == "asked")
    logs = [math.log(value) for value in values]
    scatter = math.sqrt(statistics.variance(logs) * (1 + 1 / len(logs)))
    assert math.log(asked.high / asked.low) / 2 == pytest.approx(t * scatter, rel=0.004)


def test_small_groups_are_not_judged_alone() -> None:
    near = [0.95, 0.97, 1.0, 1.03, 1.05]
    (whole,) = held(stated("m", {"a": near, "b": near, "c": near, "far": [3.0]}))
    assert whole.worst_group == 1.0
    assert whole.inside == pytest.approx(15 / 16)


def test_what_was_not_measured_does_not_count_and_two_groups_state_nothing() -> None:
    nan = float("nan")
    assert stated("m", {"a": [1.0], "b": [1.0], "c": [nan]}) == []
    (whole,) = held(stated("m", {"a": [1.0], "b": [1.1, nan], "c": [0.9]}))
    assert whole.groups == 3


def test_all_groups_of_a_part_are_left_out_together() -> None:
    parts = {
        "vllm": {"vllm, H100": [1.0, 1.1], "vllm, B200": [1.05]},
        "sglang": {"sglang, H100": [2.0], "sglang, B200": [2.0, 2.1]},
    }
    found = {one.group: one for one in intervals_of({"m": parts})}
    assert found["vllm"].low > 1.1 and found["vllm"].inside == 0.0
    assert found["sglang"].high < 2.0
    assert found["sglang"].points == 3
