"""Does a sweep use every core, and how many could its parent keep busy?

    python -m benchmarks.sweep_cores [--points 32]

One grid is run with 1 process and with 2, 4 ... up to the cores of this machine, each sweep in a
fresh process of its own. Prints wall seconds, the part of the cores that was busy, and what the
parent itself took for a point: the cost of a point divided by that is the number of workers that
one parent could feed. Kept in benchmarks/results/sweep.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import ROOT, colocated, synthetic
from benchmarks.measure import environment, facts_of_this_run, keep
from emu.process.pool import cores

# In the sweep's own process: what it used itself, and what the workers that it waited for did.
# With one worker the points run in the parent; a first sweep with two tells the two apart.
_PROBE: Final = """
import json, resource, sys, time
from pathlib import Path
from emu.apps.sweeps.drive import run_sweep
from emu.apps.sweeps.options import SweepOptions
def main():
    started, own = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    start_s = own.ru_utime + own.ru_stime
    result = run_sweep(SweepOptions(sweep=Path(sys.argv[1]), jobs=int(sys.argv[2])))
    assert all(row.result.status == "completed" for row in result.rows)
    own = resource.getrusage(resource.RUSAGE_SELF)
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({
        "wall_s": time.perf_counter() - started,
        "parent_s": own.ru_utime + own.ru_stime - start_s,
        "workers_s": workers.ru_utime + workers.ru_stime,
    }))
if __name__ == "__main__":
    main()
"""


def main() -> int:
    """Parse, run, print, keep."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep_cores",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--points", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3000, help="of each point")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    facts = {**facts_of_this_run(), "points": options.points, "requests": options.requests}
    print(
        "| processes | wall s | speed-up | cores busy | worker CPU s a point "
        "| parent CPU ms a point |\n|---|---|---|---|---|---|"
    )
    rows: list[dict[str, Any]] = []
    for jobs in [1, *doublings(cores())]:
        runs = [one_sweep(jobs, options.points, options.requests) for _ in range(options.repeats)]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append({"jobs": jobs, **middle})
        print(line_of(rows[-1], rows[0], options.points), flush=True)
    keep("sweep", {**facts, "rows": rows})
    return 0


def doublings(most: int) -> list[int]:
    """2, 4, 8 ... and the number of cores itself."""
    found = [2**power for power in range(1, 20) if 2**power < most]
    return [*found, most] if most > 1 else []


def one_sweep(jobs: int, points: int, requests: int) -> dict[str, float]:
    """One fresh sweep."""
    with tempfile.TemporaryDirectory(prefix="emu-sweep-") as name:
        directory = Path(name)
        (directory / "base.toml").write_text(colocated(4) + synthetic(requests, 8.0, 200))
        seeds = ", ".join(str(seed) for seed in range(points))
        sweep = f'base = "base.toml"\noutput = "out"\n[grid]\nseed = [{seeds}]\n'
        (directory / "sweep.toml").write_text(sweep)
        # A file and not `-c`: workers are spawned and look for the main module.
        (directory / "probe.py").write_text(_PROBE)
        command = [sys.executable, str(directory / "probe.py"), "sweep.toml", str(jobs)]
        env = environment(ROOT, directory)
        done = subprocess.run(command, cwd=directory, env=env, check=True, capture_output=True)
        figures: dict[str, float] = json.loads(done.stdout)
        return figures


def line_of(row: dict[str, Any], alone: dict[str, Any], points: int) -> str:
    """One row. With one process the parent does the points itself."""
    used_s = row["parent_s"] + row["workers_s"]
    line = (
        f"| {row['jobs']} | {row['wall_s']:.1f} | {alone['wall_s'] / row['wall_s']:.2f} "
        f"| {used_s / row['wall_s']:.2f} "
    )
    if row["jobs"] == 1:
        return line + f"| {used_s / points:.2f} | |"
    return (
        line + f"| {row['workers_s'] / points:.2f} | {row['parent_s'] / points * 1e3:.1f} (could "
        f"feed {row['workers_s'] / row['parent_s']:,.0f} workers) |"
    )


if __name__ == "__main__":
    sys.exit(main())
