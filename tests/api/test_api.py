"""emu from Python: results as arrays, overrides, running beside an event loop."""

from __future__ import annotations

import asyncio
import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.api import override_texts
from tests.csvfile import csv_rows

CONFIG: dict[str, Any] = {
    "latency": {"backend": "linear"},
    "workload": {"synthetic": {"requests": 40, "arrivals": {"rate_per_s": 20.0}}},
    "output": {"report": False, "timeseries_interval_ms": 500.0},
}


def config(directory: Path, **more: Any) -> dict[str, Any]:
    return {**CONFIG, "output": {**CONFIG["output"], "dir": str(directory)}, **more}


def test_result_holds_what_the_files_hold(tmp_path: Path) -> None:
    result = emu.run(config(tmp_path / "run"))
    rows = csv_rows(tmp_path / "run" / "requests.csv")
    assert len(result.requests) == len(rows) == 40
    assert result.requests.dtype.names == tuple(rows[0])
    assert result.requests["ttft_ns"].tolist() == [int(row["ttft_ns"]) for row in rows]
    assert set(result.requests["status"]) == {"completed"}
    assert result.requests["decode_instance_id"].tolist() == [
        int(row["decode_instance_id"] or -1) for row in rows
    ]
    p99_ms = float(np.percentile(result.requests["ttft_ns"], 99)) / 1e6
    assert result.summary.p99_ttft_ms == pytest.approx(p99_ms, abs=1e-6)
    assert set(np.diff(result.timeseries["time_ns"])[:-1]) == {500_000_000}
    assert result.timeseries["completed"].sum() == 40
    assert result.transitions["to"].tolist() == ["colocated"]
    assert result.config["latency"]["backend"] == "linear"
    assert result.wall_s is not None
    assert "40 completed" in repr(result)


def test_a_column_is_a_plain_array_and_a_slice_stays_rows(tmp_path: Path) -> None:
    rows = emu.run(config(tmp_path / "run")).requests
    assert type(rows["ttft_ns"]) is np.ndarray
    assert type(rows[:3]) is emu.Rows
    assert list(rows[:3].columns()) == list(rows.dtype.names or ())


def test_load_reads_a_run_back(tmp_path: Path) -> None:
    first = emu.run(config(tmp_path / "run"))
    again = emu.load(tmp_path / "run")
    assert again.summary == first.summary
    assert again.requests.tolist() == first.requests.tolist()
    assert again.wall_s is None


def test_load_of_no_run_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(emu.InputError, match=r"summary\.json"):
        emu.load(tmp_path)


def test_overrides_change_the_run_as_the_command_line_does(tmp_path: Path) -> None:
    overrides = {
        "replicas.0.count": np.int64(2),
        "router.policy": "random",
        "scheduler.chunked_prefill": False,
        "workload.synthetic.arrivals.rate_per_s": 3.5,
        "replicas.0.gpus": [1, 0],
        "model.max_model_tokens": 9000,
    }
    result = emu.run(config(tmp_path / "a"), overrides)
    assert result.config["replicas"][0]["count"] == 2
    assert result.config["replicas"][0]["gpus"] == [1, 0]
    assert result.config["router"]["policy"] == "random"
    assert result.config["scheduler"]["chunked_prefill"] is False
    texts = emu.run(config(tmp_path / "b"), override_texts(overrides))
    assert texts.requests.tolist() == result.requests.tolist()


def test_seed_and_output_replace_those_of_the_config(tmp_path: Path) -> None:
    result = emu.run(config(tmp_path / "a"), seed=7, output=tmp_path / "b")
    assert result.directory == tmp_path / "b"
    assert result.config["seed"] == 7
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("value", [None, object()])
def test_an_override_that_is_no_value_is_refused(value: object) -> None:
    with pytest.raises(emu.InputError, match=r"overrides: router\.policy: cannot hold"):
        override_texts({"router.policy": value})


def test_a_wrong_key_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(emu.InputError, match=r"^seed: must be at least 0, not -1$"):
        emu.run(config(tmp_path), seed=-1)
    with pytest.raises(emu.InputError, match=r"^--set: router\.polcy: unknown key; did you mean"):
        emu.run(config(tmp_path), {"router.polcy": "random"})


def test_runs_beside_a_running_event_loop(tmp_path: Path) -> None:
    async def cell() -> emu.Result:
        return emu.run(config(tmp_path / "inside"))

    inside = asyncio.run(cell())
    outside = emu.run(config(tmp_path / "outside"))
    assert inside.requests.tolist() == outside.requests.tolist()


def test_an_error_beside_a_running_loop_arrives_as_itself(tmp_path: Path) -> None:
    async def cell() -> None:
        emu.run(config(tmp_path / "x", limits={"simulated_s": 0.001}))

    with pytest.raises(emu.RunError):
        asyncio.run(cell())
    assert (tmp_path / "x" / "summary.partial.json").exists()


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = emu.run(config(tmp_path / "run")).requests
    plain = builtins.__import__

    def absent(wanted: str, *rest: Any, **named: Any) -> Any:
        if wanted == name:
            raise ModuleNotFoundError(wanted)
        return plain(wanted, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(emu.MissingPackage, match=f"pip install {name}"):
        getattr(rows, f"to_{name}")()


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_rows_become_a_data_frame(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    rows = emu.run(config(tmp_path / "run")).requests
    frame = getattr(rows, f"to_{name}")()
    assert list(frame.columns) == list(rows.dtype.names or ())
    assert frame["ttft_ns"].to_list() == rows["ttft_ns"].tolist()


def test_importing_emu_loads_nothing_heavy() -> None:
    code = (
        "import emu, sys; print(*(m for m in sys.modules if m.split('.')[0] in ('numpy', 'emu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    takes_the_build = {"emu.process", "emu.process.compiled"}
    assert set(done.stdout.split()) == {"emu"} | takes_the_build


def test_emu_run_stays_callable_whatever_was_imported() -> None:
    code = "import emu; a = emu.run; import emu.cli, emu.runs.runner, emu.api; assert emu.run is a"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = emu.nothing  # type: ignore[attr-defined]
