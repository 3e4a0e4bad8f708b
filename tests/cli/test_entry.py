"""One parser for all commands: what a line means, what it refuses, and what it does not load."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import emu.runs.runner
from emu import entry
from emu.cli import COMMANDS, FIRST_WORDS, groups, overview
from emu.cli.parser import parser_of, specs
from emu.runs.options import RunOptions
from tests.cli.helpers import ROOT, SMALL
from tests.patience import PATIENCE_S

DEFAULTS: dict[str, Any] = {
    "path": Path("c.toml"),
    "output": None,
    "seed": None,
    "overrides": (),
    "quiet": False,
    "report": True,
    "force": False,
    "as_json": False,
    "level": "off",
    "log_format": "text",
    "jobs": 0,
}
READ = ("seed", "quiet", "report", "force", "as_json", "level", "log_format", "jobs")
LINES: list[tuple[str, dict[str, Any]]] = [
    ("c.toml", {}),
    ("run c.toml", {}),
    ("./a/c.toml -q", {"path": Path("a/c.toml"), "quiet": True}),
    ("c.toml --output x --seed 7", {"output": Path("x"), "seed": 7}),
    ("c.toml -o x --no-report --quiet", {"output": Path("x"), "report": False, "quiet": True}),
    ("c.toml --report --set a.b=1 c=[1,2] -q", {"overrides": ["a.b=1", "c=[1,2]"], "quiet": True}),
    ("c.toml --set a=1 --set b=2", {"overrides": ["a=1", "b=2"]}),
    ("c.toml --output=x", {"output": Path("x")}),
    ("run c.toml --seed 007", {"seed": 7}),
    ("-q c.toml", {"quiet": True}),
    ("c.toml -qo x", {"quiet": True, "output": Path("x")}),
]
WRONG = {
    "c.toml d.toml": "unexpected 'd.toml'",
    "c.toml --sed 1": "unknown option --sed; did you mean --seed?",
    "c.toml --seed": "--seed: expected one argument",
    "c.toml --seed x": "--seed: expected a whole number, got 'x'",
    "c.toml --seed -1": "must be at least 0, not -1",
    "c.toml --seed ٣": "expected a whole number",
    "c.toml --out x": "unknown option --out",
    "c.toml --set": "--set: expected at least one argument",
    "rum c.toml": "did you mean run?",
    "workload convrt a b": "unknown command convrt; did you mean convert?",
    "serve c.toml --port 65536": "must be at most 65535, not 65536",
    "chaos --jobs -2": "must be at least 0, not -2",
    "schema swep": "invalid choice: 'swep'",
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def record(path: Path, output: Path | None, options: RunOptions) -> int:
        made.append(
            {
                "path": path,
                "output": output,
                "overrides": options.settings,
                **{name: getattr(options, name) for name in READ},
            }
        )
        return 0

    monkeypatch.setattr(emu.runs.runner, "run_command", record)
    return made


@pytest.mark.parametrize(("line", "wanted"), LINES, ids=[line for line, _ in LINES])
def test_a_line_makes_a_call(
    line: str, wanted: dict[str, Any], calls: list[dict[str, Any]]
) -> None:
    assert entry.main(line.split()) == 0
    assert {**calls[0], "overrides": list(calls[0]["overrides"])} == {
        **DEFAULTS, **wanted, "overrides": wanted.get("overrides", []),
    }  # fmt: skip


def test_no_order_of_options_makes_a_difference(calls: list[dict[str, Any]]) -> None:
    options = [["-q"], ["--no-report"], ["--seed", "3"], ["--set", "a=1", "b=2"], ["-o", "out"]]
    seen = []
    for chosen in itertools.permutations(options, 5):
        assert entry.main(["c.toml", *itertools.chain(*chosen)]) == 0
        seen.append(calls[-1])
    assert all(call == seen[0] for call in seen)


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_refused_in_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert WRONG[line] in said.err


def test_run_alone_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["run"]) == 2
    assert "emu init" in capsys.readouterr().err


def test_help_has_every_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == entry.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text == (overview() + "\n") * 2
    for heading, group in groups().items():
        assert f"\n{heading}:\n" in text
        for name in group:
            assert text.count(f"\n  {name} ") == 2
    assert sum(len(group) for group in groups().values()) == len(FIRST_WORDS)


def test_options_that_commands_share_are_the_same_everywhere() -> None:
    for path, command in COMMANDS.items():
        flags = {spec.name: spec.flags for spec in specs(command) if not spec.is_positional}
        for name, wanted in (
            ("quiet", ("--quiet", "-q")),
            ("jobs", ("--jobs", "-j")),
            ("output", ("--output", "-o")),
            ("as_json", ("--json",)),
            ("overrides", ("--set",)),
        ):
            assert flags.get(name, wanted) == wanted
        parser_of(path, command).format_help()


def test_completion_names_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["completion", "bash"]) == 0
    text = capsys.readouterr().out
    for word in ("fidelity", "--max-outstanding", "describe"):
        assert word in text


_UNUSED = {
    *("rich", "jinja2", "shtab", "anyio", "uvloop", "statistics", "difflib"),
    *("asyncio", "logging", "numpy", "inspect", "typing_extensions"),
    *("emu.migration.outbound", "emu.latency.offload.backend", "emu.network.collectives"),
}
"""What a plain run does not use."""


def few_of_a_trace(directory: Path, requests: int = 300) -> None:
    """c.toml: the first lines of a trace on two replicas, without random lengths or arrivals."""
    drawn = random.Random(3)
    rows = [
        f"2023-11-16 18:{second // 60:02d}:{second % 60:02d}.{drawn.randrange(10**7):07d},"
        f"{drawn.randrange(1, 3000)},{drawn.randrange(0, 300)}"
        for second in range(requests)
    ]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (directory / "t.csv").write_text(text + "\n")
    nodes = '[[nodes]]\ngpu = "H100-SXM5-80GB"\ngpus = 2\n[[replicas]]\ncount = 2\n'
    nodes += "scheduler = { max_num_seqs = 256 }\n"
    (directory / "c.toml").write_text(f'{nodes}[workload]\npath = "t.csv"\n')


def run_apart(directory: Path, output: str, before: str = "pass") -> list[str]:
    """A quiet run of c.toml in a process of its own: unused modules, and lines of emu loaded."""
    line = ["c.toml", "-q", "--no-report", "-o", output]
    code = (
        f"import sys; {before}; from emu.entry import main; status = main({line});"
        f"print(sorted({_UNUSED} & set(sys.modules)));"
        "files = [m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'emu'];"
        "print(sum(open(f).read().count('\\n') for f in files if f.endswith('.py')));"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "EMU_COMPILE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return done.stdout.splitlines()


def test_a_plain_run_loads_little(tmp_path: Path) -> None:
    few_of_a_trace(tmp_path)
    unused, lines = run_apart(tmp_path, "plain")
    assert unused == "[]"
    assert int(lines) <= 48_300, "a plain run loads more of emu: load it when it is asked for"
    with (tmp_path / "c.toml").open("a") as config:
        config.write("limit = 200\n")
    assert run_apart(tmp_path, "plain")[0] == "[]", "a run beside another one needs no more"
    assert (tmp_path / "plain-2").is_dir()
    (tmp_path / "c.toml").write_text(SMALL)
    unused, _ = run_apart(tmp_path, "drawn")
    assert unused == "['inspect', 'numpy']", "lengths are drawn by its generators"


@pytest.mark.parametrize("line", [["--help"], ["plan", "--help"], ["init", "--help"]])
def test_help_loads_little(line: list[str]) -> None:
    """What a reader waits for: no library is loaded for it, and no module of the emulator."""
    code = (
        f"import sys; sys.argv = ['emu', *{line}]; from emu.entry import main; status = main();"
        "print(sorted({'numpy', 'msgspec', 'rich', 'asyncio'} & set(sys.modules)),"
        " len(sys.modules), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "EMU_COMPILE": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    libraries, _, modules = done.stderr.rpartition(" ")
    assert libraries == "[]"
    assert int(modules) <= 105, "a help needs more modules than before"


@pytest.mark.slow
def test_a_run_without_numpy_writes_the_same_bytes(tmp_path: Path) -> None:
    few_of_a_trace(tmp_path)
    assert run_apart(tmp_path, "plain")[0] == "[]"
    assert run_apart(tmp_path, "arrays", "import numpy")[0] == "['inspect', 'numpy']"
    plain, arrays = tmp_path / "plain", tmp_path / "arrays"
    names = {path.name for path in plain.iterdir()}
    assert {"requests.csv", "summary.json", "itl.json", "timeseries.csv"} <= names
    for name in names - {"run.json"}:
        assert (plain / name).read_bytes() == (arrays / name).read_bytes(), name
