"""A GPU without a measured kernel is marked, and its intervals are as wide as emu's own doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.apps.sweeps.drive import run_sweep
from emu.apps.sweeps.options import SweepOptions
from emu.cli import main
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.runs.engine_lines import Spread, known_line, spread


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


def known_of(*groups: tuple[str, str]) -> str:
    """The line of a cluster of (GPU, role)."""
    nodes = [{"gpu": gpu, "gpus": 1} for gpu, _ in groups]
    replicas = [{"role": role} for _, role in groups]
    config = config_from_dict({"nodes": nodes, "replicas": replicas})
    return known_line(config, make_plan(config), (8, 1000, 500))


def widths(line: str) -> tuple[int, ...]:
    return tuple(int(part.split()[0]) for part in line.split("± ")[1:])


def test_a_line_is_of_all_kinds_of_gpus_of_a_cluster() -> None:
    h100, slow = known_of(("H100", "colocated")), known_of(("MI355X", "colocated"))
    both = known_of(("H100", "colocated"), ("MI355X", "colocated"))
    assert widths(both) == widths(slow)
    assert "MI355X is unmeasured" in both
    apart = known_of(("H100", "prefill"), ("MI355X", "decode"))
    assert widths(apart) == (widths(h100)[0], widths(slow)[1])
    assert "MI355X is unmeasured" in apart
    assert known_of(("H100", "colocated"), ("H100", "colocated")) == h100


def test_a_sweep_says_it_of_each_kind_of_gpu(tmp_path: Path) -> None:
    base = "[[nodes]]\n[[replicas]]\n[workload.synthetic]\nrequests = 4\n[output]\nreport = false\n"
    (tmp_path / "base.toml").write_text(base)
    sweep = tmp_path / "sweep.toml"
    grid = '"nodes.0.gpu" = ["H100", "MI355X"]\n"workload.synthetic.output.min" = [1, 2]\n'
    sweep.write_text(f'base = "base.toml"\n[grid]\n{grid}')
    known = run_sweep(SweepOptions(sweep=sweep, jobs=1)).known
    assert [line.partition(":")[0] for line in known] == [
        "engine at nodes.0.gpu = H100",
        "engine at nodes.0.gpu = MI355X",
    ]
    assert ["is unmeasured" in line for line in known] == [False, True]
