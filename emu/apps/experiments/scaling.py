"""`emu experiment NAME`: run, print the tables, keep them as Markdown with the pictures beside.

pairings   three models and traffics x systems x clusters A and B (BlitzScale Fig. 17, 18)
ablation   +Network, +Multicast, +Live (BlitzScale Fig. 20)
six        six prefill replicas at once (Fig. 21)
cache      bytes of weights in host memory (Fig. 19)
fleet      ten models on one fleet whose host memory holds three
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from emu.apps.experiments.measure import (
    BOUNDS,
    ORDER,
    PAIRINGS,
    SYSTEMS,
    Figures,
    Runner,
    Shown,
    Table,
    measure,
    put,
)
from emu.apps.experiments.paper import paper
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.errors import InputError
from emu.report.atomic import write_text
from emu.report.model_figures import ModelFigures
from emu.report.page.panels import Bars, Line, Panel, svg
from emu.report.summary import Summary
from emu.runs.runner import execute
from emu.units import GIB

# --- pictures, from the figures and files of the runs ---------------------------------------------
_QUANTILES: Final = 120
_IN_SERVICE: Final = (
    "prefill",
    "new_prefill",
    "old_prefill",
    "refractory_prefill",
    "aus_prefill",
)
"""States in which a replica computes prompts."""
_LOADING: Final = ("loading_prefill", "loading_decode", "new_prefill")
_SIX_S: Final = 4.0
"""The loads of experiment (c) take no longer."""
_SHOWN_S: Final = 130.0
"""So much of a run is in the timelines: two bursts."""


def distributions(
    cluster: str, runs: Mapping[str, Mapping[str, Figures]], systems: Sequence[str]
) -> Shown:
    """TTFT over requests, and GPU time, by system."""
    above, below = [], []
    for pairing, by_system in runs.items():
        lines = [Line(system, *_distribution(by_system[system].ttfts_ms)) for system in systems]
        above.append(
            Panel(f"{pairing}: TTFT", "ms", "part of the requests", lines=lines, is_log_x=True)
        )
        full = by_system["distserve_full"].gpu_s
        bars = [Bars(system, [100 * by_system[system].gpu_s / full]) for system in systems]
        title = f"{pairing}: GPU time"
        below.append(Panel(title, "", "% of the full static system", bars=bars, names=[""]))
    title = f"TTFT and GPU time on cluster {cluster}"
    return _picture(title, f"pairings-{cluster}", [above, below], systems)


def _distribution(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Quantiles of the values: (value, part of the values up to it)."""
    ascending = sorted(values)
    parts = [index / _QUANTILES for index in range(1, _QUANTILES + 1)]
    return [ascending[max(0, round(part * len(ascending)) - 1)] for part in parts], parts


def frontier(
    cluster: str,
    runs: Mapping[str, Mapping[str, Figures]],
    bounded: Mapping[str, Sequence[Figures]],
) -> Shown:
    """Objectives met over GPU time: BlitzScale from wide to tight bounds, and static systems."""
    labels = ("blitzscale, other bounds", "serverlessllm", "distserve_full", "distserve_half")
    panels = []
    for pairing in PAIRINGS:
        full = runs[pairing]["distserve_full"].gpu_s

        def point(label: str, many: Sequence[Figures], full: float = full) -> Line:
            xs = [100 * run.gpu_s / full for run in many]
            return Line(label, xs, [100 * run.slo_met for run in many], is_points=len(many) == 1)

        lines = [point(labels[0], bounded[pairing])]
        lines += [point(system, [runs[pairing][system]]) for system in labels[1:]]
        panels.append(
            Panel(pairing, "GPU time, % of full", "requests within the SLO, %", lines=lines)
        )
    widest, tightest = BOUNDS[0], BOUNDS[-1]
    title = (
        f"SLO against GPU time on cluster {cluster}, bounds {widest[0]:g}-{widest[1]:g} s "
        f"to {tightest[0]:g}-{tightest[1]:g} s"
    )
    return _picture(title, f"pairings-slo-{cluster}", [panels], labels)


def timelines(
    cluster: str, runs: Mapping[str, Mapping[str, Figures]], systems: Sequence[str]
) -> Shown:
    """Prefill replicas in service, and replicas that load, over the first bursts."""
    labels = ("prefill in service", "loading")
    rows = []
    for system in systems:
        panels = []
        for pairing, by_system in runs.items():
            directory = by_system[system].directory
            lines = [
                Line(labels[0], *_count(directory, _IN_SERVICE), is_step=True),
                Line(labels[1], *_count(directory, _LOADING), is_step=True),
            ]
            panels.append(Panel(f"{pairing}: {system}", "s", "replicas", lines=lines))
        rows.append(panels)
    title = f"Scaling timeline on cluster {cluster}"
    return _picture(title, f"pairings-timeline-{cluster}", rows, labels)


def _count(directory: Path, states: Sequence[str]) -> tuple[list[float], list[float]]:
    """Replicas in these states over time."""
    times, counts, count = [0.0], [0.0], 0
    for row in _rows(directory / "transitions.csv"):
        at_s = int(row["time_ns"]) / 1e9
        if at_s > _SHOWN_S:
            break
        count += (row["to"] in states) - (row["from"] in states)
        times.append(at_s)
        counts.append(float(count))
    return [*times, _SHOWN_S], [*counts, counts[-1]]


def steps(runs: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> Shown:
    """Ablation: mean and p95 TTFT after each step, by cluster and pairing."""
    labels = list(next(iter(next(iter(runs.values())).values())))
    rows = []
    for cluster, by_pairing in runs.items():
        for name, figure in (("mean", "ttft_ms_mean"), ("p95", "ttft_ms_p95")):
            rows.append(
                [
                    Panel(
                        f"{pairing} on {cluster}: {name} TTFT",
                        "",
                        "ms",
                        bars=[
                            Bars(label, [getattr(run, figure)]) for label, run in by_step.items()
                        ],
                        names=[""],
                    )
                    for pairing, by_step in by_pairing.items()
                ]
            )
    return _picture("One mechanism after the other", "ablation", rows, labels)


def layers(cases: Mapping[str, Path], total: int) -> Shown:
    """Layers that have arrived over time since the decision, for each of the six replicas."""
    panels = []
    labels = ("layers there", "served a batch", "complete")
    for label, directory in cases.items():
        marks = list(_rows(directory / "marks.csv"))
        decided = min(int(m["time_ns"]) for m in marks if m["kind"] == "plan")
        arrived: dict[str, list[tuple[float, float]]] = {}
        for mark in marks:
            if mark["kind"] == "layers":
                count = min(max(int(mark["text"].split()[0]) - 1, 0), total)
                point = ((int(mark["time_ns"]) - decided) / 1e9, float(count))
                arrived.setdefault(mark["target"], [(0.0, 0.0)]).append(point)
        lines = [
            Line(labels[0], [x for x, _ in points], [y for _, y in points], is_step=True)
            for points in arrived.values()
        ]
        given = [
            ((int(m["time_ns"]) - decided) / 1e9, float(m["text"].split(" after ")[1].split()[0]))
            for m in marks
            if m["kind"] == "relay" and " after 0 layers" not in m["text"]
        ]
        lines.append(Line(labels[1], [x for x, _ in given], [y for _, y in given], is_points=True))
        ends = [(int(m["time_ns"]) - decided) / 1e9 for m in marks if m["kind"] == "loaded"]
        lines.append(Line(labels[2], ends, [float(total)] * len(ends), is_points=True))
        panels.append(Panel(label, "s since the decision", "layers", lines=lines, x_max=_SIX_S))
    middle = (len(panels) + 1) // 2
    title = "Six prefill replicas at once: layers of each"
    return _picture(title, "six", [panels[:middle], panels[middle:]], labels)


def host_copies(runs: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> Shown:
    """Host memory for weights in copies of the model, by cluster and pairing."""
    systems = list(next(iter(next(iter(runs.values())).values())))
    rows = [
        [
            Panel(
                f"{pairing} on {cluster}",
                "",
                "GB in host memory",
                bars=[
                    Bars(system, [run.host_gb_mean, run.host_gb_max])
                    for system, run in by_system.items()
                ],
                names=["mean", "most"],
            )
            for pairing, by_system in by_pairing.items()
        ]
        for cluster, by_pairing in runs.items()
    ]
    return _picture("Weights in host memory", "cache", rows, systems)


def _picture(
    title: str, name: str, rows: Sequence[Sequence[Panel]], labels: Sequence[str]
) -> Shown:
    return Shown(title=title, name=f"{name}.svg", svg=svg(title, rows, labels))


def _rows(path: Path) -> Iterable[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


# --- experiment (e): ten models on one fleet whose host memory holds three ------------------------
# Two tables for each minimum (one replica of each kind kept, or none): the systems, and every
# model. A load is a hit where the weights were in the memory of a GPU or of a host, a miss where
# they came from a disk. `could hit` is the part of ServerlessLLM's loads that a memory of that size
# could serve at best, if each machine always had the copies of the models that are loaded there
# most often.

_FLEET_SYSTEMS: Final = ("blitzscale", "allcache", "serverlessllm")
"""In the order of their TTFT in the paper."""
_CONFIG: Final = "ten_models"


def fleet(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (e). It has a cluster of its own."""
    for minimum, words in ((1, "one replica of each kind is kept"), (0, "models scale to zero")):
        runs = {system: _run(runner, system, minimum) for system in _FLEET_SYSTEMS}
        yield Shown(title=f"ten models, {words}", table=_systems(runs))
        yield Shown(title=f"by model, {words}", table=_models(runs))


def _run(runner: Runner, system: str, minimum: int) -> tuple[Summary, Config, Path]:
    tables: dict[str, Any] = runner.tables(_CONFIG)
    tables["autoscale"] |= {"preset": system, "min_prefill": minimum, "min_decode": minimum}
    for model in tables["models"]:
        model |= {"prefill": minimum, "decode": minimum}
    name = f"{_CONFIG}-{system}-min{minimum}"
    out = (runner.out / name).resolve()
    tables["output"] = {"dir": str(out), "report": False}
    runner.tell(name)
    config = config_from_dict(tables, base_dir=runner.configs)
    summary = execute(config, name).summary
    assert summary is not None
    return summary, config, out


def _of_models(summary: Summary) -> dict[str, ModelFigures]:
    if isinstance(summary.models, msgspec.UnsetType):
        raise InputError(_CONFIG, None, "models", "the configuration serves one model")
    return summary.models


def _systems(runs: dict[str, tuple[Summary, Config, Path]]) -> Table:
    head = "system, TTFT mean ms, TTFT p95 ms, TTFT p99 ms, TPOT mean ms, SLO met, GPU s, loads"
    table = [[*head.split(", "), "misses", "hit rate", "could hit", "host GB mean"]]
    for system, (summary, config, out) in runs.items():
        models = _of_models(summary).values()
        hits = sum(model.load_hits for model in models)
        misses = sum(model.load_misses for model in models)
        best = _could_hit(summary, config, out) if system == "serverlessllm" else None
        table.append(
            [
                system,
                f"{summary.mean_ttft_ms:.0f}",
                f"{summary.p95_ttft_ms:.0f}",
                f"{summary.p99_ttft_ms:.0f}",
                f"{summary.mean_tpot_ms:.1f}",
                f"{summary.slo.joint_attainment or 0:.1%}",
                f"{summary.gpu_seconds.total:,.0f}",
                f"{hits + misses}",
                f"{misses}",
                f"{hits / (hits + misses):.0%}" if hits + misses else "-",
                "-" if best is None else f"{best:.0%}",
                f"{summary.host_cache_bytes.get('mean', 0) / 1e9:.0f}",
            ]
        )
    return table


def _models(runs: dict[str, tuple[Summary, Config, Path]]) -> Table:
    head = ["model", "requests", "copy GB"]
    for system in runs:
        head += [f"{system}: TTFT mean ms", "loads", "misses"]
    table = [head]
    by_system = {system: _of_models(run[0]) for system, run in runs.items()}
    for name, first in by_system[_FLEET_SYSTEMS[0]].items():
        row = [name, f"{first.completed}", f"{first.host_copy_bytes / 1e9:.0f}"]
        for models in by_system.values():
            model = models[name]
            row += [
                f"{model.mean_ttft_ms:.0f}",
                f"{model.load_hits + model.load_misses}",
                f"{model.load_misses}",
            ]
        table.append(row)
    return table


def _could_hit(summary: Summary, config: Config, out: Path) -> float:
    """Best part of the loads that fixed copies in each machine's memory could serve."""
    from emu.cluster.plan import make_plan

    plan = make_plan(config)
    loads: dict[int, Counter[str]] = {}
    with (out / "marks.csv").open(newline="") as file:
        for mark in csv.DictReader(file):
            if mark["kind"] == "loaded":
                replica = plan.replicas[int(mark["target"].removeprefix("replica "))]
                loads.setdefault(replica.machine, Counter())[replica.served] += 1
    assert config.autoscale is not None
    room = config.autoscale.host_cache_gib * GIB
    sizes = {name: model.host_copy_bytes for name, model in _of_models(summary).items()}
    served = sum(_best(counts, sizes, room) for counts in loads.values())
    total = sum(sum(counts.values()) for counts in loads.values())
    return served / total if total else 0.0


def _best(counts: Counter[str], sizes: dict[str, int], room: float) -> int:
    """Most loads that copies which fit together can serve: every set of models is tried."""
    names = sorted(counts)
    best = 0
    for chosen in range(1 << len(names)):
        picked = [name for i, name in enumerate(names) if chosen >> i & 1]
        if sum(sizes[name] for name in picked) <= room:
            best = max(best, sum(counts[name] for name in picked))
    return best


# --- experiment (a): pairings of model, traffic and cluster ---------------------------------------
# Tables: every system of a pairing; the order of the systems over several seeds; GPU time at the
# attainment of the full static system; the paper's headline figures beside ours.

_ANY_SOURCE: Final = "multicast, any source"
_TIMELINE: Final = ("blitzscale", "network", "serverlessllm")
_STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
_SAME_POINTS: Final = 0.01
"""Attainments that differ by less are the same."""


def pairings(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (a)."""
    everything: dict[tuple[str, str], dict[str, Figures]] = {}
    for cluster in clusters:
        for pairing in PAIRINGS:
            runs = {system: runner.run(pairing, cluster, system) for system in SYSTEMS}
            keys = {"autoscale.prune_sources": False}
            runs[_ANY_SOURCE] = runner.run(pairing, cluster, "multicast", **keys)
            everything[cluster, pairing] = runs
            yield Shown(title=f"{pairing} on cluster {cluster}", table=_systems_table(runs))
    if runner.seeds > 1:
        yield Shown(
            title=f"order of the systems, {runner.seeds} seeds", table=_order(runner, clusters)
        )
    yield Shown(
        title="GPU time at the attainment of the full static system",
        table=_same_attainment(runner, clusters),
    )
    yield Shown(title="beside the paper's headline figures", table=_headlines(everything))
    for cluster in clusters:
        of_cluster = {pairing: everything[cluster, pairing] for pairing in PAIRINGS}
        bounded = {
            pairing: [runner.bounded(pairing, cluster, bounds) for bounds in BOUNDS]
            for pairing in PAIRINGS
        }
        yield distributions(cluster, of_cluster, SYSTEMS)
        yield frontier(cluster, of_cluster, bounded)
        yield timelines(cluster, of_cluster, _TIMELINE)


def _systems_table(runs: Mapping[str, Figures]) -> Table:
    reference = runs["distserve_full"]
    five = (5 * reference.ttft_ms_mean, 5 * reference.tbt_ms_mean)
    head = "system, TTFT mean ms, TTFT p95 ms, TBT mean ms, TBT p95 ms, SLO met, 5x SLO met, GPU s"
    table = [[*head.split(", "), "of full", "GPU s serving", "weights GB", "scale-ups"]]
    for system, run in runs.items():
        table.append(
            [
                system,
                f"{run.ttft_ms_mean:.0f}",
                f"{run.ttft_ms_p95:.0f}",
                f"{run.tbt_ms_mean:.1f}",
                f"{run.tbt_ms_p95:.1f}",
                f"{run.slo_met:.1%}",
                f"{run.met(*five):.1%}",
                f"{run.gpu_s:.0f}",
                f"{run.gpu_s / reference.gpu_s:.0%}",
                f"{run.gpu_s_serving:.0f}",
                f"{run.weights_gb:.0f}",
                str(run.scale_ups),
            ]
        )
    return table


# --- the order ------------------------------------------------------------------------------------
def _order(runner: Runner, clusters: Sequence[str]) -> Table:
    """Differences between neighbors with 95 % intervals: the seeds are the same for both."""
    table = [["pairing", "cluster", "from, to", "TTFT mean ms", "TTFT p95 ms", "order"]]
    for cluster in clusters:
        for pairing in PAIRINGS:
            runs = {s: runner.over_seeds(pairing, cluster, s) for s in ORDER}
            for faster, slower in itertools.pairwise(ORDER):
                pairs = list(zip(runs[faster], runs[slower], strict=True))
                means = [b.ttft_ms_mean - a.ttft_ms_mean for a, b in pairs]
                tails = [b.ttft_ms_p95 - a.ttft_ms_p95 for a, b in pairs]
                table.append(
                    [
                        pairing,
                        cluster,
                        f"{faster} to {slower}",
                        _with_interval(means),
                        _with_interval(tails),
                        _verdict(means, tails),
                    ]
                )
    return table


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
    return mean, quantile * math.sqrt(variance / count)


def _with_interval(values: Sequence[float]) -> str:
    mean, half = _interval(values)
    return f"{mean:+.0f} ± {half:.0f}"


def _verdict(*differences: Sequence[float]) -> str:
    intervals = [_interval(values) for values in differences]
    if all(mean - half > 0 for mean, half in intervals):
        return "holds"
    if any(mean + half < 0 for mean, half in intervals):
        return "turned"
    return "holds in the mean" if all(mean >= 0 for mean, _ in intervals) else "not told apart"


# --- GPU time -------------------------------------------------------------------------------------
def _same_attainment(runner: Runner, clusters: Sequence[str]) -> Table:
    """The widest bounds at which BlitzScale meets the objectives as often as all GPUs do."""
    table = [["pairing", "cluster", "SLO met, full", "bounds s", "SLO met", "GPU time of full"]]
    for cluster in clusters:
        for pairing in PAIRINGS:
            full = runner.run(pairing, cluster, "distserve_full")
            runs = [(bounds, runner.bounded(pairing, cluster, bounds)) for bounds in BOUNDS]
            same = [pair for pair in runs if pair[1].slo_met >= full.slo_met - _SAME_POINTS]
            (lower, upper), run = same[0] if same else runs[-1]
            table.append(
                [
                    pairing,
                    cluster,
                    f"{full.slo_met:.1%}",
                    f"{lower:g} to {upper:g}" + ("" if same else " (not reached)"),
                    f"{run.slo_met:.1%}",
                    f"{run.gpu_s / full.gpu_s:.0%}",
                ]
            )
    return table


# --- the paper ------------------------------------------------------------------------------------
_Figure = Callable[[Figures], float]


def _headlines(everything: Mapping[tuple[str, str], Mapping[str, Figures]]) -> Table:
    clusters = sorted({cluster for cluster, _ in everything})
    table = [["figure", "paper", *(f"cluster {cluster}" for cluster in clusters)]]

    def row(
        name: str, paper: str, cell: Callable[[Mapping[str, Mapping[str, Figures]]], str]
    ) -> None:
        cells = [
            cell({p: runs for (c, p), runs in everything.items() if c == cluster})
            for cluster in clusters
        ]
        table.append([name, paper, *cells])

    def change(pairing: str, system: str, figure: _Figure) -> Callable[..., str]:
        return lambda runs: (
            f"{figure(runs[pairing]['blitzscale']) / figure(runs[pairing][system]) - 1:+.1%}"
        )

    def changes(system: str, figure: _Figure) -> Callable[..., str]:
        return lambda runs: ", ".join(change(p, system, figure)(runs) for p in PAIRINGS)

    code, conv, burst = PAIRINGS
    ttft: _Figure = lambda run: run.ttft_ms_mean  # noqa: E731
    tbt: _Figure = lambda run: run.tbt_ms_mean  # noqa: E731
    gpu: _Figure = lambda run: run.gpu_s  # noqa: E731
    row(
        "1 TTFT against ServerlessLLM (8B, 24B, 72B)",
        "-47 to -75 %",
        changes("serverlessllm", ttft),
    )
    row("2 TTFT, 72B, against ServerlessLLM", "-75.5 %", change(burst, "serverlessllm", ttft))
    row("3 TTFT, 72B, against AllCache", "-21.1 %", change(burst, "allcache", ttft))
    row("4 TBT, 72B, against ServerlessLLM", "-7.4 %", change(burst, "serverlessllm", tbt))
    row("5 TBT, 72B, against AllCache", "-5.1 %", change(burst, "allcache", tbt))
    row("6 TBT, 8B, against ServerlessLLM", "-88 to -94 %", change(code, "serverlessllm", tbt))
    row("7 TBT, 24B, against ServerlessLLM", "-0.7 to -1.8 %", change(conv, "serverlessllm", tbt))
    row(
        "8 SLO met, 24B: BlitzScale, full DistServe",
        "the same",
        lambda runs: (
            f"{runs[conv]['blitzscale'].slo_met:.1%}, {runs[conv]['distserve_full'].slo_met:.1%}"
        ),
    )
    row(
        "9 SLO violated, 24B, ServerlessLLM",
        "18.7 %",
        lambda runs: f"{1 - runs[conv]['serverlessllm'].slo_met:.1%}",
    )
    row("10 TTFT, 24B, against half DistServe", "-95.8 %", change(conv, "distserve_half", ttft))
    row("11 TBT, 24B, against half DistServe", "-1 %", change(conv, "distserve_half", tbt))
    row(
        "12 GPU time against full DistServe (8B, 24B, 72B)",
        "-49 to -50 %",
        changes("distserve_full", gpu),
    )
    row("13 GPU time, 24B, against ServerlessLLM", "-19.5 %", change(conv, "serverlessllm", gpu))
    return table


# --- experiments (b) to (d), and all by name ------------------------------------------------------
ABLATION: Final = (
    ("ServerlessLLM", "serverlessllm"),
    ("+Network", "network"),
    ("+Multicast", "multicast"),
    ("+Live", "blitzscale"),
)


def ablation(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (b)."""
    everything: dict[str, dict[str, dict[str, Figures]]] = {}
    for cluster in clusters:
        table = [["pairing", "step", "TTFT mean ms", "change", "TTFT p95 ms", "change", "GPU s"]]
        for pairing in PAIRINGS:
            runs = {label: runner.run(pairing, cluster, system) for label, system in ABLATION}
            everything.setdefault(cluster, {})[pairing] = runs
            before: Figures | None = None
            for label, run in runs.items():
                old = before or run
                table.append(
                    [
                        pairing,
                        label,
                        f"{run.ttft_ms_mean:.0f}",
                        f"{run.ttft_ms_mean / old.ttft_ms_mean - 1:+.1%}",
                        f"{run.ttft_ms_p95:.0f}",
                        f"{run.ttft_ms_p95 / old.ttft_ms_p95 - 1:+.1%}",
                        f"{run.gpu_s:.0f}",
                    ]
                )
                before = run
        yield Shown(title=f"cluster {cluster}", table=table)
    yield steps(everything)


def cache(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (d)."""
    everything: dict[str, dict[str, dict[str, Figures]]] = {}
    head = "pairing, system, one copy GB, host memory GB mean, most, loads from host, from SSD"
    for cluster in clusters:
        table = [head.split(", ")]
        for pairing in PAIRINGS:
            runs = {
                system: runner.run(pairing, cluster, system)
                for system in ("blitzscale", "serverlessllm", "allcache")
            }
            everything.setdefault(cluster, {})[pairing] = runs
            for system, run in runs.items():
                table.append(
                    [
                        pairing,
                        system,
                        f"{run.copy_gb:.1f}",
                        f"{run.host_gb_mean:.1f}",
                        f"{run.host_gb_max:.1f}",
                        str(run.loads.get("host", 0)),
                        str(run.loads.get("disk", 0)),
                    ]
                )
        yield Shown(title=f"cluster {cluster}", table=table)
    yield host_copies(everything)


SIX: Final = "six_prefills_24b"
_SIX_LAYERS: Final = 40
_SIX_SYSTEMS: Final = (
    ("two lanes of three, live tails", "blitzscale"),
    ("two lanes of three", "multicast"),
    ("one to one over RDMA", "network"),
    ("host memory (AllCache)", "allcache"),
)
_PAPER_EFFICIENCY: Final = 0.78
"""Part of the nominal rate that the paper's loads reach: 23.6 GB over two lanes in 1.2 s."""


def six(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (c); it has a cluster of its own."""
    nominal: dict[str, Path] = {}
    for title, derate in (
        ("nominal link rates", 1.0),
        ("links at 78 % of nominal", _PAPER_EFFICIENCY),
    ):
        table: Table = [
            ["system", "load s", "first token of a new replica s", "TTFT mean ms", "p95 ms"]
        ]
        for label, system in _SIX_SYSTEMS:
            tables = runner.tables(SIX)
            put(tables, "autoscale.preset", system)
            put(tables, "autoscale.note_layers", True)
            for key in ("nic_gbps", "pcie_gbps"):
                tables["nodes"][0][key] = round(tables["nodes"][0][key] * derate)
            out = runner.out / f"{SIX}-{system}-{derate}"
            run = measure(tables, runner.configs, out, f"{SIX} {system}")
            if derate == 1.0:
                nominal[label] = out
            loaded_s, first_s = _six_times(out)
            table.append(
                [
                    label,
                    f"{loaded_s:.3f}",
                    f"{first_s:.3f}",
                    f"{run.ttft_ms_mean:.0f}",
                    f"{run.ttft_ms_p95:.0f}",
                ]
            )
        yield Shown(title=title, table=table)
    yield layers(nominal, _SIX_LAYERS)


def _six_times(out: Path) -> tuple[float, float]:
    """Seconds from the decision to the last load's end, and to a new replica's first token."""
    with (out / "marks.csv").open(newline="") as file:
        marks = list(csv.DictReader(file))
    decided = min(int(m["time_ns"]) for m in marks if m["kind"] == "plan")
    loaded = max(int(m["time_ns"]) for m in marks if m["kind"] == "loaded")
    helped = {
        int(request)
        for m in marks
        if m["kind"] == "relay" and " after 0 layers" not in m["text"]
        for request in m["text"].rpartition("requests ")[2].split()
    }
    with (out / "requests.csv").open(newline="") as file:
        tokens = [
            int(row["first_token_ns"])
            for row in csv.DictReader(file)
            if int(row["instance_id"]) > 3 or int(row["request_id"]) in helped
        ]
    return (loaded - decided) / 1e9, (min(tokens) - decided) / 1e9


EXPERIMENTS: Final[Mapping[str, Callable[[Runner, Sequence[str]], Iterator[Shown]]]] = (
    MappingProxyType(
        {
            "pairings": pairings,
            "ablation": ablation,
            "six": six,
            "cache": cache,
            "fleet": fleet,
            "paper": paper,
        }
    )
)


def markdown(shown: Shown) -> str:
    """A table or a picture for the documentation."""
    if shown.svg:
        return f"![{shown.title}]({shown.name})\n"
    head, *rows = shown.table
    lines = [f"**{shown.title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# --- the command ----------------------------------------------------------------------------------
_BLOCK: Final = re.compile(r"(<!-- printed -->\n).*?(<!-- end of printed -->)", re.DOTALL)


def run_experiment(
    name: str,
    *,
    configs: Path,
    output: Path,
    clusters: str,
    seeds: int = 1,
    page: Path | None = None,
    traces: Path | None = None,
    quiet: bool = False,
) -> int:
    """Run one experiment. Raises InputError for an unknown name, cluster or page."""
    from emu.process.console import open_console

    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise InputError("experiment", None, "NAME", f"unknown {name!r}; there are {known}")
    names = [letter for letter in clusters.upper() if letter != ","]
    if not names or any(letter not in "AB" for letter in names):
        raise InputError("experiment", None, "--clusters", "expected A, B or AB")
    if not 1 <= seeds <= 100:
        raise InputError("experiment", None, "--seeds", "expected 1 to 100")
    before = _page(page)
    console = open_console()

    def tell(case: str) -> None:
        if not quiet:
            print(f"running {case}", file=sys.stderr)

    runner = Runner(configs, output, tell, seeds, traces)
    texts: list[str] = []
    output.mkdir(parents=True, exist_ok=True)
    for shown in EXPERIMENTS[name](runner, names):
        texts.append(markdown(shown))
        if not shown.svg:
            console.print(_pretty(shown))
            continue
        for directory in [output] if page is None else [output, page.parent]:
            write_text(directory / shown.name, shown.svg)
        console.print(f"picture: {output / shown.name}", soft_wrap=True)
    text = "\n".join(texts)
    write_text(output / f"{name}.md", text)
    console.print(f"tables: {output / name}.md", soft_wrap=True)
    if page is not None:
        write_text(page, _BLOCK.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", before))
    return 0


def _page(page: Path | None) -> str:
    """The text of the page that is to hold the tables."""
    if page is None:
        return ""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(page), None, "", error.strerror or str(error)) from None
    if not _BLOCK.search(text):
        raise InputError(str(page), None, "", "no <!-- printed --> ... <!-- end of printed -->")
    return text


def _pretty(shown: Shown) -> object:
    from rich.table import Table as Pretty

    pretty = Pretty(title=shown.title)
    for index, head in enumerate(shown.table[0]):
        pretty.add_column(head, justify="left" if index == 0 else "right")
    for row in shown.table[1:]:
        pretty.add_row(*row)
    return pretty
