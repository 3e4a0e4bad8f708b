"""Small sweeps: a config of the linear backend that runs in some milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emu.apps.sweeps.drive import SweepResult, run_sweep
from emu.apps.sweeps.options import SweepOptions

BASE = """\
[[nodes]]
gpus = 8
[latency]
backend = "linear"
[workload.synthetic]
requests = 60
[workload.synthetic.arrivals]
rate_per_s = 10.0
[output]
report = false
"""

SEARCH = """\
base = "base.toml"
[search]
key = "workload.synthetic.arrivals.rate_per_s"
min = 1
max = 200
tolerance = 0.05
meet = ["p99_ttft_ms < 900", "p99_tpot_ms < 100"]
"""


def write(directory: Path, text: str, base: str = BASE) -> Path:
    """A sweep file beside its base."""
    (directory / "base.toml").write_text(base)
    path = directory / "sweep.toml"
    path.write_text(text)
    return path


def swept(directory: Path, text: str, **options: Any) -> SweepResult:
    """Write and run a sweep in this process."""
    options.setdefault("jobs", 1)
    return run_sweep(SweepOptions(sweep=write(directory, text), **options))
