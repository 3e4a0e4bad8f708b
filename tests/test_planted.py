"""Lists of planted bugs are current: what each one changes is in the program, once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.chaos.mutants import MUTANTS
from tests.planted import PARTS, PLANTED, TESTS
from tests.planted_apart import APART
from tests.planted_by_reader import READER
from tests.planted_drawn import DRAWN
from tests.planted_fresh import FRESH
from tests.planted_worlds import BUGS

ROOT = Path(__file__).resolve().parents[1] / "emu"
CHANGES = [
    *((one.name, one.file, one.old, one.new) for one in PLANTED),
    *((one.name, one.file.removeprefix("emu/"), one.old, one.new) for one in MUTANTS),
    *BUGS,
    *READER,
    *APART,
    *DRAWN,
    *FRESH,
]


@pytest.mark.parametrize("file", sorted({file for _, file, _, _ in CHANGES}))
def test_what_a_planted_bug_changes_is_there_once(file: str) -> None:
    """Else `make planted` or `make mutants` would say so an hour later."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = {name: text.count(old) for name, its, old, _ in CHANGES if its == file}
    assert {name for name, count in found.items() if count != 1} == set()
    for _, its, old, new in CHANGES:
        if its == file:
            ast.parse(text.replace(old, new))  # what does not compile proves nothing


def test_the_copies_have_all_that_their_tests_import() -> None:
    copied = [ROOT.parent / part for part in PARTS if part != "emu"]
    files = [file for part in copied for file in ([part] if part.is_file() else part.glob("*.py"))]
    run = [ROOT.parent / test for tests in TESTS.values() for test in tests]
    for file in files:
        if file.name.startswith("test_") and not {file, file.parent} & set(run):
            continue
        for module in re.findall(r"^from (tests\.[\w.]+) import", file.read_text("utf-8"), re.M):
            path = ROOT.parent.joinpath(*module.split(".")).with_suffix(".py")
            assert path in files, f"{file} imports {module}"


def test_every_planted_bug_has_a_name_of_its_own_and_changes_something() -> None:
    for names in ([one.name for one in PLANTED], [one.name for one in MUTANTS]):
        assert len(names) == len(set(names))
    assert all(old != new for _, _, old, new in CHANGES)
