"""Cycles of random systems that the published ASTRA-Sim was asked for (`benchmarks.astra_systems`)."""

from pathlib import Path

import pytest

from benchmarks.astra_systems import read_table
from emu.network.rounds import parse_algorithm
from emu.tools.astra import cycles

TABLE = Path(__file__).parent / "random_systems.csv"


@pytest.mark.slow
def test_random_systems_take_as_many_cycles_as_in_the_program():
    rows = read_table(TABLE)
    assert len(rows) == 1000
    found = [(question, program) for question, program in rows if cycles(question) != program]
    # A congested ring without latency: messages meet at one instant, in another order there.
    assert [(q.dims, q.algorithm, program) for q, program in found] == [
        ("Ring:6:50.0:0", "direct", 230)
    ]
    assert cycles(found[0][0]) == 220


def test_some_random_systems_take_as_many_cycles_as_in_the_program():
    rows = read_table(TABLE)[::25]
    assert [question for question, program in rows if cycles(question) != program] == []


def test_the_table_has_every_algorithm_and_kind():
    rows = [question for question, _ in read_table(TABLE)]
    names = {parse_algorithm(n).base for q in rows for n in q.algorithm.split(",")}
    assert names == {"ring", "direct", "halvingDoubling", "doubleBinaryTree"}
    assert {q.kind for q in rows} == {"all-reduce", "reduce-scatter", "all-gather", "all-to-all"}
    assert any(q.congestion for q in rows)
    assert any(q.splits > 1 and "doubleBinaryTree" in q.algorithm for q in rows)
