"""Sweeps, comparisons and frames in memory; requests from a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.errors import InputError, InvariantViolation, RunError

TABLES: dict[str, Any] = {
    "latency": {"backend": "linear"},
    "nodes": [{"gpus": 4}],
    "replicas": [{"count": 2}],
    "workload": {"synthetic": {"requests": 40}},
}


class First:
    """A router that always takes the first replica."""

    def choose(self, request: Any, signals: Any) -> int:
        return 0


def test_a_sweep_is_a_table_in_memory() -> None:
    grid = {"router.policy": ["load", First], "seed": [1, 2]}
    found = emu.sweep(TABLES, grid=grid, jobs=1)
    assert len(found) == 4 and set(found["status"]) == {"completed"}
    assert found["router.policy"][0] == "load" and "First" in found["router.policy"][-1]
    assert (found["p99_ttft_ms"] > 0).all() and (found["completed"] == 40).all()
    worse = found["mean_ttft_ms"][2:] > found["mean_ttft_ms"][:2]
    assert worse.all()


def test_seeds_are_rows_and_points_may_be_listed() -> None:
    points = [{"replicas.0.count": 1}, {"replicas.0.count": 2}]
    found = emu.sweep(TABLES, points=points, seeds=[3, 4], jobs=1)
    assert found["seed"].tolist() == [3, 4, 3, 4]
    assert found["replicas.0.count"].tolist() == [1, 1, 2, 2]
    with pytest.raises(InputError, match="give a grid or points"):
        emu.sweep(TABLES)
    with pytest.raises(InputError, match="unknown key"):
        emu.sweep(TABLES, points=[{"replicas.0.cuont": 1}], jobs=1)


def test_a_run_may_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = emu.run(TABLES, keep=False)
    assert result.summary.completed == 40 and len(result.requests) == 40
    assert not list(tmp_path.iterdir()) and not result.directory.exists()


def test_requests_come_from_a_list_or_a_frame(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.5 * i, "prompt_tokens": 100 + i, "output_tokens": 5, "tenant": "a"}
        for i in range(6)
    ]
    listed = emu.run(TABLES, workload=rows, output=tmp_path / "run", report=False).requests
    assert listed["prompt_toks"].tolist() == [100, 101, 102, 103, 104, 105]
    assert listed["arrival_ns"].tolist() == [500_000_000 * i for i in range(6)]
    polars = pytest.importorskip("polars", reason="polars is not installed")
    framed = emu.run(TABLES, workload=polars.DataFrame(rows), keep=False).requests
    assert np.array_equal(framed["ttft_ns"], listed["ttft_ns"])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"arrival_s": 0, "prompt_tokens": 1}, "output_tokens or output_toks: missing"),
        ({"arrival_s": 0, "prompt": 1}, "prompt: unknown column"),
        ({"arrival_s": "x"}, "arrival_s: expected a number"),
        (3, "expected a mapping, got int"),
    ],
)
def test_a_wrong_row_is_one_line(row: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        emu.run(TABLES, workload=[row], keep=False)


def test_a_frame_has_the_requests_of_many_runs_in_ms_and_s() -> None:
    runs = {str(n): emu.run(TABLES, {"replicas.0.count": n}, keep=False) for n in (1, 2)}
    table = emu.frame(runs)
    assert len(table) == 80 and set(table["run"]) == {"1", "2"}
    first = runs["1"].requests
    mine = table[table["run"] == "1"]
    assert np.allclose(mine["ttft_ms"], first["ttft_ns"] / 1e6)
    assert np.allclose(mine["arrival_s"], first["arrival_ns"] / 1e9)


def test_runs_are_compared(tmp_path: Path) -> None:
    one = emu.run(TABLES, output=tmp_path / "one", report=False)
    two = emu.run(TABLES, {"replicas.0.count": 1}, output=tmp_path / "two", report=False)
    compared = emu.compare(one, two)
    assert compared.is_paired and compared.names == ["one", "two"]
    assert any(setting[0] == "replicas.0.count" for setting in compared.settings)


def test_runs_in_memory_are_compared_and_drawn(tmp_path: Path) -> None:
    one = emu.run(TABLES, keep=False)
    two = emu.run(TABLES, {"replicas.0.count": 1}, keep=False)
    compared = emu.compare({"two replicas": one, "one replica": two})
    assert compared.names == ["two replicas", "one replica"]
    row = {"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 2}
    pair = {name: emu.run(TABLES, workload=[row], keep=False) for name in "ab"}
    assert emu.compare(pair).settings == []
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    for figure in ("ttft-cdf", "gantt", "pareto"):
        drawn = emu.plot({"a": one, "b": two}, figure=figure)
        assert drawn._repr_png_()[1:4] == b"PNG"
    assert one.plot("tpot-cdf").save(tmp_path / "tpot.pdf").read_bytes()[:4] == b"%PDF"
    with pytest.raises(InputError, match="unknown 'ttft-cfd'; did you mean ttft-cdf"):
        emu.plot(one, figure="ttft-cfd")
    with pytest.raises(InputError, match="expected a name in pdf, svg, png"):
        one.plot().save(tmp_path / "figure.gif")
    with pytest.raises(InputError, match="at least one run"):
        emu.plot()


def test_runs_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    """Lists without a name, and what is neither a result nor a directory."""
    result = emu.run({"workload": {"synthetic": {"requests": 5}}}, output=tmp_path / "a")
    wrong: list[tuple[Any, str]] = [
        ({"a": [], "b": result}, "runs: a: a list of runs needs a name and a run"),
        ([result, result], "runs: a list of runs needs a name and a run"),
        ({"a": [3]}, "runs: a: expected a result or a directory, got a value of type int"),
        ({"a": 3}, "runs: a: expected a result or a directory, got a value of type int"),
        ({3: result}, "runs: expected names that are texts, got 3"),
        (None, "runs: expected a result or a directory, got a value of type NoneType"),
    ]
    for given, problem in wrong:
        for call in (emu.compare, emu.plot):
            with pytest.raises(emu.InputError) as raised:
                call(given)
            assert str(raised.value) == problem


def test_a_cell_of_a_notebook_shows_the_line_of_an_error() -> None:
    """IPython asks the exception for what it shows (`_render_traceback_`)."""
    for error in (InputError("c.toml", 3, "seed", "is wrong"), RunError("it ended")):
        assert error._render_traceback_() == [f"{type(error).__name__}: {error}"]
    try:
        raise InvariantViolation("the books are not zero")
    except InvariantViolation as error:
        shown = error._render_traceback_()
    assert shown[0].startswith("Traceback")
    assert shown[-1].endswith("InvariantViolation: the books are not zero")


def test_a_frame_has_the_time_between_batches_and_the_ratio_of_lengths() -> None:
    """A cache of few blocks preempts; the others are in a batch all the time."""
    tight = {**TABLES, "replicas": [{}], "scheduler": {"num_blocks": 60, "max_num_seqs": 16}}
    tight["model"] = {"max_model_tokens": 900}
    requests = [{"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 50} for _ in range(40)]
    del tight["workload"]
    table = emu.frame({"tight": emu.run(tight, workload=requests, keep=False)})
    assert (table["pd_ratio"] == 2.0).all()
    stopped = table["preemptions"] > 0
    assert stopped.any() and not stopped.all()
    assert (table["preempted_ms"][stopped] > 1.0).all()
    assert (abs(table["preempted_ms"][~stopped]) < 1e-6).all()
