"""The operators that make mutants change what they say, and nothing else."""

from __future__ import annotations

import ast

import pytest

from tests.chaos.made_mutants import ROOT, drawn, mutants_in, planted
from tests.patched import found_by

TEXT = '''\
"""Text with 1 figure."""
from emu.units import ms_to_ns, s_to_ns

LIMIT = 3


def wait(queue: list[int], late_ms: float) -> int:
    """Not 2 of these."""
    assert len(queue) < 9
    if late_ms > 4:
        queue.append(len(queue) + 1)
    return ms_to_ns(late_ms) * 2
'''


def test_each_operator_finds_its_places() -> None:
    found = {(m.operator, m.old): m.new for m in mutants_in(TEXT, "x.py")}
    assert found == {
        ("comparison", "late_ms > 4"): "(late_ms >= 4)",
        ("swapped branch", "late_ms > 4"): "(not (late_ms > 4))",
        ("off by one", "4"): "5",
        ("dropped call", "queue.append(len(queue) + 1)"): "pass",
        ("arithmetic", "len(queue) + 1"): "(len(queue) - 1)",
        ("off by one", "1"): "2",
        ("arithmetic", "ms_to_ns(late_ms) * 2"): "(ms_to_ns(late_ms) // 2)",
        ("wrong unit", "ms_to_ns"): "s_to_ns",
        ("off by one", "2"): "3",
    }


@pytest.mark.parametrize("index", range(9))
def test_a_planted_change_is_a_program_again(index: int) -> None:
    mutant = list(mutants_in(TEXT, "x.py"))[index]
    changed = planted(mutant, TEXT.encode()).decode()
    ast.parse(changed)
    assert changed != TEXT
    assert len(changed) == len(TEXT) + len(mutant.new) - (mutant.end - mutant.start)


@pytest.mark.slow
def test_a_hundred_are_drawn_over_all_operators_the_same_each_time() -> None:
    mutants = drawn(120, 1)
    assert [m.name for m in mutants] == [m.name for m in drawn(120, 1)]
    assert len({m.name for m in mutants}) >= 100
    assert len({m.operator for m in mutants}) == 6
    assert len({m.file.split("/")[1] for m in mutants}) >= 10


@pytest.mark.slow
@pytest.mark.doubles
def test_what_is_planted_is_what_the_campaign_runs() -> None:
    file = "emu/units.py"
    text = (ROOT / file).read_bytes()
    assert found_by(file, text, "campaign", "1") == ""
    changed = text.replace(b"    return gbps * 1e9 / 8", b"    return gbps * 1e9 / 10")
    assert changed != text
    assert found_by(file, changed, "campaign", "1").startswith("seed 0: T3: gpu0")
    assert found_by(file, changed, "tests", "tests/network/test_topology.py").startswith("FAILED")
