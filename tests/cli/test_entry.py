"""The short way to a run does what the parser of all commands does."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import emu.runs.runner
from emu import cli, entry
from tests.cli.helpers import ROOT, SMALL
from tests.patience import PATIENCE_S

PLAIN = [
    ["c.toml"],
    ["run", "c.toml"],
    ["./a/c.toml", "-q"],
    ["c.toml", "--output", "x", "--seed", "7"],
    ["c.toml", "-o", "x y", "--no-report", "--quiet"],
    ["c.toml", "--report", "--set", "a.b=1", "c=[1, 2]", "-q"],
    ["c.toml", "--set", "a=b", "--seed", "0"],
    ["run", "c.toml", "--seed", "007"],
]
ODD = [
    [],
    ["run"],
    ["--help"],
    ["validate", "c.toml"],
    ["report", "r.toml"],
    ["c.toml", "d.toml"],
    ["c.toml", "--sed", "1"],
    ["c.toml", "--seed"],
    ["c.toml", "--seed", "x"],
    ["c.toml", "--seed", "-1"],
    ["c.toml", "--seed", "٣"],
    ["c.toml", "--seed", "1", "--seed", "2"],
    ["c.toml", "-q", "--quiet"],
    ["c.toml", "-q", "true"],
    ["c.toml", "--output"],
    ["c.toml", "--output=x"],
    ["c.toml", "--set"],
    ["c.toml", "--set", "a=1", "--set", "b=2"],
    ["c.toml", "-qo", "x"],
    ["c.json"],
    ["-q", "c.toml"],
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def record(path: Path, **options: Any) -> int:
        made.append({"path": path, **options})
        return 0

    monkeypatch.setattr(emu.runs.runner, "run_command", record)
    return made


@pytest.mark.parametrize("tokens", PLAIN, ids=" ".join)
def test_both_ways_make_the_same_call(tokens: list[str], calls: list[dict[str, Any]]) -> None:
    assert entry.plain_run(tokens) is not None
    assert entry.main(tokens) == cli.main(tokens) == 0
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert [type(value) for value in calls[0].values()] == [
        type(calls[1][name]) for name in calls[0]
    ]


@pytest.mark.parametrize("tokens", ODD, ids=" ".join)
def test_the_parser_of_all_commands_gets_the_rest(tokens: list[str]) -> None:
    assert entry.plain_run(tokens) is None


def test_no_order_of_options_makes_a_difference(calls: list[dict[str, Any]]) -> None:
    options = [["-q"], ["--no-report"], ["--seed", "3"], ["--set", "a=1", "b=2"], ["-o", "out"]]
    for chosen in itertools.permutations(options, 3):
        tokens = ["c.toml", *itertools.chain(*chosen)]
        assert entry.main(tokens) == cli.main(tokens) == 0
        assert calls[-1] == calls[-2], tokens


def test_a_plain_run_does_not_load_the_parser(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(SMALL)
    code = (
        "import sys; from emu.entry import main; status = main(['c.toml', '-q']);"
        "print(sorted({'cyclopts', 'rich', 'plotly'} & set(sys.modules))); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.strip() == "[]"
