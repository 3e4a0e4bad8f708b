"""The command line as a user meets it: a process, its streams and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

SMALL = """\
[latency]
backend = "linear"
[workload.synthetic]
requests = 30
[workload.synthetic.arrivals]
rate_per_s = 10.0
[output]
dir = "out"
report = false
"""


def emu(
    *arguments: object, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m emu ...`."""
    return subprocess.run(
        [sys.executable, "-m", "emu", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd or ROOT,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an input error."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
