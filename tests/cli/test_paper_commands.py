"""Publishing: figures, the same run again, artifacts, trackers."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import pytest

from emu.cli import main
from emu.errors import InputError, RunError
from emu.process.version import revision
from emu.report.figures import write_figure
from emu.report.intervals import Mean, mean_of
from emu.report.what_ran import flat_settings
from emu.runs.again import rerun_command, run_again
from emu.runs.bundle import bundle
from tests.cli.helpers import SMALL
from tests.emptied import commands_of, empty_environment, given, unpacked
from tests.report.fabricate import fabricate


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration that replays a small trace."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{0.2 * i:.1f},{100 + i},{4 + i % 3}\n" for i in range(30)]
    Path("t.csv").write_text("arrival_s,input_toks,output_toks\n" + "".join(rows))
    Path("c.toml").write_text(SMALL)
    return tmp_path


def run(output: str, *more: str) -> Path:
    line = ["run", "c.toml", "-q", "--no-report", "-o", output, "--set", "workload.path=t.csv"]
    assert main([*line, *more]) == 0
    return Path(output)


# --- the same run again --------------------------------------------------------------------------
@pytest.mark.usefixtures("place")
def test_a_run_again_has_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    directory = run("runs/a")
    again = run_again(directory)
    assert again.different == again.reasons == []
    assert {"requests.csv", "summary.json", "itl.json"} <= set(again.identical)
    assert main(["rerun", str(directory), "-o", "runs/kept"]) == 0
    assert "identical" in capsys.readouterr().out
    kept = Path("runs/kept/requests.csv").read_bytes()
    assert kept == (directory / "requests.csv").read_bytes()


@pytest.mark.usefixtures("place")
def test_what_differs_is_told_with_its_reason() -> None:
    directory = run("runs/a")
    content = json.loads((directory / "run.json").read_text())
    content["versions"]["emu"] = "0.0.9"
    (directory / "run.json").write_text(json.dumps(content))
    Path("t.csv").write_text("arrival_s,input_toks,output_toks\n0.0,100,4\n")
    with pytest.raises(RunError) as raised:
        rerun_command([directory], None, quiet=True)
    text = str(raised.value)
    assert "\n  requests.csv: " in text
    assert "because emu: 0.0.9 then" in text
    assert "t.csv has changed since the run" in text
    Path("t.csv").unlink()
    with pytest.raises(InputError, match="its input is gone"):
        run_again(directory)


@pytest.mark.usefixtures("place")
def test_only_complete_runs_are_run_again() -> None:
    directory = run("runs/a")
    (directory / "summary.json").rename(directory / "summary.partial.json")
    with pytest.raises(InputError, match="not the directory of a complete run"):
        run_again(directory)


# --- an artifact ---------------------------------------------------------------------------------
@pytest.mark.usefixtures("place")
def test_a_bundle_is_enough_to_run_again() -> None:
    runs = [run("runs/a"), run("runs/b", "--seed", "7")]
    names = bundle(runs, Path("x.tar.gz"))
    assert "runs/b/run.json" in names
    first = Path("x.tar.gz").read_bytes()
    assert bundle(runs, Path("x.tar.gz")) == names
    assert Path("x.tar.gz").read_bytes() == first
    shutil.rmtree("runs")
    Path("t.csv").unlink()
    with tarfile.open("x.tar.gz") as archive:
        archive.extractall("out", filter="data")
    for name in ("a", "b"):
        assert run_again(Path("out/x/runs") / name).different == []


@pytest.mark.usefixtures("place")
def test_a_bundle_without_its_inputs_is_refused() -> None:
    directory = run("runs/a")
    with pytest.raises(InputError, match=r"ends in \.tar\.gz"):
        bundle([directory], Path("x.zip"))
    Path("t.csv").write_text("arrival_s,input_toks,output_toks\n0.0,100,4\n")
    with pytest.raises(InputError, match="has changed since"):
        bundle([directory], Path("x.tar.gz"))
    assert not Path("x.tar.gz").exists()


# --- own classes, and places: a run is run again anywhere ----------------------------------------
MINE = """\
from pathlib import Path
from helper import last
Path({mark!r}).touch()
class R:
    def choose(self, request, signals):
        return last(signals)
"""
HELPER = "def last(signals):\n    return len(signals) - 1\n"


def emu(*words: str, home: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with another home directory."""
    return subprocess.run(
        [sys.executable, "-m", "emu", *words],
        cwd=cwd,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def with_class(place: Path, policy: str) -> Path:
    """A run with a router of its own, which has a helper; its code leaves a mark when it runs."""
    (place / "mine.py").write_text(MINE.format(mark=str(place / "ran")))
    (place / "helper.py").write_text(HELPER)
    keys = ("replicas.0.count=2", f"router.policy={policy}", "workload.path=t.csv")
    words = ("run", "c.toml", "-q", "--no-report", "-o", "runs/own", "--set", *keys)
    done = emu(*words, home=place, cwd=place)
    assert done.returncode == 0, done.stderr
    (place / "ran").unlink()
    return Path("runs/own")


def test_a_bundle_with_a_module_is_run_again_elsewhere(place: Path, tmp_path: Path) -> None:
    """In another directory, with another home, when nothing is left of where it was made."""
    directory = with_class(place, "mine:R")
    assert main(["bundle", str(directory), "-o", "x.tar.gz", "-q"]) == 0
    away = tmp_path / "away"
    with tarfile.open("x.tar.gz") as archive:
        archive.extractall(away, filter="data")
    for name in ("mine.py", "helper.py", "t.csv", "c.toml"):
        (place / name).unlink(missing_ok=True)
    shutil.rmtree("runs")
    words = ["rerun", str(away / "x/runs/own"), "--plugins"]
    done = emu(*words, home=tmp_path / "other", cwd=away)
    assert done.returncode == 0, done.stderr
    assert "identical (requests.csv, summary.json" in done.stdout
    assert "although" not in done.stdout
    assert (place / "ran").exists()


@pytest.mark.parametrize("policy", ["./mine.py:R", "mine:R"])
def test_a_run_with_an_own_class_is_run_again_from_any_directory(
    place: Path, policy: str, tmp_path: Path
) -> None:
    directory = with_class(place, policy)
    (tmp_path / "away").mkdir()
    words = ("rerun", str(directory.resolve()), "--plugins")
    done = emu(*words, home=tmp_path, cwd=tmp_path / "away")
    assert done.returncode == 0, done.stderr
    (place / "helper.py").write_text(HELPER.replace("len(signals) - 1", "0"))
    done = emu(*words, home=tmp_path, cwd=tmp_path / "away")
    assert done.returncode == 3
    assert f"because {place / 'helper.py'} has changed since the run" in done.stderr
    (place / "helper.py").unlink()
    done = emu(*words, home=tmp_path, cwd=tmp_path / "away")
    assert done.returncode == 2
    assert f"a file of its class is gone: {place / 'helper.py'}" in done.stderr


def test_code_of_a_run_runs_only_when_it_is_allowed(place: Path) -> None:
    directory = with_class(place, "./mine.py:R")
    done = emu("rerun", str(directory), home=place, cwd=place)
    assert done.returncode == 2
    assert done.stderr == (
        f"{directory}: runs code that it names: {place / 'helper.py'}, {place / 'mine.py'}; "
        "read it, then allow it with --plugins\n"
    )
    assert not (place / "ran").exists()
    assert emu("rerun", str(directory), "--plugins", home=place, cwd=place).returncode == 0
    assert (place / "ran").exists()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router", {"policy": "/tmp/evil.py:R"}),
        ("latency", {"backend": "astra-sim", "binary": "/tmp/evil"}),
    ],
)
def test_code_that_a_foreign_run_names_without_its_files_is_told(
    key: str, value: dict[str, str]
) -> None:
    directory = run("runs/a")
    content = json.loads((directory / "run.json").read_text())
    content["config"][key] = value
    (directory / "run.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"runs code that it names: /tmp/evil.*--plugins"):
        run_again(directory)


def test_a_run_tells_no_home_directory(place: Path, tmp_path: Path) -> None:
    """Not of files, classes, results, overrides, nor of the command line."""
    home = tmp_path / "home" / "ada"
    (home / "work").mkdir(parents=True)
    (home / "lib").mkdir()
    for name in ("c.toml", "t.csv"):
        (home / name).write_text((place / name).read_text())
    (home / "lib" / "mine.py").write_text("class R:\n    def choose(self, r, s): return 0\n")
    keys = [f"workload.path={home}/t.csv", f"router.policy={home}/lib/mine.py:R"]
    keys.append("output.report=true")
    for out in (f"{home}/runs/a", str(tmp_path / "elsewhere"), "here"):
        done = emu(
            *("run", f"{home}/c.toml", "-q", "-o", out, "--set", *keys),
            home=home,
            cwd=home / "work",
        )
        assert done.returncode == 0, done.stderr
        directory = (home / "work" / out).resolve()
        text = (directory / "run.json").read_text()
        assert str(home) not in text and "/ada" not in text
        assert "~/t.csv" in json.loads(text)["inputs"]
        done = emu("rerun", str(directory), "--plugins", home=home, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert str(home) not in (directory / "report.html").read_text()


@pytest.mark.usefixtures("place")
def test_a_bundle_of_another_revision_tells_how_that_is_built(tmp_path: Path) -> None:
    directory = run("runs/a")
    content = json.loads((directory / "run.json").read_text())
    content["versions"]["revision"] = "0123456789ab"
    (directory / "run.json").write_text(json.dumps(content))
    names = bundle([directory], Path("x.tar.gz"))
    assert not any(name.endswith(".whl") for name in names)
    text = (unpacked(Path("x.tar.gz"), tmp_path / "away") / "README.md").read_text()
    assert "git checkout 0123456789ab && python -m pip install . numpy==" in text


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_the_commands_of_a_bundle_run_it_again_in_an_empty_environment(tmp_path: Path) -> None:
    """Its README's two commands, in an empty directory; tests/study does it with own classes."""
    bundle([run("runs/own")], Path("x.tar.gz"))
    away = unpacked(Path("x.tar.gz"), tmp_path / "away")
    shutil.rmtree("runs")
    commands = commands_of(away / "README.md")
    assert commands[0].startswith("python -m pip install ./emu_llm-") and "numpy==" in commands[0]
    assert commands[1:] == ["emu rerun runs/*"]
    done = given([*commands, "emu --version"], away, empty_environment(tmp_path / "env"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs/own: identical (requests.csv, summary.json" in done.stdout
    assert "although" not in done.stdout and f"revision {revision()}," in done.stdout


@pytest.mark.slow
def test_a_bundle_tells_nothing_of_where_it_was_made(place: Path, tmp_path: Path) -> None:
    """Neither in run.json nor on the page, however absolute the names were that were given."""
    (place / "mine.py").write_text("class R:\n    def choose(self, r, s): return 0\n")
    keys = [f"workload.path={place}/t.csv", f"router.policy={place}/mine.py:R"]
    words = ["run", f"{place}/c.toml", "-q", "-o", f"{place}/runs/a", "--set", *keys]
    done = emu(*words, "output.report=true", home=tmp_path / "other", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    bundle([place / "runs/a"], Path("x.tar.gz"))
    first = Path("x.tar.gz").read_bytes()
    bundle([place / "runs/a"], Path("x.tar.gz"))
    assert Path("x.tar.gz").read_bytes() == first
    away = unpacked(Path("x.tar.gz"), tmp_path / "away")
    content = json.loads((away / "runs/a/run.json").read_text())
    assert content["config_file"] == "c.toml"
    assert content["command"].startswith("emu run c.toml")
    assert content["overrides"][0].startswith("workload.path=inputs/")
    assert (away / content["config"]["workload"]["path"]).is_file()
    for path in away.rglob("*"):
        if path.is_file() and path.suffix != ".whl":
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            for where in (str(place), "emu-bundle-", str(Path.home())):
                assert where.encode() not in data, (path, where)


@pytest.mark.usefixtures("place")
def test_a_class_without_a_file_is_not_packed() -> None:
    directory = run("runs/a")
    content = json.loads((directory / "run.json").read_text())
    content["config"]["router"]["policy"] = "__main__:Mine"
    (directory / "run.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="__main__:Mine stands in no file"):
        bundle([directory], Path("x.tar.gz"))


def deep() -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(400):
        value = {"a": value}
    return value


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("config", [], "config: unusable: expected an object"),
        ("config", None, "config: unusable: expected an object"),
        ("config", deep(), "config: unusable: nested too deeply"),
        ("config", {"workload": {"path": "\0"}}, "path: its input is gone"),
        ("config", {"workload": {"path": "x" * 5000}}, "path: its input is gone"),
        ("config", {"workload": 3}, "workload: expected a table, got 3"),
        ("config", {"faults": 3}, "faults: expected an array, got 3"),
        ("config", {"replicas": [3]}, "replicas.0: expected a table, got 3"),
        ("config_file", 3, "config_file: unusable: expected a string"),
        ("overrides", {}, "overrides: unusable: expected an array"),
        ("inputs", [], "inputs: unusable: expected an object"),
        ("inputs", {"t.csv": 3}, "inputs: unusable: t.csv"),
        ("inputs", {"t.csv": "../../etc"}, "inputs: unusable: t.csv"),
        ("classes", {"R": 3}, "classes: unusable: R"),
        ("classes", {"R": {"folder": "", "files": {"../x": "0" * 64}}}, "classes: unusable: R"),
        ("versions", [], "versions: unusable: expected an object"),
    ],
)
def test_an_odd_run_json_is_refused_in_one_line(
    key: str, value: object, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run("runs/a")
    content = json.loads((directory / "run.json").read_text())
    content[key] = value
    (directory / "run.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["rerun", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


@pytest.mark.usefixtures("place")
def test_a_run_json_that_is_no_object_is_refused() -> None:
    directory = run("runs/a")
    (directory / "run.json").write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        run_again(directory)


# --- runs that are kept --------------------------------------------------------------------------
@pytest.mark.usefixtures("place")
def test_a_run_of_another_configuration_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    directory = run("runs/a")
    before = (directory / "requests.csv").read_bytes()
    run("runs/a", "--seed", "7")
    assert "runs/a holds another run; this one goes to runs/a-2" in capsys.readouterr().err
    assert (directory / "requests.csv").read_bytes() == before
    run("runs/a")
    assert capsys.readouterr().err == ""
    run("runs/a", "--seed", "7")
    assert "runs/a-2" in capsys.readouterr().err
    run("runs/a", "--seed", "8", "--force")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a", "a-2"]
    assert json.loads(Path("runs/a/run.json").read_text())["config"]["seed"] == 8


# --- several seeds -------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_seeds_give_means_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    for name, batch in (("a", 64), ("b", 1)):
        line = f"run c.toml --seeds 3 -j 2 --no-report -q -o {name} --set"
        assert main([*line.split(), f"scheduler.max_num_seqs={batch}"]) == 0
    found = json.loads(Path("a/seeds.json").read_text())
    assert found["seeds"] == [42, 43, 44]
    figure = found["figures"]["mean_ttft_ms"]
    single = [
        json.loads(Path(f"a/seed-{seed}/summary.json").read_text())["mean_ttft_ms"]
        for seed in found["seeds"]
    ]
    assert figure["values"] == single
    assert figure["mean"] == pytest.approx(sum(single) / 3)
    spread = statistics.stdev(single) / 3**0.5
    assert figure["half"] == pytest.approx(4.303 * spread)
    assert main(["compare", "a", "b", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["TTFT mean, ms"]["percent"][0] > rows["TTFT mean, ms"]["half"][0]
    assert main(["run", "c.toml", "--seeds", "2", "-o", "a"]) == 2
    assert "holds results already" in capsys.readouterr().err


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    rng = random.Random(1)
    for count in (3, 8, 40):
        hits = 0
        for _ in range(2000):
            mean = mean_of([rng.gauss(5.0, 2.0) for _ in range(count)])
            assert mean.half is not None
            hits += abs(mean.mean - 5.0) <= mean.half
        assert hits / 2000 == pytest.approx(0.95, abs=0.015), count
    assert mean_of([7.0]) == Mean(7.0, None, 1)


# --- figures -------------------------------------------------------------------------------------
@pytest.mark.parametrize("figure", ["ttft-cdf", "timeline", "gpus", "gantt", "pareto"])
def test_a_figure_is_the_same_each_time(tmp_path: Path, figure: str) -> None:
    pytest.importorskip("matplotlib")
    runs = [fabricate(tmp_path / "a"), fabricate(tmp_path / "b")]
    write_figure(tmp_path / "x.svg", figure, runs, width="double")
    first = (tmp_path / "x.svg").read_bytes()
    write_figure(tmp_path / "x.svg", figure, runs, width="double")
    assert (tmp_path / "x.svg").read_bytes() == first
    assert first.count(b"<path") > 10


def test_a_pdf_embeds_its_fonts_and_has_no_date(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    directory = fabricate(tmp_path / "a")
    assert main(["plot", str(directory), "-o", str(tmp_path / "x.pdf"), "-q"]) == 0
    data = (tmp_path / "x.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert b"/FontFile2" in data
    assert b"/CreationDate" not in data


def test_figures_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    directory = str(fabricate(tmp_path / "a"))
    for words, problem in (
        (["--out", "x.bmp"], "expected a name in pdf, svg, png"),
        (["--figure", "pareto", "--x", "nope"], "is no number in summary.json"),
        (["--figure", "ttft"], "invalid choice"),
        (["--out", str(tmp_path / "no" / "x.pdf")], "No such file"),
    ):
        assert main(["plot", directory, *words]) == 2
        assert problem in capsys.readouterr().err


# --- trackers ------------------------------------------------------------------------------------
@pytest.mark.usefixtures("place")
def test_a_run_goes_to_mlflow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {"files": []}
    fake = types.ModuleType("mlflow")

    class Active:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def start_run(run_name: str) -> Active:
        seen["name"] = run_name
        return Active()

    fake.set_experiment = lambda name: seen.update(project=name)  # type: ignore[attr-defined]
    fake.start_run = start_run  # type: ignore[attr-defined]
    fake.log_params = lambda values: seen.update(params=values)  # type: ignore[attr-defined]
    fake.log_metrics = lambda values: seen.update(metrics=values)  # type: ignore[attr-defined]
    fake.log_artifact = seen["files"].append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    directory = run("runs/a")
    assert main(["log", str(directory), "--to", "mlflow", "--project", "p"]) == 0
    assert (seen["project"], seen["name"]) == ("p", "a")
    assert seen["metrics"]["completed"] == 30
    assert seen["params"]["workload.path"] == "t.csv"
    assert [Path(file).name for file in seen["files"]] == ["summary.json", "run.json"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["log", str(directory), "--to", "wandb"]) == 2
    assert "pip install 'emu-llm[wandb]'" in capsys.readouterr().err


def test_settings_are_flat_and_without_what_is_not_set() -> None:
    config = {"seed": 1, "a": {"b": None, "c": [1, 2]}, "r": [{"n": 3}], "output": {"dir": "x"}}
    assert dict(flat_settings(config)) == {"seed": "1", "a.c": "[1, 2]", "r.0.n": "3"}
