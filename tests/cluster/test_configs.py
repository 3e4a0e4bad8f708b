"""Every file in configs/ runs, shortened, and starts with a comment that says what it shows."""

from __future__ import annotations

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
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20
    config = load_config(path, ["workload.limit=150"])
    config = adjust(config, seed=None, output=tmp_path / "out")
    execute(config, str(path), report=False)
    summary = summary_of(tmp_path / "out")
    assert summary["completed"] > 0
    assert not summary["partial"]
