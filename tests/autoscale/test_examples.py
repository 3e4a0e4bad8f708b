"""The planner and the pod autoscaler that docs/autoscale.md shows do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.runs.runner import adjust, execute
from tests.csvfile import csv_rows

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def plans_of(directory: Path) -> list[tuple[int, str]]:
    marks = csv_rows(directory / "marks.csv")
    return [(int(row["time_ns"]), row["text"]) for row in marks if row["kind"] == "plan"]


def run(path: Path, out: Path, *overrides: str) -> None:
    config = adjust(load_config(path, list(overrides)), seed=None, output=out)
    execute(config, str(path), report=False)


@pytest.mark.slow
def test_a_planner_of_ones_own_scales_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CONFIGS / "plugins"))
    tutorial = CONFIGS / "experiments" / "tutorial-autoscale.toml"
    overrides = ("autoscale.planner=my_planner:Steps", "workload.limit=600")
    run(tutorial, tmp_path / "out", *overrides)
    plans = plans_of(tmp_path / "out")
    assert any("prefill +1" in text for _, text in plans)
    for _, text in plans:
        assert "queue_s=" in text
        assert "use=" in text
        changes = [int(n) for n in re.findall(r"(?:prefill|decode) ([+-]\d+)", text)]
        assert max(map(abs, changes)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "period_s", "target"),
    [
        ((), 15, 24.0),
        (
            (
                "autoscale.metric=queue",
                "autoscale.target_value=4",
                "autoscale.tick_ms=5000",
            ),
            5,
            4.0,
        ),
    ],
)
def test_the_pod_autoscaler_of_the_example(
    tmp_path: Path, overrides: tuple[str, ...], period_s: int, target: float
) -> None:
    run(CONFIGS / "experiments" / "hpa.toml", tmp_path / "out", *overrides)
    plans = plans_of(tmp_path / "out")
    assert all(at_ns % (period_s * 10**9) == 0 for at_ns, _ in plans)
    figures = [dict(re.findall(r"(\w+)=([\d.]+)", text)) for _, text in plans]
    first = figures[0]
    assert float(first["wanted"]) == min(6, -(-float(first["load"]) // target))
    moves = csv_rows(tmp_path / "out" / "transitions.csv")
    ordered = min(int(r["time_ns"]) for r in moves if r["to"] == "loading_colocated")
    ready = min(int(r["time_ns"]) for r in moves if r["from"] == "loading_colocated")
    assert 20e9 < ready - ordered < 25e9, "a process starts, then its weights load"
    shut = [int(r["time_ns"]) for r in moves if r["to"] == "shutting_colocated"]
    assert not shut or min(shut) >= ordered + 300e9
