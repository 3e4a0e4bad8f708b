"""Benchmarks: whole processes on real and synthetic traces. Prints figures, asserts nothing.

    python -m benchmarks                 # make bench: all cases, median of 5
    python -m benchmarks --quick         # the small cases, once
    python -m benchmarks --full          # also a million requests on 64 replicas
    python -m benchmarks --only azure    # cases with this in their name
    python -m benchmarks compare REV     # this tree and a revision in turn (make bench-compare)

Every case is a fresh process of the command line, start-up and output included, with compiled
bytecode at hand (a first run that is not counted makes it). CPU seconds are user + system of that
process; memory is its peak. The Azure conversation trace is read from ../shared/data where it is;
otherwise a synthetic trace of the same size stands in (and the table says so). Results are kept
in benchmarks/results/, one file for each time, and in latest.json.
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
import random, sys, time, anyio
from emu.actor import Kernel, RANK_REPLICA
async def main():
    kernel, actors = Kernel(), int(sys.argv[1])
    rounds = 100_000 // actors
    boxes = [kernel.mailbox(str(i), RANK_REPLICA + i) for i in range(actors)]
    left = [actors]
    def done():
        left[0] -= 1
        if not left[0]:
            kernel.stop()
    async def actor(i):
        rng = random.Random(i)
        for _ in range(rounds):
            await kernel.sleep_until(kernel.now_ns + rng.randrange(1, 50) * 10**6, RANK_REPLICA + i)
            boxes[(i * 7 + 1) % actors].put(1)
            await boxes[i].get()
        done()
    async def serving(i):
        rng, turns = random.Random(i), [2 * rounds]
        def turn():
            turns[0] -= 1
            return kernel.now_ns + rng.randrange(1, 50) * 10**6 if turns[0] else -1
        await boxes[i].take_turns(turn, 10**6, lambda now_ns: -1)
        done()
    for i in range(actors):
        kernel.spawn((actor if sys.argv[2] == "actors" else serving)(i), name=str(i))
    started = time.process_time()
    await kernel.run()
    print(2 * rounds * actors / (time.process_time() - started))
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


WARM_UP = Case("warm-up", 10, colocated(1) + synthetic(10, 1.0, 10))


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
            for count in (1, 4, 16, 64, 256, 1024)
        ]
        found += [
            Case(
                f"output {tokens}, 2000 requests", 2000, colocated(8) + synthetic(2000, 2.0, tokens)
            )
            for tokens in (25, 100, 400, 1600)
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


def environment(tree: Path, directory: Path) -> dict[str, str]:
    """Of a process that runs a tree, with its bytecode kept as an installed program's is."""
    wanted = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    prefix = str(directory / "bytecode")
    return {**wanted, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": prefix}


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
    process = subprocess.Popen(command, cwd=tree, env=environment(tree, directory))
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


def compare(revision: str, chosen: list[Case], repeats: int, directory: Path) -> None:
    """This tree and another revision, in turn, so that a drifting machine hits both."""
    other = directory / "tree"
    subprocess.run(
        ["git", "worktree", "add", "--detach", "--quiet", str(other), revision],
        cwd=ROOT,
        check=True,
    )
    try:
        print(f"| case | CPU s here | CPU s {revision} | ratio |\n|---|---|---|---|")
        for tree in (ROOT, other):
            measure(WARM_UP, directory, tree)
        for case in chosen:
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
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--repeats", type=int, default=0)
    options = parser.parse_args()
    is_comparison = options.what[:1] == ["compare"]
    repeats = options.repeats or (1 if options.quick else 5)
    chosen = cases(options.quick or (is_comparison and not options.only), options.full)
    chosen = [case for case in chosen if options.only in case.name]
    with tempfile.TemporaryDirectory(prefix="emu-bench-") as name:
        directory = Path(name)
        if is_comparison:
            compare(options.what[1], chosen, repeats, directory)
            return 0
        kernel = kernel_rates(directory, repeats) if not options.only else {}
        if not TRACE.is_file():
            print("the Azure trace is not here: a synthetic trace of the same size stands in")
        measure(WARM_UP, directory)
        rows = report(chosen, repeats, directory)
    content = json.dumps(
        {"revision": revision_here(), "repeats": repeats, "kernel": kernel, "cases": rows}, indent=2
    )
    RESULTS.mkdir(exist_ok=True)
    for file in ("latest.json", time.strftime("%Y%m%d-%H%M%S.json")):
        (RESULTS / file).write_text(content + "\n")
    return 0


def kernel_rates(directory: Path, repeats: int) -> dict[str, float]:
    """What the kernel alone does in a CPU-second."""
    found = {}
    for actors in (100, 1000, 10_000):
        for kind, what in (("actors", "timers and messages"), ("turns", "turns")):
            command = [sys.executable, "-c", KERNEL, str(actors), kind]
            rate = statistics.median(
                float(
                    subprocess.run(
                        command,
                        cwd=ROOT,
                        env=environment(ROOT, directory),
                        check=True,
                        capture_output=True,
                    ).stdout
                )
                for _ in range(repeats)
            )
            found[f"{what}, {actors} actors"] = round(rate)
            print(f"kernel, {actors} actors: {rate:,.0f} {what} per CPU-second", flush=True)
    return found


def revision_here() -> str:
    """The commit of this tree; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
