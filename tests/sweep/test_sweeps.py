"""Whole sweeps: searches end, resume, and do not depend on what runs the points."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from emu.apps.shared.points import Base, Point, PointResult, Task, point_pool, run_point
from emu.apps.sweeps.drive import SweepResult
from emu.apps.sweeps.page import write_page
from emu.apps.sweeps.results import write_results
from emu.apps.sweeps.words import answer_text
from emu.config.schema import Config
from emu.errors import InputError, RunError
from emu.process.workers import Workers
from tests.cli.helpers import ROOT, emu, refused
from tests.csvfile import csv_rows
from tests.patience import PATIENCE_S, until
from tests.sweep.helpers import BASE, SEARCH, swept, write


def files(directory: Path) -> dict[str, bytes]:
    """All files of a sweep's output."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def rows_of(result: SweepResult) -> list[dict[str, str]]:
    write_results(result)
    return csv_rows(result.directory / "results.csv")


def test_a_search_ends_with_a_bracket_that_holds(tmp_path: Path) -> None:
    result = swept(tmp_path, SEARCH)
    answer = result.answer
    assert answer is not None
    assert answer.value is not None
    assert answer.fails_at is not None
    assert 0 < answer.fails_at - answer.value <= 0.05 * answer.fails_at
    rows = rows_of(result)
    for row in rows:
        met = float(row["p99_ttft_ms"]) < 900 and float(row["p99_tpot_ms"]) < 100
        assert row["meets"] == str(met).lower()
    rates = {float(row["workload.synthetic.arrivals.rate_per_s"]): row["meets"] for row in rows}
    assert rates[answer.value] == "true"
    assert rates[answer.fails_at] == "false"
    assert f"{answer.value:g} ({answer.fails_at:g} does not meet it)" in answer_text(answer)


def test_the_smallest_count_is_found(tmp_path: Path) -> None:
    text = """
        base = "base.toml"
        set = { workload.synthetic.arrivals.rate_per_s = 100.0 }
        [search]
        key = "replicas.0.count"
        goal = "lowest"
        integer = true
        min = 1
        max = 8
        meet = ["p99_ttft_ms < 900"]
    """
    result = swept(tmp_path, text)
    assert result.answer is not None
    assert result.answer.value == 1 + (result.answer.fails_at or 0)
    assert 1 < result.answer.value < 8
    assert all(isinstance(row.point.values["replicas.0.count"], int) for row in result.rows)


def test_one_core_and_two_give_the_same_files(tmp_path: Path) -> None:
    for name, jobs in (("one", 1), ("two", 2)):
        result = swept(tmp_path, SEARCH, jobs=jobs, output=tmp_path / name)
        write_results(result)
        write_page(result)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert "report.html" in files(tmp_path / "one")


def test_ray_gives_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    for name, ray in (("here", None), ("ray", "local")):
        jobs = 1 if ray is None else 2
        write_results(swept(tmp_path, SEARCH, jobs=jobs, ray=ray, output=tmp_path / name))
    assert files(tmp_path / "here") == files(tmp_path / "ray")


def interrupted(directory: Path, code: Path, requests: int) -> tuple[int, str]:
    """Exit status and stderr of a search that gets SIGINT when two points are there."""
    path = write(directory, SEARCH, BASE.replace("requests = 60", f"requests = {requests}"))
    process = subprocess.Popen(
        [sys.executable, "-m", "emu", "sweep", str(path), "-j", "2"],
        env={**os.environ, "PYTHONPATH": str(code)},
        cwd=code,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    points = directory / "runs" / "sweep" / "points"
    try:
        until(lambda: len(list(points.glob("*.json"))) >= 2 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, err


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path) -> None:
    # A copy of the program: the store is keyed by the code, which may be edited meanwhile.
    code = tmp_path / "code"
    shutil.copytree(ROOT / "emu", code / "emu", ignore=shutil.ignore_patterns("__pycache__"))
    for extension in ROOT.glob("emu__mypyc*"):  # of a compiled build
        shutil.copy2(extension, code)
    directory, status, err = tmp_path, 0, ""
    for requests in (1_500, 10_000, 70_000):
        directory = tmp_path / str(requests)
        directory.mkdir()
        status, err = interrupted(directory, code, requests)
        if status != 0:
            break  # else it was over before the look: a longer one
    assert status == 130, err
    assert err.splitlines() == [
        "what was finished is kept; the same command goes on from there",
        "interrupted",
    ]
    path, points = directory / "sweep.toml", directory / "runs" / "sweep" / "points"
    kept = {file.name: file.stat().st_mtime_ns for file in points.glob("*.json")}
    assert len(kept) >= 2
    assert not (directory / "runs" / "sweep" / "results.csv").exists()
    again = emu("sweep", path, "-j", 1, cwd=code, PYTHONPATH=str(code))
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of them from the store" in again.stdout
    for name, written in kept.items():
        assert (points / name).stat().st_mtime_ns == written
    fresh = emu("sweep", path, "-j", 1, "-o", directory / "fresh", cwd=code, PYTHONPATH=str(code))
    assert fresh.returncode == 0
    assert files(directory / "runs" / "sweep") == files(directory / "fresh")


def test_a_stored_point_is_run_again_only_when_what_it_depends_on_changed(tmp_path: Path) -> None:
    grid = 'base = "base.toml"\n[grid]\n"replicas.0.count" = [1, 2]\n'
    assert swept(tmp_path, grid).from_store == 0
    assert swept(tmp_path, grid).from_store == 2
    wider = grid.replace("[1, 2]", "[1, 2, 3]")
    assert swept(tmp_path, wider).from_store == 2
    assert swept(tmp_path, grid, overrides=["seed=9"]).from_store == 0
    assert swept(tmp_path, grid, overrides=["output.trace=true"]).from_store == 2


def test_the_key_follows_the_content_of_files_not_their_place(tmp_path: Path) -> None:
    keys = []
    for name, text in (("a", "0,100,10\n"), ("b", "0,100,10\n"), ("c", "0,100,11\n")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "w.csv").write_text("arrival_time_ns,input_toks,output_toks\n" + text)
        (directory / "base.toml").write_text('[workload]\npath = "w.csv"\n')
        base = Base(directory / "base.toml")
        keys.append(base.key(base.config({}, Point({}))))
    assert keys[0] == keys[1] != keys[2]


def test_a_damaged_store_file_counts_as_absent(tmp_path: Path) -> None:
    grid = 'base = "base.toml"\n[grid]\n"replicas.0.count" = [1, 2]\n'
    swept(tmp_path, grid)
    victim = next((tmp_path / "runs" / "sweep" / "points").glob("*.json"))
    victim.write_text("{")
    assert swept(tmp_path, grid).from_store == 1


def test_wrong_points_stand_beside_good_ones(tmp_path: Path) -> None:
    grid = 'base = "base.toml"\n[grid]\n"replicas.0.count" = [1, 9]\n"router.policy" = ["load"]\n'
    rows = rows_of(swept(tmp_path, grid))
    assert [row["status"] for row in rows] == ["completed", "invalid"]
    assert rows[1]["error"]
    assert rows[1]["p99_ttft_ms"] == ""


def test_a_run_that_cannot_go_on_is_a_failed_point(tmp_path: Path) -> None:
    grid = 'base = "base.toml"\n[grid]\n"limits.simulated_s" = [0, 0.5]\n'
    result = swept(tmp_path, grid)
    assert [row.result.status for row in result.rows] == ["completed", "failed"]
    assert result.rows[1].result.error.startswith("LimitReached: ")


def test_equal_points_are_run_once(tmp_path: Path) -> None:
    grid = 'base = "base.toml"\n[[list]]\nseed = 3\n[[list]]\nseed = 3\n'
    result = swept(tmp_path, grid)
    assert len(result.rows) == 2
    assert result.rows[0].result is result.rows[1].result


def test_runs_are_kept_when_asked_for(tmp_path: Path) -> None:
    grid = 'base = "base.toml"\nkeep_runs = true\n[[list]]\nseed = 3\n'
    result = swept(tmp_path, grid)
    kept = tmp_path / "runs" / "sweep" / "runs" / result.rows[0].result.key
    assert json.loads((kept / "summary.json").read_text())["completed"] == 60
    assert swept(tmp_path, grid).from_store == 1


def test_a_point_gives_what_a_run_gives(tmp_path: Path) -> None:
    result = swept(tmp_path, 'base = "base.toml"\n[[list]]\nseed = 3\n')
    done = emu(tmp_path / "base.toml", "-q", "--seed", 3, "-o", tmp_path / "run")
    assert done.returncode == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    figures = result.rows[0].result.figures
    assert figures["p99_ttft_ms"] == summary["p99_ttft_ms"]
    assert figures["load.verdict"] == summary["load"]["verdict"]
    assert figures["gpu_seconds.total"] == summary["gpu_seconds"]["total"]


def test_a_worker_that_dies_is_told() -> None:
    with Workers(1, run_point, lambda task: f"its point was {task.key}") as pool:
        pool._start()
        pool._processes[0].kill()
        pool._processes[0].join()
        with pytest.raises(RunError, match=r"status -9 .*; its point was k$"):
            list(pool.results([Task("k", Config(), "", "")]))


def test_a_pool_is_left_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emu.process.workers._END_S", PATIENCE_S)  # it has yet to begin
    with point_pool(2, None) as pool:
        assert isinstance(pool, Workers)
        assert list(pool.results([])) == []
        pool._start()
        processes = list(pool._processes)
    assert all(process.exitcode == 0 for process in processes)
    with point_pool(1, None) as here:
        assert here.workers == 1


def test_parquet_holds_what_the_csv_holds(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    grid = 'base = "base.toml"\nparquet = true\n[grid]\n"replicas.0.count" = [1, 9]\n'
    rows = rows_of(swept(tmp_path, grid))
    table = parquet.read_table(tmp_path / "runs" / "sweep" / "results.parquet").to_pylist()
    assert [row["replicas.0.count"] for row in table] == [1, 9]
    assert table[0]["p99_ttft_ms"] == float(rows[0]["p99_ttft_ms"])
    assert table[1]["p99_ttft_ms"] is None


PARETO = """
base = "base.toml"
[pareto]
points = 12
points_per_round = 4
minimize = ["gpu_seconds.total", "p99_ttft_ms"]
[pareto.keys]
"replicas.0.count" = {min = 1, max = 8, integer = true}
"""


def test_a_front_is_found_and_found_again(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed (extra `search`)")
    first = swept(tmp_path, PARETO)
    assert len(first.rows) == 12
    assert 1 <= sum(bool(row.meets) for row in first.rows) <= 12
    costs = [
        (row.result.figures["gpu_seconds.total"], row.result.figures["p99_ttft_ms"])
        for row in first.rows
    ]
    for row, (cost, latency) in zip(first.rows, costs, strict=True):
        beaten = any(c <= cost and y <= latency and (c, y) != (cost, latency) for c, y in costs)
        assert row.meets is not beaten
    again = swept(tmp_path, PARETO, jobs=2, output=tmp_path / "again")
    assert [row.point for row in again.rows] == [row.point for row in first.rows]


@pytest.mark.parametrize("text", [PARETO])
def test_an_extra_that_is_missing_is_named(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        InputError, match=r"needs the package optuna: pip install 'emu-llm\[search\]'"
    ):
        swept(tmp_path, text)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs the package ray"):
        swept(tmp_path, SEARCH, ray="local")


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup.\nThis could happen because ..."),
        RuntimeError(""),
        ConnectionError("no cluster there"),
    ],
)
def test_a_ray_that_cannot_start_is_told_in_its_own_words(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that times out is a bare Exception."""

    def init(**options: object) -> None:
        raise error

    ray = types.ModuleType("ray")
    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(InputError) as raised:
        swept(tmp_path, SEARCH, ray="local")
    words = " ".join(str(error).split()) or "RuntimeError"
    assert str(raised.value) == f"--ray: local: Ray: {words}"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert refused(emu("sweep", tmp_path / "absent.toml")).endswith("no such file")
    path = write(tmp_path, SEARCH.replace("p99_ttft_ms", "p99_tftt_ms"))
    assert "did you mean p99_ttft_ms" in refused(emu("sweep", path))
    path = write(tmp_path, SEARCH.replace("rate_per_s", "rate_per_sec"))
    assert "did you mean rate_per_s" in refused(emu("sweep", path, "-j", 1))
    path = write(tmp_path, SEARCH.replace("base.toml", "bose.toml"))
    assert "bose.toml: no such file" in refused(emu("sweep", path))
    path = write(tmp_path, 'base = "base.toml"\n[grid]\n"router.polcy" = ["load"]\n')
    assert "every point of the sweep is wrong" in refused(emu("sweep", path, "-j", 1))
    assert "--jobs" in refused(emu("sweep", path, "-j", -1))


def test_a_failing_run_is_a_result_not_an_exception(tmp_path: Path) -> None:
    base = Base(write(tmp_path, SEARCH).with_name("base.toml"))
    config = base.config({"limits.simulated_s": 0.1}, Point({}))
    result = run_point(Task("k", config, "base.toml", ""))
    assert isinstance(result, PointResult)
    assert (result.status, result.figures) == ("failed", {})


def capacity_answers(example: Path, place: Path) -> dict[str, float]:
    """The answer of the capacity search, the same on one process and on two."""
    for name, jobs in (("one", 1), ("two", 2)):
        done = emu("sweep", example, "-q", "-j", jobs, "-o", place / name)
        assert done.returncode == 0, done.stderr
    assert files(place / "one") == files(place / "two")
    answer = json.loads((place / "one" / "sweep.json").read_text())["answer"]
    assert answer["fails_at"] - answer["value"] <= 0.02 * answer["fails_at"]
    return dict(answer)


@pytest.mark.slow
def test_the_capacity_example_gives_one_answer_however_it_is_run(tmp_path: Path) -> None:
    """With six seconds of traffic in place of its minute."""
    for name in ("sweep-capacity.toml", "sweep-base.toml"):
        text = (ROOT / "configs" / "experiments" / name).read_text()
        (tmp_path / name).write_text(text.replace("duration_s = 60", "duration_s = 6"))
    assert "duration_s = 6\n" in (tmp_path / "sweep-base.toml").read_text()
    answer = capacity_answers(tmp_path / "sweep-capacity.toml", tmp_path)
    assert 40 < answer["value"] < 400


@pytest.mark.nightly
def test_the_whole_capacity_example_gives_one_answer(tmp_path: Path) -> None:
    answer = capacity_answers(ROOT / "configs" / "experiments" / "sweep-capacity.toml", tmp_path)
    assert 40 < answer["value"] < 250
    assert answer["is_monotone"]


@pytest.mark.slow
def test_the_grid_example_runs(tmp_path: Path) -> None:
    done = emu(
        "sweep", ROOT / "configs" / "experiments" / "sweep-grid.toml", "-o", tmp_path, COLUMNS="160"
    )
    assert done.returncode == 0, done.stderr
    assert "12 points" in done.stdout
    assert (tmp_path / "report.html").exists()
