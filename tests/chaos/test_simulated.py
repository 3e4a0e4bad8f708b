"""The simulated server and its campaign: clean as it is, and each repair is missed when it is out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.simulated.__main__ import REPAIRS, WORLDS, findings
from tests.chaos.simulated.server import simulate

SEEDS = range(200)
"""In which each defect must be found."""


@pytest.mark.slow
def test_the_first_seeds_are_clean() -> None:
    assert list(findings(range(12), twice_every=6)) == []


def test_a_server_that_stood_does_not_call_its_client_slow() -> None:
    """A head came in two reads while the process stood for longer than a head may take."""
    assert list(findings([1150], {"server": WORLDS["server"]})) == []


@pytest.mark.slow
@pytest.mark.doubles
@pytest.mark.parametrize("repair", REPAIRS)
def test_a_defect_is_found_when_its_repair_is_out(repair: str) -> None:
    world, out = REPAIRS[repair]
    with out():
        seed, problem = next(findings(SEEDS, {world: WORLDS[world]}, twice_every=1000))
    wanted = {"departures": "served 1 s later", "first-use": "SIGSEGV", "starts": "InputError"}
    assert wanted[repair] in problem, seed


def test_another_seed_is_another_history(tmp_path: Path) -> None:
    assert simulate(1, tmp_path / "a")[1] != simulate(2, tmp_path / "b")[1]
