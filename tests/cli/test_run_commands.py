"""`emu run`, `emu report` and the rim: streams, colors, exit statuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emu.cli import FIRST_WORDS
from tests.cli.helpers import ROOT, SMALL, emu, refused
from tests.patience import PATIENCE_S


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(SMALL)
    return path


def test_run_prints_a_table_without_colours(config: Path) -> None:
    done = emu(config, NO_COLOR="1", FORCE_COLOR="")
    assert done.returncode == 0, done.stderr
    assert "30 completed" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""  # no progress without a terminal


def test_quiet_says_nothing(config: Path) -> None:
    done = emu("run", config, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (config.parent / "out" / "summary.json").exists()


def test_report_writes_the_page_again(config: Path) -> None:
    emu("run", config, "-q")
    page = config.parent / "out" / "report.html"
    assert not page.exists()
    done = emu("report", config.parent / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(page)
    assert "</html>" in page.read_text()


def test_report_of_something_else_is_refused(tmp_path: Path) -> None:
    assert "no summary.json" in refused(emu("report", tmp_path))


def test_mistakes_on_the_command_line_are_one_line(config: Path) -> None:
    assert refused(emu("absent.toml")) == "absent.toml: no such file"
    assert refused(emu("rn", config)) == "rn: neither a command nor a file; did you mean run?"
    absent = refused(emu(config, "--set", "scheduler.policy=absent.module:Policy"))
    assert absent.startswith(f"{config}: scheduler.policy: cannot import 'absent.module'")
    assert "router.polcy" in refused(emu(config, "--set", "router.polcy=random"))
    assert "--sed" in refused(emu(config, "--sed", "3"))


@pytest.mark.parametrize(
    "words",
    [
        ["run", "c.toml", "--seed", "-1"],
        ["compare", "a", "b", "--seed", "-1"],
        ["workload", "generate", "w.jsonl", "--seed", "-1"],
        ["serve", "c.toml", "--port", "65536"],
        ["serve", "c.toml", "--drain-s", "-1.0"],
        ["chaos", "--seeds", "0:1", "--every", "0"],
        ["profile", "--repeats", "0"],
        ["observe", "http://h:1", "--workload", "w.jsonl", "--limit", "-1"],
    ],
    ids=" ".join,
)
def test_a_number_that_cannot_be_is_refused(words: list[str], tmp_path: Path) -> None:
    line = refused(emu(*words, cwd=tmp_path))
    assert re.search(
        rf"argument {words[-2]}\b.*: must be at (least|most) .*, not {words[-1]}", line
    )


def test_the_list_of_commands_says_what_each_does() -> None:
    done = emu("--help", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│ ").split(maxsplit=1) for line in done.stdout.splitlines()]
    said = {row[0] for row in rows if len(row) == 2}
    assert said >= FIRST_WORDS


@pytest.mark.parametrize(("command", "row"), [("models", "Qwen3-32B"), ("gpus", "L40S")])
def test_no_figure_of_a_catalogue_table_is_cut(command: str, row: str) -> None:
    done = emu(command)
    assert done.returncode == 0
    assert row in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize("command", [["models"], ["schema"], ["gpus"]])
def test_a_reader_that_leaves_is_harmless(command: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "emu", *command]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(PATIENCE_S) in (0, 1, 141)
    assert errors == b""


def test_a_closed_stdout_is_harmless(config: Path) -> None:
    command = f'exec "{sys.executable}" -m emu "{config}" >&-'
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=config.parent,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (config.parent / "out" / "summary.json").exists()
