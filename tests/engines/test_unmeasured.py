"""A GPU without a measured kernel is marked, and its intervals are as wide as emu's own doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.cli import main
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.runs.engine_lines import Spread, spread


def spread_on(gpu: str) -> Spread:
    config = config_from_dict({"nodes": [{"gpu": gpu, "gpus": 1}]})
    found = spread(config, make_plan(config), (8, 1000, 500))
    assert found is not None
    return found


@pytest.mark.parametrize("gpu", ["MI300X", "RTX4090", "H800"])
def test_what_was_measured_nowhere_is_said_and_counts(gpu: str) -> None:
    found = spread_on(gpu)
    assert "is unmeasured" in found.source
    least = 9.0 if gpu == "H800" else 25.0  # an H800 takes the kernels of other Hopper GPUs
    assert min(found.halves.values()) > least
    assert found.parts["tpot"]["rest"] > 0.3


@pytest.mark.parametrize("gpu", ["H100", "B300-SXM-288GB"])
def test_what_was_measured_is_not_marked(gpu: str) -> None:
    assert "unmeasured" not in spread_on(gpu).source


@pytest.mark.slow
def test_a_plan_names_gpus_that_were_never_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "MI355X=1", "H100=9"]
    line += ["--rate", "2", "--prompt-tokens", "100", "--output-tokens", "20", "--requests", "20"]
    line += ["--ttft-p95", "1s", "--tp", "1", "--mode", "colocated", "--max-gpus", "1"]
    line += ["--draws", "1", "--seeds", "1", "-j", "1", "-o", str(tmp_path)]
    assert main(line) == 0
    told = "no measured kernel stands behind the times of MI355X"
    assert f"\nunmeasured: {told}\n" in capsys.readouterr().out
    assert f"Unmeasured: {told}." in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["unmeasured"] == ["MI355X"]
