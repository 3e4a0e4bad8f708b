"""The counts of `python -m tests.house` do not grow again."""

from __future__ import annotations

import re

import pytest

from tests.house.measure import count

BOUNDS = {
    "banner": 0,
    "names another file": 0,
    "two topics": 2,
    "x=x": 410,
    "getattr, hasattr": 50,
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


def test_functions_fit_a_screen_but_constructors_that_declare_much_state(
    places: dict[str, list[str]],
) -> None:
    known = ("serve/service.py", "serve/world.py", "autoscale/scaler.py", "scheduling/vllm.py")
    constructors = re.compile(rf"(apps/)?({'|'.join(map(re.escape, known))}):\d+ __init__: .*")
    assert [one for one in places["long function"] if not constructors.fullmatch(one)] == []


def test_private_names_of_other_packages_are_those_of_libraries(
    places: dict[str, list[str]],
) -> None:
    """Named tuples, `os._exit`, `atexit` and transformers have no public name for these."""
    public = ("._replace", "._exit", "._run_exitfuncs", "._flash_attention_forward")
    assert [one for one in places["foreign private"] if not one.endswith(public)] == []
