"""Intervals that are stated for groups of points from all other groups."""

from __future__ import annotations

import pytest

from emu.apps.fidelity.points.intervals import Interval, held, intervals_of


def stated(metric: str, groups: dict[str, list[float]]) -> list[Interval]:
    """Intervals where each group is left out by itself."""
    return intervals_of({metric: {name: {name: values} for name, values in groups.items()}})


def test_a_group_has_no_say_in_its_own_interval() -> None:
    near = [0.95, 1.0, 1.05]
    found = stated("tpot_ms", {"a": near, "b": near, "c": near, "far": [2.0, 2.1]})
    far = next(one for one in found if one.group == "far")
    assert (far.low, far.high, far.inside) == (0.95, 1.05, 0.0)
    assert all(one.high >= 1.05 for one in found)


def test_groups_weigh_the_same_however_many_points_they_have() -> None:
    groups = {"one": [1.5], "many": [1.0] * 99, "asked": [1.5, 1.0, 3.0]}
    asked = next(one for one in stated("m", groups) if one.group == "asked")
    assert (asked.low, asked.high) == (1.0, 1.5)
    assert asked.inside == pytest.approx(2 / 3)


def test_what_was_not_measured_does_not_count_and_two_groups_state_nothing() -> None:
    nan = float("nan")
    assert stated("m", {"a": [1.0], "b": [1.0], "c": [nan]}) == []
    found = stated("m", {"a": [1.0], "b": [1.1, nan], "c": [0.9]})
    (whole,) = held(found)
    assert whole.groups == 3
    assert whole.inside == pytest.approx(1 / 3)  # only b lies between a and c, which lie outside
    assert whole.worst_group == 0.0


def test_all_groups_of_a_part_are_left_out_together() -> None:
    parts = {
        "vllm": {"vllm, H100": [1.0, 1.1], "vllm, B200": [0.9]},
        "sglang": {"sglang, H100": [2.0], "sglang, B200": [3.0, 3.1]},
    }
    found = {one.group: one for one in intervals_of({"m": parts})}
    assert (found["vllm"].low, found["vllm"].high, found["vllm"].inside) == (2.0, 3.1, 0.0)
    assert (found["sglang"].low, found["sglang"].high, found["sglang"].points) == (0.9, 1.1, 3)
