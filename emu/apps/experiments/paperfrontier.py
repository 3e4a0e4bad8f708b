"""The frontier of the paper's 24B figure: GPU time against attainment, over bounds of the queue.

BlitzScale and ServerlessLLM run with bounds from wide to tight; static systems stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from emu.apps.experiments.measure import Figures
from emu.apps.experiments.papercases import CONV, run_case, tbt_ms
from emu.apps.experiments.runner import BOUNDS, Runner, Shown
from emu.documents import DocumentView

_BOUNDS: Final = (*BOUNDS[:2], (0.2, 0.35), BOUNDS[2], (0.1, 0.2), *BOUNDS[3:])


class Frontier(msgspec.Struct, frozen=True):
    """GPU time of 24B against attainment: by system, (bounds, run) from wide to tight."""

    full: Figures
    points: Mapping[str, Sequence[tuple[tuple[float, float], Figures]]]
    limits: Mapping[str, tuple[float, float]]
    """Objectives of TTFT and TBT in ms, by their names."""

    def least(self, objective: str, points: float = 0.01) -> tuple[tuple[float, float], Figures]:
        """BlitzScale's run with the least GPU time among those that meet an objective as often as
        the full static system, less `points` of one; the tightest bounds if there is none."""
        limits = self.limits[objective]
        wanted = self.full.met(*limits) - points
        runs = self.points["blitzscale"]
        enough = [each for each in runs if each[1].met(*limits) >= wanted]
        return min(enough, key=lambda each: each[1].gpu_s) if enough else runs[-1]


def frontier(runner: Runner, traffic: DocumentView | None) -> tuple[list[Shown], Frontier]:
    """Bounds from wide to tight under BlitzScale and ServerlessLLM, as a table and a picture."""
    full = run_case(runner, CONV, traffic, "full")
    half = run_case(runner, CONV, traffic, "half")
    points = {
        system: [(bounds, run_case(runner, CONV, traffic, system, bounds)) for bounds in _BOUNDS]
        for system in ("blitzscale", "serverlessllm")
    }
    limits = {f"{times}x": (times * full.ttft_ms_mean, 5 * tbt_ms(full)) for times in (5, 7.2, 10)}
    result = Frontier(full, points, limits)
    head = ["system", "bounds s", "GPU time of full", "TTFT mean ms"]
    table = [[*head, *(f"{name} static TTFT met" for name in limits)]]
    rows: list[tuple[str, str, Figures]] = [("static, all", "-", full), ("static, half", "-", half)]
    for system, runs in points.items():
        rows += [(system, f"{low:g} to {high:g}", run) for (low, high), run in runs]
    for system, bounds, run in rows:
        met = [f"{run.met(*each):.1%}" for each in limits.values()]
        share = f"{run.gpu_s / full.gpu_s:.0%}"
        table.append([system, bounds, share, f"{run.ttft_ms_mean:.0f}", *met])
    title = "azure_conv_24b: GPU time against attainment, over the bounds"
    return [Shown(title=title, table=table), _picture(result, half)], result


def _picture(result: Frontier, half: Figures) -> Shown:
    from emu.report.page.panels import Line, Panel, svg

    labels = ("blitzscale", "serverlessllm", "static, all", "static, half", "paper: BlitzScale")
    panels = []
    for name, limits in result.limits.items():

        def line(label: str, runs: Sequence[Figures], limits: tuple[float, float] = limits) -> Line:
            xs = [100 * run.gpu_s / result.full.gpu_s for run in runs]
            ys = [100 * run.met(*limits) for run in runs]
            return Line(label, xs, ys, is_points=len(runs) == 1)

        lines = [line(label, [run for _, run in result.points[label]]) for label in labels[:2]]
        lines += [line(labels[2], [result.full]), line(labels[3], [half])]
        lines.append(Line(labels[4], [50.5], [100 * result.full.met(*limits)], is_points=True))
        panels.append(
            Panel(f"{name} static TTFT", "GPU time, % of full", "requests within, %", lines=lines)
        )
    title = "GPU time against attainment, 24B"
    return Shown(title=title, name="blitzscale-frontier.svg", svg=svg(title, [panels], labels))
