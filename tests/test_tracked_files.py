"""What is kept under version control: sources, never what a run leaves behind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from emu.report.atomic import TRAILER

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no checkout of git"
)
def test_no_results_of_a_run_are_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = [Path(line) for line in listed.stdout.splitlines()]
    assert tracked
    assert [path for path in tracked if path.name == TRAILER] == []
