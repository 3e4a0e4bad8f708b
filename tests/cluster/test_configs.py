"""Every file in configs/ runs, shortened, and starts with a comment that says what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.runs.runner import adjust, execute
from tests.cluster.helpers import summary_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [
    path
    for path in sorted((ROOT / "configs").rglob("*.toml"))
    if not path.name.startswith("sweep-") or path.name == "sweep-base.toml"
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_what_it_shows_and_runs(tmp_path: Path, path: Path) -> None:
    directive, first = path.read_text().splitlines()[:2]
    schema = directive.removeprefix("#:schema ")
    assert json.loads((path.parent / schema).read_text())["title"] == "emu configuration"
    assert first.startswith("# ")
    assert len(first) > 20
    config = load_config(path, ["workload.limit=100"])
    config = adjust(config, seed=None, output=tmp_path / "out")
    execute(config, str(path), report=False)
    summary = summary_of(tmp_path / "out")
    assert summary["completed"] > 0
    assert not summary["partial"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_can_replay_a_trace_instead(tmp_path: Path, path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{0.05 * i:.2f},{200 + i},{3 + i % 5}\n" for i in range(40)]
    trace.write_text("arrival_s,input_toks,output_toks\n" + "".join(rows))
    config = load_config(path, [f"workload.path={trace}", "workload.format=auto"])
    assert config.workload.synthetic is None
    execute(adjust(config, seed=None, output=tmp_path / "out"), str(path), report=False)
    summary = summary_of(tmp_path / "out")
    assert summary["workload_rows"] == 40
    assert summary["completed"] > 0
