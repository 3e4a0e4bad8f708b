"""Named systems over seeds: runs, failures, tables, figures, files."""

from __future__ import annotations

import json
import linecache
import statistics
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.apps.shared.watching import watching
from emu.apps.study.written import source_of
from emu.cli import main
from emu.errors import InputError
from emu.report.intervals import t_quantile
from emu.report.paired import SeedSet, compared
from tests.emptied import commands_of, empty_environment, given, unpacked

TABLES: dict[str, Any] = {
    "latency": {"backend": "linear"},
    "nodes": [{"gpus": 4}],
    "replicas": [{"count": 2}],
    "workload": {"synthetic": {"requests": 30, "arrivals": {"rate_per_s": 4.0}}},
    "output": {"report": False},
}
LAST = 1


def last(signals: Any) -> int:
    return min(len(signals) - 1, LAST)


class Base:
    first = 0


class Mine(Base):
    """A router that takes one replica, by helpers from beside it."""

    def choose(self, request: Any, signals: Any) -> int:
        return int(np.int64(last(signals)))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of this file stand where those of a cell stand."""
    for found in (Mine, Base):
        monkeypatch.setattr(found, "__module__", "__main__")
    monkeypatch.setattr(last, "__module__", "__main__")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a cell shows of a bar."""
    shown: list[str] = []
    display = types.SimpleNamespace(
        HTML=str,
        display=lambda text, display_id: types.SimpleNamespace(update=shown.append),
    )
    kernel = types.SimpleNamespace(
        get_ipython=lambda: object(), display=display, version_info=(9, 0)
    )
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    return shown


SYSTEMS: dict[str, Any] = {
    "load": {},
    "in turn": {"router.policy": "round_robin"},
    "mine": {"router.policy": Mine},
}


@pytest.mark.usefixtures("place", "in_a_notebook")
def test_systems_are_compared_in_pairs_of_seeds() -> None:
    study = emu.study(TABLES, SYSTEMS, seeds=[1, 2, 3], jobs=1)
    rows = study.rows
    assert rows["status"].tolist() == ["completed"] * 9
    (table,) = study.tables
    assert table.names == ["load", "in turn", "mine"] and table.seeds == [1, 2, 3]
    row = next(row for row in table.rows if row.name == "TTFT mean, ms")
    base, mine = (rows["mean_ttft_ms"][rows["system"] == name] for name in ("load", "mine"))
    apart = [after - before for before, after in zip(base, mine, strict=True)]
    assert row.means[2].mean == pytest.approx(statistics.mean(mine))
    half = t_quantile(2) * statistics.stdev(apart) / 3**0.5
    assert row.half[1] == pytest.approx(100 * half / statistics.mean(base))
    assert "in turn" in repr(study) and "<table>" in study._repr_html_()
    again = emu.compare(study.runs)
    assert [r.percent for r in again.rows] == [r.percent for r in table.rows]
    with pytest.raises(InputError, match="two of its runs have the same seed"):
        emu.compare({"a": study.runs["load"], "b": [study.runs["mine"][0]] * 2})


@pytest.mark.usefixtures("place", "in_a_notebook")
def test_a_class_of_a_notebook_is_a_file_that_others_can_run() -> None:
    study = emu.study(TABLES, {"mine": {"router.policy": Mine}}, seeds=1, jobs=1)
    text = (study.directory / "classes" / "Mine.py").read_text()
    assert "import numpy as np" in text and "LAST = 1" in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["Mine"]().choose(None, [0, 0, 0]) == 1 and names["Mine"].first == 0
    content = json.loads((study.runs["mine"][0].directory / "run.json").read_text())
    assert "Mine.py" in next(iter(content["classes"].values()))["files"]


def test_a_class_that_cannot_be_written_down_is_refused() -> None:
    opened = sys.stderr

    class Odd:
        def choose(self, request: Any, signals: Any) -> int:
            return len(str(opened))

    with pytest.raises(InputError, match=r"study: .*Odd: uses opened, .*file of its own"):
        source_of(Odd)


@pytest.mark.usefixtures("place")
def test_a_run_that_fails_is_a_row_with_its_reason() -> None:
    limit = {"limits.simulated_s": 0.5}
    systems = {"a": {}, "limited": limit, "wrong": {"router.polcy": "x"}}
    study = emu.study(TABLES, systems, seeds=2, jobs=1)
    rows = study.rows
    assert rows["status"].tolist() == ["completed"] * 2 + ["failed"] * 2 + ["invalid"] * 2
    assert "LimitReached" in rows["error"][2] and "did you mean router.policy" in rows["error"][4]
    assert "Without figures: 4 of 6 runs" in repr(study)
    assert [table.names for table in study.tables] == [["a"]]
    with pytest.raises(InputError, match=r"no run is possible; .*did you mean router\.policy"):
        emu.study(TABLES, {"wrong": {"router.polcy": "x"}}, seeds=2, jobs=1)


@pytest.mark.usefixtures("place")
def test_what_was_run_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = emu.study(TABLES, {"a": {}}, seeds=2, jobs=1)
    made = {path: path.stat().st_mtime_ns for path in first.directory.glob("runs/*/run.json")}
    more = emu.study(TABLES, {"a": {}}, seeds=3, jobs=1)
    assert all(path.stat().st_mtime_ns == at for path, at in made.items())
    assert len(made) == 2 and len(more.rows) == 3
    changed = {**TABLES, "seed": 43}
    assert emu.study(changed, {"a": {}}, seeds=1, jobs=1).rows["seed"].tolist() == [43]


@pytest.mark.usefixtures("place")
def test_workloads_are_rows_of_their_own_and_a_replay_has_no_interval() -> None:
    trace = [{"arrival_s": 0.1 * i, "prompt_tokens": 90, "output_tokens": 4} for i in range(9)]
    loads: dict[str, Any] = {
        "trace": trace,
        "fast": {"workload.synthetic.arrivals.rate_per_s": 9.0},
    }
    study = emu.study(TABLES, {"a": {}, "b": SYSTEMS["in turn"]}, seeds=2, workloads=loads, jobs=1)
    replayed, drawn = study.tables
    assert (replayed.title, drawn.title) == ("trace", "fast")
    assert all(row.half == [None] for row in replayed.rows)
    assert "no interval for a, b: the seed changes nothing" in repr(replayed)
    assert any(row.half[0] for row in drawn.rows) and "no interval" not in repr(drawn)
    assert list(study.runs) == ["a, trace", "b, trace", "a, fast", "b, fast"]
    with pytest.raises(InputError, match=r"workloads\.x\.seed: the system a sets it as well"):
        emu.study(TABLES, {"a": {"seed": 1}}, workloads={"x": {"seed": 2}}, jobs=1)


@pytest.mark.parametrize(
    ("systems", "more", "problem"),
    [
        ({}, {}, "systems: give at least one, by name"),
        ({"a": 3}, {}, "systems.a: expected keys, a preset or a configuration, got int"),
        ({"..": {}}, {}, "expected a name with a letter or digit"),
        ({"a b": {}, "a-b": {}}, {}, "is too much like 'a b'"),
        ({"a": {}}, {"seeds": 0}, "seeds: give at least one"),
        ({"a": {}}, {"seeds": [1, 1]}, "the same seed is given twice"),
        ({"a": {}}, {"workloads": {"w": 3}}, "workloads.w: expected keys, a trace or a table"),
        ({"a": "no-preset"}, {}, "no run is possible"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_wrong_study_is_refused_in_one_line(
    systems: Any, more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError) as raised:
        emu.study(TABLES, systems, jobs=1, **more)
    assert problem in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.usefixtures("place")
def test_means_and_bands_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    study = emu.study(TABLES, {"a": {}, "b": SYSTEMS["in turn"]}, seeds=2, jobs=1)
    assert study.plot().save("m.pdf").read_bytes().startswith(b"%PDF")
    bars = [len(panel.containers) for panel in study.plot().figure.axes if panel.get_visible()]
    assert bars == [2, 2, 2, 2]
    (panel,) = study.plot("e2e-cdf").figure.axes
    assert len(panel.collections) == 2  # a band for each system
    for words in ({"y": "nope"}, {"figure": "gantt"}, {"width": "wide"}):
        with pytest.raises(InputError):
            study.plot(**words)


FILE = """\
base = "c.toml"
seeds = [1, 2]
figures = ["p99_ttft_ms"]
[systems.load]
[systems.other]
"router.policy" = "round_robin"
"""


def test_the_command_does_the_same(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.toml").write_text(
        '[latency]\nbackend = "linear"\n[[nodes]]\ngpus = 4\n[[replicas]]\ncount = 2\n'
        "[workload.synthetic]\nrequests = 30\n[output]\nreport = false\n"
    )
    Path("s.toml").write_text(FILE)
    assert main(["study", "s.toml", "-j", "1", "--bundle", "x.tar.gz"]) == 0
    assert "TTFT p99, ms" in (out := capsys.readouterr().out) and "TPOT" not in out
    assert Path("x.tar.gz").exists()
    lines = Path("runs/s/results.csv").read_text().splitlines()
    assert lines[0].startswith("system,workload,seed,status,error,gpus,") and len(lines) == 5
    assert main(["study", "s.toml", "-j", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["runs"] == 4 and len(content["tables"][0]["rows"]) == 1
    for old, new, problem in (
        ("seeds", "seds", "s.toml:2: seds: unknown key; did you mean seeds?"),
        ("[1, 2]", '"a"', "s.toml:2: seeds: expected"),
        ("c.toml", "no.toml", "no.toml"),
    ):
        Path("s.toml").write_text(FILE.replace(old, new))
        assert main(["study", "s.toml", "-j", "1"]) == 2
        assert problem in capsys.readouterr().err


def test_a_difference_is_starred_where_its_interval_excludes_zero() -> None:
    sets = [
        SeedSet("a", [1, 2, 3], {"mean_ttft_ms": [10.0, 20.0, 30.0], "cost": [1.0, 2.0, 3.0]}),
        SeedSet("b", [1, 2, 3], {"mean_ttft_ms": [11.0, 21.0, 31.5], "cost": [3.0, 2.0, 1.0]}),
    ]
    ttft, cost = compared(sets).cells
    assert ttft[-1].endswith("*") and not cost[-1].endswith("*")
    with pytest.raises(InputError, match="different seeds"):
        compared([sets[0], SeedSet("c", [7], {"cost": [1.0]})])


CELL = """\
import emu
base = {
    "latency": {"backend": "linear"}, "nodes": [{"gpus": 4}], "replicas": [{"count": 2}],
    "workload": {"synthetic": {"requests": 30}},
}
class Last:
    def choose(self, request, signals):
        return len(signals) - 1
study = emu.study(
    base,
    {"load": {}, "turn": {"router.policy": "round_robin"}, "mine": {"router.policy": Last}},
    seeds=10, output="runs/of-a-notebook",
)
study.plot().save("means.pdf")
study.bundle("artifact.tar.gz")
"""


@pytest.mark.slow
def test_a_study_of_fifteen_lines_is_run_again_in_an_empty_environment(
    place: Path, notebook: list[str]
) -> None:
    """Three systems by ten seeds in a cell: a bar, a table, a PDF, and a bundle for others."""
    pytest.importorskip("matplotlib")
    assert len(CELL.splitlines()) == 15
    linecache.cache["<cell 1>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<cell 1>")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 1>", "exec"), names)
    assert notebook[-1].endswith("30 of 30 runs")
    (table,) = names["study"].tables
    assert table.names == ["load", "turn", "mine"] and len(table.seeds) == 10
    assert any(text.endswith("*") for row in table.cells for text in row)
    assert Path("means.pdf").read_bytes().startswith(b"%PDF")
    away = unpacked(Path("artifact.tar.gz"), place / "away")
    commands = commands_of(away / "README.md")
    assert commands[1:] == ["emu rerun --plugins runs/*"]
    done = given(commands, away, empty_environment(place / "env"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": identical (requests.csv, summary.json") == 30
    assert "although" not in done.stdout


@pytest.mark.usefixtures("place")
def test_a_sweep_in_a_notebook_shows_how_far_it_is(notebook: list[str]) -> None:
    grid = {"router.policy": ["load", "random"]}
    assert len(emu.sweep(TABLES, grid=grid, jobs=1)) == 2
    assert [text.partition("> ")[2] for text in notebook] == ["1 of 2 points", "2 of 2 points"]
    emu.sweep(TABLES, grid=grid, jobs=1, progress=False)
    assert len(notebook) == 2


def test_a_bar_that_is_not_wanted_is_not_shown(notebook: list[str]) -> None:
    with watching("runs") as watch:
        watch(1, 4, "")
    assert notebook == ['<progress value="1" max="4"></progress> 1 of 4 runs']
    with watching("runs", wanted=False) as watch:
        watch(2, 4, "")
    assert len(notebook) == 1
