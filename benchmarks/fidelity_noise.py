"""How far the figures of the fidelity table would move by themselves.

    python -m benchmarks.fidelity_noise                # both measured runs, 40 repetitions each
    python -m benchmarks.fidelity_noise --repeats 10

Two questions, asked of the measured runs of ../shared/data/vllm-measured:

* Intake. How long do requests wait between their arrival and the instant from which the engine
  counts (`queued_ts`), and does the emulated engine keep them waiting as long? The measurement's
  arrival has another clock; its smallest wait is taken as zero.
* Repetition. The driver of the measurement sent its requests up to some milliseconds off the
  dataset's times. The same run is emulated again with these delays drawn anew: what is then the
  spread of each error, and how often is it as close as LLMServingSim's?
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.fidelity import MEASURED, METRICS, SHARED, Result, emulate, names
from emu.process.console import open_console
from emu.report.compare import STATISTICS

Floats = NDArray[np.float64]


def measured_arrivals(name: str) -> Floats:
    """Arrivals of a measured run in the order of its dataset, s."""
    lines = (MEASURED / name / "requests.jsonl").read_text().splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: _position(row))
    return np.array([row["arrival_time"] for row in rows])


def _position(row: dict[str, str]) -> int:
    return int(row["request_id"].rpartition("-")[2])


def dataset(name: str) -> list[dict[str, object]]:
    """The requests that were sent."""
    meta = json.loads((MEASURED / name / "meta.json").read_text())
    lines = (SHARED / meta["dataset_path"]).read_text().splitlines()
    return [json.loads(line) for line in lines[: meta["num_requests"]]]


# --- intake --------------------------------------------------------------------------------------
def intake(name: str) -> tuple[Floats, Floats, Floats]:
    """(measured wait, emulated wait: ms; paired errors of TTFT from the arrival: mean, median)."""
    result = emulate(name)
    emulated = result.from_arrival["TTFT"] - result.ours["TTFT"]
    errors = result.paired(result.from_arrival, from_arrival=True)[0]
    return result.wait_ms, emulated, errors


def print_intake(console: Console) -> None:
    """Both distributions, and the paired error of TTFT from the arrival."""
    table = Table(title="From arrival to the engine, ms", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p99", "TTFT from arrival, paired mean / median"):
        table.add_column(column, justify="right" if column else "left")
    for name in names():
        measured, emulated, errors = intake(name)
        for label, waits in (("measured", measured), ("emulated", emulated)):
            figures = [waits.mean(), *np.percentile(waits, (50, 90, 99))]
            last = f"{errors[0]:.2f} / {errors[1]:.2f} %" if label == "emulated" else ""
            table.add_row(f"{name}, {label}", *(f"{value:.1f}" for value in figures), last)
    console.print(table)


# --- repetition ----------------------------------------------------------------------------------
def repetitions(name: str, repeats: int) -> tuple[list[Result], Floats]:
    """(runs with other arrivals of the same dataset, the delays that arrivals were drawn from)."""
    requests = dataset(name)
    planned = np.array([request["arrival_time_ns"] for request in requests]) / 1e9
    late = measured_arrivals(name) - planned
    late -= late.min()
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([len(requests), repeats])))
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            # The first request's own delay is the client's start, and moves all others alike.
            delays = rng.choice(late[1:], len(planned))
            path = Path(scratch) / f"{repeat}.jsonl"
            path.write_text(_delayed(requests, delays))
            results.append(emulate(name, [f"workload.path={path}"]))
    return results, late


def _delayed(requests: list[dict[str, object]], delays: Floats) -> str:
    lines = []
    for request, delay in zip(requests, delays, strict=True):
        arrival_ns = int(str(request["arrival_time_ns"])) + round(1e9 * float(delay))
        lines.append(json.dumps({**request, "arrival_time_ns": arrival_ns}))
    return "\n".join(lines) + "\n"


def print_repetitions(name: str, repeats: int, console: Console) -> None:
    """Spread of each error, and how often it is as close as the simulator's."""
    once = emulate(name)
    base, theirs = once.errors(once.ours), once.errors(once.theirs)
    results, late = repetitions(name, repeats)
    errors = np.array([result.errors(result.ours) for result in results])
    as_close = (np.abs(errors) <= np.abs(theirs)).mean(axis=0)
    median, high = (1e3 * value for value in np.percentile(late[1:], (50, 99)))
    title = f"{name}: {repeats} repetitions, arrivals late by {median:.1f} ms (p99 {high:.1f})"
    table = Table(title=title, title_justify="left")
    for column in ("", "statistic", "LLMServingSim", "emu", "lowest", "highest", "as close"):
        table.add_column(column, justify="left" if column in ("", "statistic") else "right")
    for i, metric in enumerate(METRICS):
        for j, statistic in enumerate(STATISTICS):
            table.add_row(
                metric if j == 0 else "",
                statistic,
                f"{theirs[i, j]:+.2f}",
                f"{base[i, j]:+.2f}",
                f"{errors[:, i, j].min():+.2f}",
                f"{errors[:, i, j].max():+.2f}",
                f"{as_close[i, j]:.0%}",
            )
        table.add_section()
    console.print(table)
    counts = (np.abs(errors) <= np.abs(theirs)).sum(axis=(1, 2))
    paired = np.array([result.paired(result.ours)[1, 0] for result in results])
    console.print(
        f"at least as close: {counts.min()} to {counts.max()} of 15, "
        f"median {np.median(counts):.0f}; paired TPOT {paired.min():.2f} to {paired.max():.2f} %\n"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=40, help="emulated repetitions of each run")
    chosen = parser.parse_args()
    if not SHARED.is_dir():
        parser.error(f"{SHARED} is not here")
    console = open_console(120)
    print_intake(console)
    for name in names():
        print_repetitions(name, chosen.repeats, console)


if __name__ == "__main__":
    main()
