"""Benchmarks: whole processes on real and synthetic traces. Prints figures, asserts nothing.

    python -m benchmarks                 # make bench: all cases, median of 3
    python -m benchmarks --quick         # the small cases, once
    python -m benchmarks --full          # also a million requests on 64 replicas
    python -m benchmarks compare REV     # this tree and a revision in turn (make bench-compare)

Every case is a fresh process of the command line, start-up and output included. CPU seconds are
user + system of that process; memory is its peak. The Azure conversation trace is read from
../shared/data where it is; otherwise a synthetic trace of the same size stands in (and the
table says so). Results are kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT.parent / "shared/data/traces/AzureLLMInferenceTrace_conv.csv"
RESULTS = ROOT / "benchmarks" / "results"
NODE = '[[nodes]]\ngpu = "H100-SXM5-80GB"\ngpus = 8\ncount = {nodes}\n'
KERNEL = """
import random, time, anyio
from emu.actor import Kernel, RANK_REPLICA
async def main():
    kernel, actors = Kernel(), 1000
    boxes = [kernel.mailbox(str(i), RANK_REPLICA + i) for i in range(actors)]
    left = [actors]
    async def actor(i):
        rng = random.Random(i)
        for _ in range(100):
            await kernel.sleep_until(kernel.now_ns + rng.randrange(1, 50) * 10**6, RANK_REPLICA + i)
            boxes[(i * 7 + 1) % actors].put(1)
            await boxes[i].get()
        left[0] -= 1
        if not left[0]:
            kernel.stop()
    for i in range(actors):
        kernel.spawn(actor(i), name=str(i))
    started = time.process_time()
    await kernel.run()
    print(200_000 / (time.process_time() - started))
anyio.run(main, backend_options={"use_uvloop": True})
"""


class Case(NamedTuple):
    """One row of the table."""

    name: str
    requests: int
    config: str


class Cost(NamedTuple):
    """What one process took."""

    cpu_s: float
    wall_s: float
    peak_mib: float
    emulated_s: float
    events: int


def azure(limit: int) -> str:
    """The workload of the Azure cases."""
    if TRACE.is_file():
        return f'[workload]\npath = "{TRACE}"\nlimit = {limit}\n'
    return synthetic(limit or 19366, 5.5, 211)


def synthetic(requests: int, rate: float, output: int, prompt: int = 1000) -> str:
    """Poisson arrivals and log-normal lengths."""
    return (
        f"[workload.synthetic]\nrequests = {requests}\narrivals = {{ rate_per_s = {rate} }}\n"
        f"prompt = {{ median = {prompt}.0, max = 8000 }}\n"
        f"output = {{ median = {output}.0, sigma = 0.5, max = {output * 8} }}\n"
    )


def colocated(count: int) -> str:
    """Machines and replicas without roles."""
    return NODE.format(nodes=-(-count // 8)) + f"[[replicas]]\ncount = {count}\n"


ROLES = NODE.format(nodes=1) + (
    '[[replicas]]\nrole = "prefill"\ncount = 4\n[[replicas]]\nrole = "decode"\ncount = 4\n'
)
BURST = (
    NODE.format(nodes=2)
    + '[[replicas]]\nrole = "prefill"\ncount = 2\n[[replicas]]\nrole = "decode"\ncount = 2\n'
    + '[[replicas]]\nrole = "inactive"\ncount = 12\n[scheduler]\npolicy = "fcfs"\nblock_size = 64\n'
    + '[autoscale]\npreset = "blitzscale"\nmax_prefill = 10\nmax_decode = 10\n'
    + "[workload.synthetic]\nrequests = 3000\n"
    + 'arrivals = { process = "burst", rate_per_s = 5.0, burst_rate_per_s = 80.0 }\n'
    + "prompt = { median = 1000.0, max = 4000 }\noutput = { median = 100.0, max = 800 }\n"
)


def cases(quick: bool, full: bool) -> list[Case]:
    """The rows, in order."""
    found = []
    limits = (1000, 5000) if quick else (1000, 5000, 19366)
    for limit in limits:
        work = azure(0 if limit == 19366 else limit)
        found += [
            Case(f"azure {limit}, 1 replica", limit, colocated(1) + work),
            Case(f"azure {limit}, 8 replicas", limit, colocated(8) + work),
            Case(f"azure {limit}, 4P+4D", limit, ROLES + work),
        ]
    if not quick:
        found += [
            Case(
                f"{count} replicas, 5000 requests",
                5000,
                colocated(count) + synthetic(5000, 1.0 * count, 150),
            )
            for count in (1, 8, 64, 512, 1024)
        ]
        found += [
            Case(
                f"output {tokens}, 2000 requests", 2000, colocated(8) + synthetic(2000, 2.0, tokens)
            )
            for tokens in (50, 200, 800)
        ]
        tight = "[scheduler]\nnum_blocks = 1500\n"
        found.append(
            Case("overloaded, preemptions", 3000, colocated(2) + tight + synthetic(3000, 20.0, 200))
        )
        found.append(Case("autoscaled burst", 3000, BURST))
    if full:
        for requests in (100_000, 1_000_000):
            work = synthetic(requests, 320.0, 100, 500)
            found.append(Case(f"{requests} requests, 64 replicas", requests, colocated(64) + work))
    return found


def measure(case: Case, directory: Path, tree: Path = ROOT) -> Cost:
    """Run one case in a fresh process."""
    config = directory / "case.toml"
    config.write_text(case.config)
    command = [
        sys.executable,
        "-m",
        "emu",
        str(config),
        "--no-report",
        "-q",
        "-o",
        str(directory / "o"),
    ]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{case.name}: exit status {os.waitstatus_to_exitcode(status)}")
    facts = json.loads((directory / "o" / "run.json").read_text())
    return Cost(
        usage.ru_utime + usage.ru_stime,
        wall_s,
        usage.ru_maxrss / 1024,
        facts["emulated_s"],
        facts["events"],
    )


def median(costs: list[Cost]) -> Cost:
    """Median of each figure."""
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def report(found: list[Case], repeats: int, directory: Path) -> list[dict[str, Any]]:
    """Run and print the cases."""
    print(
        "| case | requests/CPU-s | CPU s | requests/wall-s | emulated s/wall-s | events "
        "| peak MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = []
    for case in found:
        cost = median([measure(case, directory) for _ in range(repeats)])
        rows.append({"case": case.name, "requests": case.requests, **cost._asdict()})
        print(
            f"| {case.name} | {case.requests / cost.cpu_s:,.0f} | {cost.cpu_s:.2f} "
            f"| {case.requests / cost.wall_s:,.0f} | {cost.emulated_s / cost.wall_s:,.0f} "
            f"| {cost.events:,.0f} | {cost.peak_mib:.0f} |",
            flush=True,
        )
    return rows


def compare(revision: str, repeats: int, directory: Path) -> None:
    """This tree and another revision, in turn, so that a drifting machine hits both."""
    other = directory / "tree"
    subprocess.run(
        ["git", "worktree", "add", "--detach", "--quiet", str(other), revision],
        cwd=ROOT,
        check=True,
    )
    try:
        print(f"| case | CPU s here | CPU s {revision} | ratio |\n|---|---|---|---|")
        for case in cases(quick=True, full=False):
            pairs = [
                (measure(case, directory).cpu_s, measure(case, directory, other).cpu_s)
                for _ in range(repeats)
            ]
            here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"| {case.name} | {here:.2f} | {there:.2f} | {here / there:.2f} |", flush=True)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)


def main() -> int:
    """Parse, run, print, keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", help="nothing, or: compare REVISION")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--repeats", type=int, default=0)
    options = parser.parse_args()
    repeats = options.repeats or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory(prefix="emu-bench-") as name:
        directory = Path(name)
        if options.what[:1] == ["compare"]:
            compare(options.what[1], repeats, directory)
            return 0
        done = subprocess.run(
            [sys.executable, "-c", KERNEL], cwd=ROOT, check=True, capture_output=True, text=True
        )
        print(
            f"kernel: {float(done.stdout):,.0f} timers and messages per CPU-second (1,000 actors)"
        )
        if not TRACE.is_file():
            print("the Azure trace is not here: a synthetic trace of the same size stands in")
        rows = report(cases(options.quick, options.full), repeats, directory)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latest.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
