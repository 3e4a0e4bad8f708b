"""Bisection in rounds: what it finds, and that it always ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.apps.shared.bisection import Bisection


def found(search: Bisection, threshold: float, goal: str, rounds_max: int = 60) -> list[float]:
    """Run a search whose condition holds on one side of a threshold; values tried."""
    tried: list[float] = []
    for _ in range(rounds_max):
        values = search.ask()
        if not values:
            return tried
        tried += values
        search.tell({v: v <= threshold if goal == "highest" else v >= threshold for v in values})
    raise AssertionError("the search does not end")


def bisection(low: float, high: float, goal: str = "highest", **more: object) -> Bisection:
    options = {"integer": False, "tolerance": 0.02, "points_per_round": 3, **more}
    return Bisection(low=low, high=high, goal=goal, **options)


@settings(max_examples=150, deadline=None)
@given(
    st.floats(0.5, 1000),
    st.floats(1.01, 1000),
    st.floats(0, 1),
    st.sampled_from(["highest", "lowest"]),
    st.integers(1, 7),
)
def test_the_bracket_holds_the_threshold_and_is_narrow(
    low: float, factor: float, part: float, goal: str, points: int
) -> None:
    high = low * factor
    threshold = low + part * (high - low)
    search = bisection(low, high, goal, points_per_round=points)
    tried = found(search, threshold, goal)
    assert len(tried) == len(set(tried))
    assert search.is_monotone
    if search.bracket is None:
        assert search.is_end_of_range or search.answer is None
        return
    good, bad = search.bracket
    assert search.answer == good
    if goal == "highest":
        assert good <= threshold < bad
    else:
        assert bad < threshold <= good
    assert abs(good - bad) <= 0.02 * max(good, bad) * 1.0001


@settings(max_examples=100, deadline=None)
@given(st.integers(-5, 50), st.integers(1, 400), st.integers(-10, 500), st.integers(1, 5))
def test_whole_numbers_are_found_exactly(low: int, span: int, at: int, points: int) -> None:
    for goal in ("highest", "lowest"):
        search = bisection(low, low + span, goal, integer=True, points_per_round=points)
        tried = found(search, at, goal, rounds_max=500)
        assert all(value == int(value) for value in tried)
        if goal == "highest":
            expected = None if at < low else min(at, low + span)
        else:
            expected = None if at > low + span else max(at, low)
        assert search.answer == expected


def test_a_range_that_never_meets_has_no_answer() -> None:
    search = bisection(10, 100)
    assert len(found(search, 5, "highest")) == 5
    assert search.answer is None
    assert search.bracket is None


def test_a_range_that_always_meets_ends_at_its_end() -> None:
    search = bisection(10, 100)
    assert len(found(search, 1000, "highest")) == 5
    assert search.answer == 100
    assert search.is_end_of_range


def test_a_condition_that_changes_twice_is_noticed() -> None:
    search = bisection(1, 16, integer=True)
    while values := search.ask():
        search.tell({v: v <= 3 or 10 <= v <= 12 for v in values})
    assert search.answer == 3
    assert not search.is_monotone or 10 not in search._met


def test_values_are_short_enough_to_type() -> None:
    search = bisection(1, 300, tolerance=0.001)
    assert all(len(f"{value:g}") <= 7 for value in found(search, 77.7, "highest"))
