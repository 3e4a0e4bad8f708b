"""Same inputs, same bytes: each seed in processes that differ in everything that must not matter.

    python -m tests.chaos.determinism --seeds 200

Three processes run all seeds: with different PYTHONHASHSEED, working directory and log level, and
one under `python -O`. Prints the first seed whose result files or events differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import sys
from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds import draw_world
for seed in range(int(sys.argv[1])):
    verdict = run_world(draw_world(seed), seed, every=10**9, leaps=(True,))
    print(seed, verdict.digest, verdict.kernel_digest, verdict.events, flush=True)
"""


def variants() -> list[tuple[str, list[str], dict[str, str], Path]]:
    """Name, interpreter options, environment, working directory."""
    here = Path(tempfile.gettempdir())
    return [
        ("plain", [], {"PYTHONHASHSEED": "0", "EMU_LOG": "warning"}, ROOT),
        ("other hash seed and directory", [], {"PYTHONHASHSEED": "4711", "EMU_LOG": "debug"}, here),
        ("python -O", ["-O"], {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}, ROOT),
    ]


def check(seeds: int) -> list[str]:
    """Differences, one line each."""
    running = []
    for name, options, environment, directory in variants():
        process = subprocess.Popen(
            [sys.executable, *options, "-c", WORKER, str(seeds)],
            cwd=directory,
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append((name, process))
    outputs = [(name, process.communicate()[0].splitlines()) for name, process in running]
    problems = [
        f"{name}: {len(lines)} of {seeds} seeds ran"
        for name, lines in outputs
        if len(lines) != seeds
    ]
    first_name, first = outputs[0]
    for name, lines in outputs[1:]:
        for one, two in zip(first, lines, strict=False):
            if one != two:
                problems.append(f"{first_name}: {one} / {name}: {two}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    seeds = parser.parse_args().seeds
    started_s = time.monotonic()
    problems = check(seeds)
    for problem in problems[:10]:
        print(problem)
    print(
        f"{seeds} seeds in {len(variants())} processes that differ in hash seed, directory, log "
        f"level and -O: {len(problems)} differences, {time.monotonic() - started_s:.0f} s"
    )
    return 4 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
