"""Emulated runs against real vLLM, beside LLMServingSim's own runs, and roofline against profiles.

    python -m benchmarks.fidelity              # the measured runs of ../shared/data/vllm-measured
    python -m benchmarks.fidelity --terms      # what each term of the engine model does
    python -m benchmarks.fidelity --roofline   # roofline against the profiles, by phase and batch

Needs ../shared/data (measurements and profile bundles), which is not part of the project.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from emu.apps.fidelity.measured_run import case_config
from emu.apps.fidelity.record import read_case
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster import backends as registry
from emu.config.load import load_config
from emu.latency.base import BatchShape
from emu.latency.host_costs import ASYNC_SCHEDULING, HostCosts
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile.backend import ProfileBackend
from emu.latency.profile.bundle import find_bundle, read_bundle
from emu.latency.profile.rows import Parallel, ProfileModel
from emu.latency.roofline import RooflineBackend
from emu.process.console import open_console
from emu.report.compare import STATISTICS, statistics
from emu.report.measured import run_values
from emu.report.measurement import Measurement, read_measurement
from emu.report.rundata import read_run
from emu.runs.runner import execute

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
MEASURED = SHARED / "vllm-measured"
PROFILES = SHARED / "profiles"
METRICS = ("TTFT", "TPOT", "E2E")
SIMULATOR = "latency.host_overhead=false"
"""The setting that gives LLMServingSim's requests: in its pool, at the dataset's times."""

Values = dict[str, np.ndarray]


class Result(msgspec.Struct):
    """One measured run, emulated."""

    name: str
    measured: Measurement
    theirs: Values
    """LLMServingSim's own requests, ms."""
    ours: Values
    """Ours, from where the measurement begins (`intake_ns`)."""
    from_arrival: Values
    """Ours, from the arrival."""
    wait_ms: np.ndarray
    """Measured: from a request's arrival to the anchor. The clocks differ; the smallest is 0."""
    prefix_hits: np.ndarray
    """Prompt tokens that the emulated cache found, by request."""
    wall_s: float
    preemptions: int
    recomputed: int
    makespan_s: float

    def base(self, metric: str, *, from_arrival: bool = False) -> np.ndarray:
        """The measurement, ms, from its own anchor or from the arrival."""
        values = _of(self.measured, metric)
        return values + self.wait_ms if from_arrival and metric != "TPOT" else values

    def errors(self, values: Values, *, from_arrival: bool = False) -> np.ndarray:
        """Per cent: metrics x statistics."""
        rows = []
        for metric in METRICS:
            base = np.array(statistics(self.base(metric, from_arrival=from_arrival)))
            rows.append(100 * (np.array(statistics(values[metric])) - base) / base)
        return np.array(rows)

    def paired(self, values: Values, *, from_arrival: bool = False) -> np.ndarray:
        """Absolute error of single requests, per cent: metrics x (mean, median)."""
        rows = []
        for metric in METRICS:
            base = self.base(metric, from_arrival=from_arrival)
            error = 100 * np.abs(values[metric] - base) / base
            rows.append((error.mean(), np.median(error)))
        return np.array(rows)


def _of(measured: Measurement, metric: str) -> np.ndarray:
    return {"TTFT": measured.ttft_ms, "TPOT": measured.tpot_ms, "E2E": measured.e2e_ms}[metric]


def names() -> list[str]:
    """Measured runs that are here."""
    return sorted(p.name for p in MEASURED.iterdir() if (p / "requests.jsonl").exists())


def emulate(
    name: str,
    settings: Sequence[str] = (),
    host: HostCosts | None = None,
    measured: Path = MEASURED,
    *,
    splits: bool = False,
) -> Result:
    """Emulate one of them. `host` replaces the constants of the host's time; `splits`: decodes
    replayed from a graph split their histories, as eager ones do."""
    folder = measured / name
    case = read_case(folder)
    text, workload = case_config(case, PROFILES)
    chosen = registry.host_costs, registry.block_grid
    if host is not None:
        registry.host_costs = lambda *_, **__: host  # type: ignore[assignment]
    if splits:
        registry.block_grid = lambda *_: None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "cluster.toml"
            file.write_text(text)
            (Path(scratch) / "workload.jsonl").write_text(workload)
            keys = [f"output.dir={scratch}/run", *settings]
            if SIMULATOR in settings:
                keys += [f"workload.path={case.dataset}"]
                blocks = (case.meta.get("kv_cache") or {}).get("num_gpu_blocks")
                keys += [f"scheduler.num_blocks={blocks}"] if blocks else []
            config = load_config(file, overrides=keys)
            start = time.perf_counter()
            execute(config, name, report=False)
            wall_s = time.perf_counter() - start
            run = read_run(Path(scratch) / "run")
            hits = _prefix_hits(Path(scratch) / "run" / "requests.csv")
    finally:
        registry.host_costs, registry.block_grid = chosen
    order = np.argsort(run.completed("request_id"), kind="stable")
    measurement = read_measurement(folder / "requests.jsonl")
    by_id = np.argsort(measurement.request_ids, kind="stable")
    for column in ("request_ids", "ttft_ms", "tpot_ms", "e2e_ms"):
        setattr(measurement, column, getattr(measurement, column)[by_id])
    ours = {metric: values[order] for metric, values in run_values(run, measurement).items()}
    plain = msgspec.structs.replace(measurement, anchor="arrival_time")
    raw = {metric: values[order] for metric, values in run_values(run, plain).items()}
    summary = run.summary
    return Result(
        name,
        measurement,
        _theirs(folder / "llmservingsim-sim.csv"),
        ours,
        raw,
        _waits_ms(folder / "requests.jsonl"),
        hits,
        wall_s,
        summary.preemptions,
        summary.recomputed_tokens,
        summary.duration,
    )


def _prefix_hits(path: Path) -> np.ndarray:
    with path.open(newline="") as file:
        found = {int(r["request_id"]): int(r["prefix_hit_len"]) for r in csv.DictReader(file)}
    return np.array([found[request] for request in sorted(found)])


def _waits_ms(path: Path) -> np.ndarray:
    """From arrival to `queued_ts`, in the order of the requests' numbers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.sort(key=lambda row: int(row["request_id"].rpartition("-")[2]))
    waits = np.array([row["queued_ts"] - row["arrival_time"] for row in rows])
    return 1e3 * (waits - waits.min())


def _theirs(path: Path) -> Values:
    limit = csv.field_size_limit(1 << 24)
    try:
        with path.open(newline="") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: int(row["request id"]))
    finally:
        csv.field_size_limit(limit)  # one for the whole process
    columns = {"TTFT": "TTFT", "TPOT": "TPOT", "E2E": "latency"}
    return {m: np.array([int(r[c]) for r in rows]) / 1e6 for m, c in columns.items()}


def print_result(result: Result, console: Console) -> None:
    """The 15 metrics and the paired errors."""
    table = Table(title=f"{result.name}: error against vLLM, %", title_justify="left")
    for column in ("", "statistic", "vLLM, ms", "LLMServingSim", "emu", "emu, from arrival"):
        table.add_column(column, justify="left" if column in ("", "statistic") else "right")
    theirs, ours = result.errors(result.theirs), result.errors(result.ours)
    raw = result.errors(result.from_arrival, from_arrival=True)
    for i, metric in enumerate(METRICS):
        base = statistics(_of(result.measured, metric))
        for j, statistic in enumerate(STATISTICS):
            mark = "" if abs(ours[i, j]) <= abs(theirs[i, j]) else " *"
            table.add_row(
                metric if j == 0 else "",
                statistic,
                f"{base[j]:.1f}",
                f"{theirs[i, j]:+.2f}",
                f"{ours[i, j]:+.2f}{mark}",
                f"{raw[i, j]:+.2f}",
            )
        table.add_section()
    theirs, ours = result.paired(result.theirs), result.paired(result.ours)
    raw = result.paired(result.from_arrival, from_arrival=True)
    for i, metric in enumerate(METRICS):
        cells = [f"{v[i, 0]:.2f} / {v[i, 1]:.2f}" for v in (theirs, ours, raw)]
        table.add_row(metric, "paired, mean / median", "", *cells)
    console.print(table)
    makespan = 100 * (result.makespan_s / result.measured.makespan_s - 1)
    console.print(
        f"{_better(result)} of 15 at least as close (* = not); "
        f"makespan {result.measured.makespan_s:.2f} s, emulated {makespan:+.2f} %; "
        f"{result.preemptions} preemptions, {result.recomputed} tokens recomputed; "
        f"emulated in {result.wall_s:.2f} s.\n"
    )


def _better(result: Result) -> int:
    ours, theirs = result.errors(result.ours), result.errors(result.theirs)
    return int((np.abs(ours) <= np.abs(theirs)).sum())


# --- what each term does ------------------------------------------------------------------------
_NO_TERMS = HostCosts(step_ns=0, first_use_ns=(0,))
_SYNC = "scheduler.async_scheduling=off"
TERMS: list[tuple[str, list[str], HostCosts | None, bool]] = [
    ("the simulator's rules", [SIMULATOR], None, True),
    ("+ measured arrivals, separate prompts, padding, pool", [_SYNC], _NO_TERMS, True),
    ("+ histories whole in graphs, blocks dealt out", [_SYNC], _NO_TERMS, False),
    ("+ scheduling one batch ahead", [], _NO_TERMS, False),
    (
        "+ compiled kernels, launches",
        [],
        msgspec.structs.replace(ASYNC_SCHEDULING, first_use_ns=()),
        False,
    ),
    ("+ first use = all", [], None, False),
]
"""Label, settings, constants of the host, whether decodes in graphs split their histories."""


def print_terms(console: Console) -> None:
    """Terms switched on one after another."""
    for name in names():
        table = Table(title=f"{name}: error of the mean, %", title_justify="left")
        for column in ("", *METRICS, "worst of 15", "as close", "paired TTFT", "paired TPOT"):
            table.add_column(column, justify="left" if not column else "right")
        for label, settings, host, splits in TERMS:
            result = emulate(name, settings, host, splits=splits)
            errors, paired = result.errors(result.ours), result.paired(result.ours)
            table.add_row(
                label,
                *(f"{value:+.2f}" for value in errors[:, 0]),
                f"{np.abs(errors).max():.2f}",
                f"{_better(result)}/15",
                *(f"{mean:.2f} / {median:.2f}" for mean, median in paired[:2]),
            )
        console.print(table)


# --- roofline against profiles ------------------------------------------------------------------
LLAMA, QWEN, QWEN_MOE = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
)
PAIRS = [
    ("RTX4090", LLAMA),
    ("RTXPRO6000", LLAMA),
    ("RTXPRO6000", QWEN),
    ("RTXPRO6000", QWEN_MOE),
]
PHASES: list[tuple[str, Callable[[], BatchShape]]] = [
    *((f"prefill {n}", lambda n=n: _prompt(n)) for n in (128, 512, 1024, 2048)),
    *((f"decode {n} x 1024", lambda n=n: _decodes(n)) for n in (1, 8, 32, 64, 128, 256)),
    ("512 + 32 x 1024", lambda: _prompt(512, 32)),
    ("1920 + 128 x 1024", lambda: _prompt(1920, 128)),
]


def _prompt(new: int, decodes: int = 0) -> BatchShape:
    shape = _decodes(decodes)
    shape.prefill_new, shape.prefill_context = [new], [0]
    shape.sequences += 1
    return shape


def _decodes(count: int) -> BatchShape:
    context = 1024 if count else 0
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * context,
        decode_context_max=context,
        decode_context_min=context,
        sequences=count,
    )


def backends(gpu: str, name: str) -> tuple[RooflineBackend, ProfileBackend]:
    """GPU time only: no host, one GPU."""
    spec = lookup_model(name)
    gate = None
    if spec.experts is not None:
        gate = make_gate("balanced", GateShape(spec.experts.count, spec.experts.per_token, 1, 0))
    model = ProfileModel(
        layers=spec.layers, hidden=spec.hidden, experts=spec.experts.count if spec.experts else 0
    )
    directory = find_bundle(str(PROFILES), hardware=gpu, model=name, variant="bf16")
    profile = ProfileBackend(read_bundle(directory, 1), model, Parallel(), gate=gate)
    return RooflineBackend(spec, lookup_gpu(gpu)), profile


def roofline_errors() -> dict[str, list[float]]:
    """Per cent, by phase, in the order of `PAIRS`."""
    pairs = [backends(*pair) for pair in PAIRS]
    return {
        label: [
            100 * (roofline.iteration_ns(make()) / profile.iteration_ns(make()) - 1)
            for roofline, profile in pairs
        ]
        for label, make in PHASES
    }


def print_roofline(console: Console) -> None:
    """Error of the roofline by phase and batch."""
    table = Table(title="Roofline against profile, GPU time, %", title_justify="left")
    table.add_column("new tokens, decodes x context")
    for gpu, name in PAIRS:
        table.add_column(f"{gpu}\n{name.partition('/')[2]}", justify="right")
    for label, errors in roofline_errors().items():
        table.add_row(label, *(f"{error:+.1f}" for error in errors))
    console.print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--terms", action="store_true", help="what each term does")
    parser.add_argument("--roofline", action="store_true", help="roofline against the profiles")
    chosen = parser.parse_args()
    if not SHARED.is_dir():
        parser.error(f"{SHARED} is not here")
    console = open_console(120)
    if chosen.roofline:
        print_roofline(console)
    elif chosen.terms:
        print_terms(console)
    else:
        for name in names():
            print_result(emulate(name), console)


if __name__ == "__main__":
    main()
