"""The operators that make mutants change what they say, and nothing else."""

from __future__ import annotations

import ast

import pytest

from tests.chaos.made_mutants import ROOT, drawn, known_survivors, mutants_in, planted
from tests.patched import Patched
from tests.reached import block_of, marked

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
def test_mutants_are_drawn_the_same_each_time_whatever_else_there_is() -> None:
    names = [mutant.name for mutant in drawn(60, 1, ("routing", "kernel"))]
    assert names == [mutant.name for mutant in drawn(60, 1, ("routing", "kernel"))]
    assert names[:20] == [mutant.name for mutant in drawn(20, 1, ("routing", "kernel"))]
    alone = [mutant.name for mutant in drawn(60, 1, ("routing",))]
    assert [name for name in names if "/routing/" in name] == alone[
        : sum("/routing/" in name for name in names)
    ]
    assert [mutant.name for mutant in drawn(60, 2, ("routing", "kernel"))] != names
    assert len({mutant.operator for mutant in drawn(60, 1, ("routing", "kernel"))}) >= 5


def test_what_changes_nothing_is_listed_with_the_reason() -> None:
    text = "# A head.\na.py: f: off by one: 1 -> 2\n    equivalent: both are true\nb.py: g: x\n"
    assert known_survivors(text) == {
        "a.py: f: off by one: 1 -> 2": "both are true",
        "b.py: g: x": "",
    }


BLOCKS = """\
LIMIT = 3


def wait(queue):
    'Says nothing.'
    if queue:
        queue.pop()
    elif LIMIT:
        def inner():
            return 1
        return inner
    for one in queue:
        one()
    return None
"""


@pytest.mark.parametrize(
    ("line", "head"),
    [(1, 0), (6, 5), (7, 7), (8, 8), (10, 10), (11, 9), (12, 5), (13, 13), (14, 5)],
)
def test_a_line_belongs_to_the_innermost_block(line: int, head: int) -> None:
    assert block_of(BLOCKS, line) == head


def test_marks_say_which_blocks_ran() -> None:
    blocks: list[tuple[str, int]] = []
    marks = bytearray(100)
    names: dict[str, object] = {"_emu_marks": marks}
    exec(compile(marked(BLOCKS, "x.py", blocks), "x.py", "exec"), names)
    wait = names["wait"]
    assert callable(wait)
    assert wait.__doc__ == "Says nothing."
    assert wait([]).__name__ == "inner"
    assert {line for (_, line), mark in zip(blocks, marks, strict=False) if mark} == {5, 8, 9}
    wait([print])
    assert {line for (_, line), mark in zip(blocks, marks, strict=False) if mark} == {5, 7, 8, 9}


@pytest.mark.slow
@pytest.mark.doubles
def test_what_is_planted_is_what_runs() -> None:
    file = "emu/units.py"
    text = (ROOT / file).read_bytes()
    changed = text.replace(b"    return gbps * 1e9 / 8", b"    return gbps * 1e9 / 10")
    endless = text.replace(b"    return gbps * 1e9 / 8", b"    while True:\n        pass")
    tests = ["tests/network/test_topology.py"]
    with Patched(tests) as patched:
        assert patched.found_by(file, text, "campaign", ["0"]) == ""
        found = patched.found_by(file, changed, "campaign", ["0"])
        assert found.startswith("seed 0: T3: gpu0")
        assert patched.found_by(file, text, "tests", tests) == ""
        assert patched.found_by(file, changed, "tests", tests).startswith("FAILED")
        assert patched.found_by(file, endless, "campaign", ["0"], limit_s=3) == "hangs"
