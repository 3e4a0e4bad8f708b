"""The counts of `python -m tests.house` do not grow again."""

from __future__ import annotations

import subprocess

import pytest

from tests.house.measure import ROOT, RUFF, count

BOUNDS = {
    "banner": 0,
    "names another file": 0,
    "long function": 0,
    "two topics": 0,
    "foreign private": 0,
    "x=x": 98,
    "getattr, hasattr": 30,
    "Any": 259,
    "cast": 7,
    "**kwargs": 20,
}


@pytest.fixture(scope="module")
def places() -> dict[str, list[str]]:
    return count(("",))


@pytest.mark.parametrize(("name", "at_most"), sorted(BOUNDS.items()))
def test_a_count_of_the_house_does_not_grow(
    places: dict[str, list[str]], name: str, at_most: int
) -> None:
    found = places[name]
    assert len(found) <= at_most, "\n".join(found)


def test_no_function_has_more_branches_than_a_reader_can_hold() -> None:
    """As ruff counts them, at most 15; replica and scheduling: 10, in pyproject.toml."""
    done = subprocess.run([*RUFF, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
