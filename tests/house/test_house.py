"""The counts of `python -m tests.house` do not grow again."""

from __future__ import annotations

import pytest

from tests.house.measure import count

BOUNDS = {
    "banner": 0,
    "names another file": 0,
    "long function": 0,
    "two topics": 0,
    "x=x": 380,
    "getattr, hasattr": 34,
    "Any": 260,
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


def test_private_names_of_other_packages_are_those_of_libraries(
    places: dict[str, list[str]],
) -> None:
    """Named tuples, `os._exit`, `atexit` and transformers have no public name for these."""
    public = ("._replace", "._exit", "._run_exitfuncs", "._flash_attention_forward")
    assert [one for one in places["foreign private"] if not one.endswith(public)] == []
