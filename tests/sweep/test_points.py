"""Which points a sweep file means, and what is refused in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.apps.shared.conditions import Condition, figure_names, parse_conditions
from emu.apps.sweeps.points import fixed_points
from emu.apps.sweeps.sweepfile import Sweep, load_sweep
from emu.errors import InputError


def sweep(tmp_path: Path, text: str) -> Sweep:
    path = tmp_path / "s.toml"
    path.write_text('base = "c.toml"\n' + text)
    return load_sweep(path)


def test_a_grid_is_all_combinations_in_the_order_of_the_file(tmp_path: Path) -> None:
    both = sweep(tmp_path, '[grid]\n"a.b" = [1, 2]\nc.0.d = ["x", "y"]\n')
    assert [point.values for point in fixed_points(both, "s")] == [
        {"a.b": 1, "c.0.d": "x"},
        {"a.b": 1, "c.0.d": "y"},
        {"a.b": 2, "c.0.d": "x"},
        {"a.b": 2, "c.0.d": "y"},
    ]


def test_seeds_multiply_the_points(tmp_path: Path) -> None:
    points = fixed_points(sweep(tmp_path, "seeds = [7, 8]\n[grid]\na = [1, 2]\n"), "s")
    assert [(point.values["a"], point.seed) for point in points] == [(1, 7), (1, 8), (2, 7), (2, 8)]


def test_a_list_is_taken_as_it_stands(tmp_path: Path) -> None:
    points = fixed_points(sweep(tmp_path, "[[list]]\na.b = 1\n[[list]]\nc = 2\n"), "s")
    assert [point.values for point in points] == [{"a.b": 1}, {"c": 2}]


RANDOM = """
[random]
points = 200
seed = 5
[random.keys]
"x.plain" = {min = 1, max = 2}
"x.log" = {min = 0.001, max = 1000, log = true}
"x.whole" = {min = 1, max = 4, integer = true}
"x.word" = ["a", "b"]
"""


def test_random_points_stay_in_their_ranges_and_come_back(tmp_path: Path) -> None:
    points = [point.values for point in fixed_points(sweep(tmp_path, RANDOM), "s")]
    assert len(points) == 200
    assert all(1 <= p["x.plain"] <= 2 and 0.001 <= p["x.log"] <= 1000 for p in points)
    assert {p["x.whole"] for p in points} == {1, 2, 3, 4}
    assert {p["x.word"] for p in points} == {"a", "b"}
    assert 60 < sum(p["x.log"] < 1 for p in points) < 140
    assert points == [point.values for point in fixed_points(sweep(tmp_path, RANDOM), "s")]


def test_another_key_leaves_the_draws_of_the_others(tmp_path: Path) -> None:
    before = fixed_points(sweep(tmp_path, RANDOM), "s")
    after = fixed_points(sweep(tmp_path, RANDOM + '"y" = {min = 0, max = 1}\n'), "s")
    for one, other in zip(before, after, strict=True):
        assert one.values == {key: other.values[key] for key in one.values}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected exactly one of grid, list, random, search, pareto; found none"),
        ("[grid]\na = [1]\n[[list]]\na = 1\n", "exactly one of .* found grid, list"),
        ("[gird]\na = [1]\n", r"s.toml:2: gird: unknown key; did you mean grid\?"),
        ("[search]\nkey = 'a'\nmin = 3\nmax = 3\nmeet = ['p99_ttft_ms < 1']\n", "below max"),
        ("[search]\nkey = 'a'\nmin = 'x'\nmax = 3\nmeet = []\n", "s.toml:4: search.min: expected"),
        ("[search]\nkey = 'a'\nmni = 1\n", "search.mni: unknown key; did you mean min"),
        ("[random]\npoints = 0\n", "random.points: expected `int` >= 1"),
        ("grid = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        sweep(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[grid]\n", "no point"),
        ("[grid]\na = 3\n", "grid.a: expected an array of values"),
        ("[random]\npoints = 2\n[random.keys]\na = {min = 3}\n", "random.keys.a: expected {values"),
        ("[random]\npoints = 2\n[random.keys]\na = {min = 0, max = 1, log = true}\n", "above 0"),
        ("[random]\npoints = 2\n[random.keys]\n", "has no key"),
    ],
)
def test_wrong_points_are_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        fixed_points(sweep(tmp_path, text), "s")


def test_conditions_compare_numbers_and_words() -> None:
    figures = {"p99_ttft_ms": 5.0, "load.verdict": "stable", "slo.ttft_attainment": None}
    texts = ["p99_ttft_ms < 6", "p99_ttft_ms <= 5", "p99_ttft_ms > 4", "p99_ttft_ms >= 5"]
    texts += ["p99_ttft_ms == 5", "p99_ttft_ms != 6"]
    texts += ["load.verdict == stable", "load.verdict != overloaded"]
    assert all(condition.holds(figures) for condition in parse_conditions(texts, "s", "meet"))
    assert not Condition("p99_ttft_ms", "<", 5.0).holds(figures)
    assert not Condition("slo.ttft_attainment", ">", 0.0).holds(figures)


def test_figures_of_the_summary_are_known_by_name() -> None:
    known, open_ended = figure_names()
    assert {"p99_tpot_ms", "load.verdict", "slo.joint_attainment", "gpu_seconds.total"} <= set(
        known
    )
    assert "bytes_moved" in open_ended
    assert "definitions" not in [*known, *open_ended]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("p99_tttf_ms < 3", "did you mean p99_ttft_ms"),
        ("p99_ttft_ms", "expected a condition such as"),
        ("p99_ttft_ms < fast", "expected a number behind <"),
    ],
)
def test_wrong_conditions_are_named(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_conditions([text], "s", "search.meet")
