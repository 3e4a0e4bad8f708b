"""Kill safety: a run that is stopped at a random moment never leaves half a result with a whole name.

    python -m tests.chaos.interrupt --runs 50

SIGINT, SIGTERM and SIGKILL at random moments, a full disk (a file size limit), a closed stdout. After
each: either all final files are there and parse, or none is there under its final name.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """seed = 5
[[nodes]]
count = 2
[[replicas]]
count = 4
[workload.synthetic]
requests = 30000
[workload.synthetic.arrivals]
rate_per_s = 60.0
[output]
dir = "out"
trace = true
report = false
"""
WAYS = ("int", "term", "kill", "disk", "stdout")
FINAL = ("requests.csv", "summary.json", "timeseries.csv", "transitions.csv", "run.json")


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead


def one_run(way: str, delay_s: float, directory: Path) -> list[str]:
    """Problems of one run that is stopped in this way."""
    config = directory / "config.toml"
    config.write_text(CONFIG)
    process = subprocess.Popen(
        [sys.executable, "-m", "emu", str(config)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_small_files if way == "disk" else None,
    )
    assert process.stdout is not None
    if way == "stdout":
        process.stdout.close()
    elif way != "disk":
        time.sleep(delay_s)
        process.send_signal(getattr(signal, f"SIG{way.upper()}"))
    stderr = (process.stderr.read() if process.stderr else b"").decode(errors="replace")
    status = process.wait(timeout=120)
    problems = [f"{way}: a traceback: {stderr[-300:]}"] if "Traceback" in stderr else []
    out = directory / "out"
    there = [name for name in FINAL if (out / name).exists()]
    finished = status == 0 or way == "stdout"
    if not finished and "requests.csv" in there:
        problems.append(f"{way}: exit {status}, but {there} stand under their final names")
    if status == 0 and way == "disk":
        problems.append("disk: exit 0 although the disk was full")
    for name in there:
        problems += _whole(out / name)
    return problems


def _whole(path: Path) -> list[str]:
    """A file with a final name is complete."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with path.open(newline="") as file:
                rows = list(csv.reader(file))
            if any(len(row) != len(rows[0]) for row in rows):
                return [f"{path.name}: a cut row"]
    except (ValueError, IndexError) as error:
        return [f"{path.name}: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    rng = random.Random(1)
    problems: list[str] = []
    for run in range(runs):
        way = WAYS[run % len(WAYS)]
        with tempfile.TemporaryDirectory(prefix="emu-kill-") as name:
            problems += one_run(way, rng.uniform(0.1, 4.0), Path(name))
    for problem in problems:
        print(problem)
    print(f"{runs} runs stopped by {', '.join(WAYS)}: {len(problems)} problems")
    return 4 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
