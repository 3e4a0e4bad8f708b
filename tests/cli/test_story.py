"""`emu story` tells how a replica stood, and prints a test that brings it there and passes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import anyio
import pytest

import emu
from emu.cli import main
from emu.errors import InputError
from emu.testing import Moment
from tests.serve.live import live, tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a decode replica crashes."""
    directory = tmp_path_factory.mktemp("story") / "run"
    path = ROOT / "configs" / "experiments" / "chaos-decode-crash.toml"
    emu.run(path, {"workload.limit": 300}, output=directory, report=False)
    return directory


def passes(text: str, directory: Path) -> None:
    """The printed test is run, and its every claim once more turned into its opposite."""
    path = directory / "test_moment.py"
    path.write_text(text)
    (test,) = [f for name, f in runpy.run_path(str(path)).items() if name.startswith("test_")]
    test()
    path.write_text(text.replace(" == ", " != "))
    (test,) = [f for name, f in runpy.run_path(str(path)).items() if name.startswith("test_")]
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize(("replica", "at_s"), [(0, 3.3), (5, 12.0)])
def test_the_printed_test_passes(
    run: Path, replica: int, at_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["story", str(run), "--replica", str(replica), "--at", f"{at_s}s"]
    assert main([*asked, "--as-test"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") <= 13
    passes(text, tmp_path)
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"replica {replica} at {at_s:.6f} s\n")
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replica"] == replica


def test_the_printed_test_passes_for_a_session_of_live_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = tmp_path / "session"
    fault = {"kind": "straggler", "replica": 0, "magnitude": 3.0, "at_s": 0.001}

    async def serve() -> None:
        raw = tables(faults=[{**fault, "duration_s": 900.0}])
        async with live(session, raw) as server:
            for _ in range(3):
                assert (await server.complete(max_tokens=20)).status_code == 200

    anyio.run(serve)
    first = json.loads((session / "workload.jsonl").read_text().splitlines()[0])
    at_s = (first["arrival_time_ns"] + 20_000_000) / 1e9
    asked = ["story", str(session), "--replica", "0", "--at", f"{at_s}s", "--as-test"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "replica.running == [0]" in text
    passes(text, tmp_path)


OWN_ROUTER = "class First:\n    def choose(self, request, signals):\n        return 0\n"


@pytest.mark.parametrize("kind", ["run", "session"])
def test_code_that_a_directory_names_runs_only_where_it_is_allowed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A session's directory ran it without a word, and the printed test of a run was refused."""
    module, directory = tmp_path / "first.py", tmp_path / "of"
    module.write_text(OWN_ROUTER)
    changes = {"workload.limit": 40, "router.policy": f"{module}:First"}
    emu.run(ROOT / "configs" / "quickstart.toml", changes, output=directory, report=False)
    if kind == "session":
        config = (ROOT / "configs" / "quickstart.toml").read_text()
        (directory / "replay.toml").write_text(f'router.policy = "{module}:First"\n{config}')
    asked = ["story", str(directory), "--replica", "0", "--at", "0.5s", "--as-test"]
    assert main(asked) == 2
    assert f"{module}" in (line := capsys.readouterr().err) and "--plugins" in line
    assert main([*asked, "--plugins"]) == 0
    passes(capsys.readouterr().out, tmp_path)


def test_a_moment_is_the_same_with_and_without_leaps(run: Path, tmp_path: Path) -> None:
    path = ROOT / "configs" / "quickstart.toml"
    text = path.read_text()
    found = []
    for leap in ("true", "false"):
        config = tmp_path / f"{leap}.toml"
        config.write_text(text.replace("[workload", f"[scheduler]\nleap = {leap}\n\n[workload", 1))
        moment = Moment(config, at_s=7.7)
        one = moment.replica(2)
        found.append((one.running, one.waiting, one.kv_blocks_used, one.decode_tokens))
    assert found[0] == found[1]
    assert found[0][0]


@pytest.mark.parametrize(
    ("replica", "at", "problem"),
    [
        ("0", "12.4", "needs a unit"),
        ("99", "1s", "--replica: the run has replicas 0 to"),
        ("0", "99999s", "--at: the run ended at"),
        ("0", "0s", "--at: expected seconds above 0"),
    ],
)
def test_a_moment_that_the_run_does_not_have_is_refused(
    run: Path, replica: str, at: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["story", str(run), "--replica", replica, "--at", at]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the directory of a complete run"):
        Moment(tmp_path, at_s=1.0)
