"""Experiment (a): pairings of model, traffic and cluster.

Tables: every system of a pairing; the order of the systems over several seeds; GPU time at the
attainment of the full static system; the paper's headline figures beside ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.pictures import distributions, frontier, timelines
from emu.apps.experiments.runner import BOUNDS, ORDER, PAIRINGS, SYSTEMS, Runner, Shown, Table

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
