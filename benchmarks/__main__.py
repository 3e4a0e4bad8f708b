"""Benchmarks: whole processes on real and synthetic traces. Prints figures, asserts nothing.

    python -m benchmarks                 # make bench: all cases, median of 5 (15 minutes)
    python -m benchmarks --quick         # make bench-quick: small cases, once (a minute)
    python -m benchmarks --only azure    # a group, or cases with this in their name
    python -m benchmarks compare REV     # this tree and a revision in turn (make bench-compare)

Every case is a fresh process of the command line, start-up and output included. Where the Azure
trace is not in ../shared/data, a synthetic trace of the same size stands in, and the table says so.
Results are kept in benchmarks/results/: bench.json is the newest, beside it one file for each time.
`python -m benchmarks.write_speed` puts them into docs/lab/speed-details.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases import ROOT, WARM_UP, Case, all_cases, azure_cases, has_trace, quick_cases
from benchmarks.measure import Cost, environment, facts_of_this_run, keep, measure, median

KERNEL = ROOT / "benchmarks" / "kernel_rates.py"


def report(chosen: list[Case], repeats: int, directory: Path) -> list[dict[str, Any]]:
    """Run and print the cases."""
    print(
        "| case | requests/CPU-s | CPU s | requests/wall-s | emulated s/wall-s | events "
        "| peak MiB |\n|---|---|---|---|---|---|---|"
    )
    rows = []
    for case in chosen:
        costs = [measure(case, directory) for _ in range(repeats)]
        cost = median(costs)
        rows.append(row_of(case, cost, costs))
        print(
            f"| {case.name} | {case.requests / cost.cpu_s:,.0f} | {cost.cpu_s:.2f} "
            f"| {case.requests / cost.wall_s:,.0f} | {cost.emulated_s / cost.wall_s:,.0f} "
            f"| {cost.events:,.0f} | {cost.peak_mib:.0f} |",
            flush=True,
        )
    return rows


def row_of(case: Case, cost: Cost, costs: list[Cost]) -> dict[str, Any]:
    """What is kept of a case."""
    return {
        "case": case.name,
        "group": case.group,
        "x": case.x,
        "requests": case.requests,
        **cost._asdict(),
        "cpu_s_min": min(one.cpu_s for one in costs),
        "cpu_s_max": max(one.cpu_s for one in costs),
    }


def compare(revision: str, chosen: list[Case], repeats: int, directory: Path) -> None:
    """This tree and another revision, in turn, so that a drifting machine hits both."""
    other = directory / "tree"
    command = ["git", "worktree", "add", "--detach", "--quiet", str(other), revision]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"{revision}: git knows no such revision")
    try:
        print(f"| case | CPU s here | CPU s {revision} | ratio | MiB here | MiB {revision} |")
        print("|---" * 6 + "|")
        for tree in (ROOT, other):
            measure(WARM_UP, directory, tree)
        for case in chosen:
            pairs = [
                (measure(case, directory), measure(case, directory, other)) for _ in range(repeats)
            ]
            here, there = (median(column) for column in zip(*pairs, strict=True))
            print(
                f"| {case.name} | {here.cpu_s:.2f} | {there.cpu_s:.2f} "
                f"| {here.cpu_s / there.cpu_s:.2f} | {here.peak_mib:.0f} | {there.peak_mib:.0f} |",
                flush=True,
            )
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)


def kernel_rates(directory: Path, repeats: int) -> dict[str, int]:
    """What the kernel alone does in a CPU-second."""
    found = {}
    for actors in (100, 1000, 10_000):
        for kind, what in (("actors", "timers and messages"), ("turns", "turns")):
            command = [sys.executable, str(KERNEL), str(actors), kind]
            env = environment(ROOT, directory)
            rate = statistics.median(
                float(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
                for _ in range(repeats)
            )
            found[f"{what}, {actors} actors"] = round(rate)
            print(f"kernel, {actors} actors: {rate:,.0f} {what} per CPU-second", flush=True)
    return found


def choose(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    is_comparison = options.what[:1] == ["compare"]
    if options.quick:
        chosen = quick_cases()
    elif is_comparison and not options.only:
        chosen = [*azure_cases(1000), *azure_cases(5000)]
    else:
        chosen = all_cases()
    of_group = [case for case in chosen if options.only == case.group]
    chosen = of_group or [case for case in chosen if options.only in case.name]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no group or case has that in its name")
    return chosen


def main() -> int:
    """Parse, run, print, keep."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="*", help="nothing, or: compare REVISION")
    parser.add_argument("--quick", action="store_true", help="small cases, once")
    parser.add_argument(
        "--only", default="", help="a group (azure, million, ...) or cases with this in their name"
    )
    parser.add_argument("--repeats", type=int, default=0, help="runs of each case (5)")
    options = parser.parse_args()
    if options.what and (options.what[0] != "compare" or len(options.what) != 2):
        parser.error("say nothing, or: compare REVISION")
    repeats = options.repeats or (1 if options.quick else 5)
    chosen = choose(options)
    if not has_trace():
        print("the Azure trace is not here: a synthetic trace of the same size stands in")
    with tempfile.TemporaryDirectory(prefix="emu-bench-") as name:
        directory = Path(name)
        if options.what:
            compare(options.what[1], chosen, repeats, directory)
            return 0
        facts = {**facts_of_this_run(), "repeats": repeats, "has_trace": has_trace()}
        kernel = kernel_rates(directory, repeats) if not options.only else {}
        measure(WARM_UP, directory)
        rows = report(chosen, repeats, directory)
    is_whole = not options.only and not options.quick
    keep("bench" if is_whole else "bench-part", {**facts, "kernel": kernel, "cases": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
