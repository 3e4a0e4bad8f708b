"""The benchmarks measure what they say: every case runs, preempts or scales as its name claims."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import emu
from benchmarks.cases import (
    REPLICAS,
    START_REPLICAS,
    Case,
    all_cases,
    burst_case,
    overload_case,
    quick_cases,
)
from benchmarks.measure import Cost, Failed, median, timed
from emu.config.load import load_config


def _run(case: Case, directory: Path) -> emu.Result:
    config = directory / "case.toml"
    config.write_text(case.config)
    return emu.run(config, {}, output=directory / "out", report=False)


@pytest.mark.parametrize("case", [*all_cases(), *quick_cases()], ids=lambda case: case.name)
def test_every_case_is_a_configuration(case: Case, tmp_path: Path) -> None:
    config = tmp_path / "case.toml"
    config.write_text(case.config)
    loaded = load_config(config)
    assert sum(group.count for group in loaded.replicas) in {2, 8, 32, *REPLICAS, *START_REPLICAS}


def test_every_question_has_cases() -> None:
    groups = {"azure", "million", "replicas", "output", "overload", "burst"}
    assert {case.group for case in all_cases()} == groups
    assert {case.group for case in quick_cases()} == groups | {"start"}
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_the_overloaded_cluster_preempts(tmp_path: Path) -> None:
    summary = _run(overload_case(300), tmp_path).summary
    assert summary.preemptions > 20
    assert summary.load.verdict == "overloaded"


@pytest.mark.slow
def test_the_burst_scales_up_and_down(tmp_path: Path) -> None:
    _run(burst_case(400), tmp_path)
    changes = (tmp_path / "out" / "transitions.csv").read_text()
    assert "loading" in changes
    assert changes.count("\n") > 20


def test_a_process_is_measured(tmp_path: Path) -> None:
    busy = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    cost = timed([sys.executable, "-c", busy], cwd=tmp_path)
    assert 0.2 <= cost.cpu_s < 5.0
    assert cost.peak_mib > 5.0


def test_a_process_that_fails_or_never_ends_is_told(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="status 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"], cwd=tmp_path)
    with pytest.raises(Failed, match="stopped after"):
        timed([sys.executable, "-c", "while True: pass"], cwd=tmp_path, timeout_s=0.3)
    with pytest.raises(Failed, match="No such file"):
        timed([str(tmp_path / "absent")], cwd=tmp_path)


def test_the_median_is_of_each_figure() -> None:
    costs = [Cost(1.0, 9.0, 5.0), Cost(2.0, 7.0, 4.0), Cost(3.0, 8.0, 6.0)]
    assert median(costs) == Cost(2.0, 8.0, 5.0, 0, 0)
