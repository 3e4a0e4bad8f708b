"""Cycles of random systems that the published ASTRA-Sim was asked for (`benchmarks.astra_systems`)."""

from pathlib import Path

import pytest

from benchmarks.astra_systems import read_table
from emu.apps.astra.collective import CollectiveQuestion, cycles
from emu.network.rounds import parse_algorithm

TABLE = Path(__file__).parent / "random_systems.csv"


@pytest.mark.slow
def test_random_systems_take_as_many_cycles_as_in_the_program():
    rows = read_table(TABLE)
    assert len(rows) == 1000
    assert [question for question, program in rows if cycles(question) != program] == []


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


@pytest.mark.parametrize(
    ("dims", "algorithm", "size_bytes", "splits", "active_chunks", "delay_ns", "program"),
    [
        ("Ring:6:50.0:0", "direct", 3_842, 4, 1, 10, 230),
        ("Switch:4:25.0:0", "doubleBinaryTree", 2_387, 16, 4, 2, 279),
        ("Switch:8:25.0:0", "doubleBinaryTree", 1_024, 16, 1, 100, 10_078),
        ("Ring:16:25.0:0", "doubleBinaryTree", 44_214, 3, 2, 100, 35_845),
    ],
)
def test_messages_that_meet_at_one_instant_pass_in_the_programs_order(
    dims, algorithm, size_bytes, splits, active_chunks, delay_ns, program
):
    memory = {"Switch:8:25.0:0": 3350.0, "Ring:16:25.0:0": 800.0}
    question = CollectiveQuestion(
        kind="all-reduce",
        size_bytes=size_bytes,
        dims=dims,
        algorithm=algorithm,
        splits=splits,
        active_chunks=active_chunks,
        local_mem_gbytes_per_s=memory.get(dims, 1600.0),
        endpoint_delay_ns=delay_ns,
        congestion=True,
    )
    assert cycles(question) == program
