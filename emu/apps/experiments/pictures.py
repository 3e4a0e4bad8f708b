"""Pictures of scaling experiments, from the figures and files of the runs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.runner import BOUNDS, PAIRINGS, Shown
from emu.report.page.panels import Bars, Line, Panel, svg

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
