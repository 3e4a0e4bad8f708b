"""What the gallery and the shipped configurations promise is what their runs show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import emu
from emu.cli.docs import DOCS

CONFIGS = DOCS.parent / "configs"


def words_of(name: str, summary: dict[str, Any]) -> str:
    """What is said of a configuration, from the summary of its run."""
    if name == "speculation.toml":
        return f"about {summary['speculation']['mean_acceptance_length']:.1f} tokens a step"
    if name == "adapters.toml":
        return f"{summary['adapters']['cold_loads']} reads from the disk"
    return f"a TTFT of {summary['mean_ttft_ms'] / 1e3:.1f} s"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["speculation.toml", "adapters.toml", "wide-ep.toml"])
def test_a_run_shows_what_the_gallery_says(name: str, tmp_path: Path) -> None:
    run = emu.run(CONFIGS / name, output=tmp_path / "run", report=False)
    said = words_of(name, json.loads((run.directory / "summary.json").read_text()))
    (row,) = [line for line in (DOCS / "gallery.md").read_text().splitlines() if name in line]
    assert said in row
    assert said in (CONFIGS / name).read_text()
