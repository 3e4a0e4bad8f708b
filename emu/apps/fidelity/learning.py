"""`emu fidelity --learn` and `--prior`: priors, and experiments on what learning is worth."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.fidelity.board import answers, rows_of, tasks_of
from emu.apps.fidelity.experiments import (
    Covered,
    Stage,
    compared,
    coverage,
    covered,
    first_stage,
    half,
)
from emu.apps.fidelity.fit import SHOWN, usable_runs
from emu.apps.fidelity.options import FidelityOptions
from emu.apps.fidelity.prior import prior_text
from emu.apps.fidelity.runs import MeasuredRun
from emu.apps.fidelity.slopes import evidence_of, slopes_of
from emu.apps.fidelity.tables import NAMES
from emu.apps.shared.answer import Reply


def learned(runs: Sequence[MeasuredRun], options: FidelityOptions) -> Reply:
    """Priors and experiments on what learning is worth. `--prior` writes its file."""
    usable = usable_runs(runs)
    processes = options.processes
    _told("every run as shipped")
    rows = rows_of(usable, list(answers(tasks_of(usable, options.seeds), processes)))
    _told("slopes")
    slopes = slopes_of(usable, processes)
    if options.prior is not None:
        text = prior_text(usable, evidence_of(rows, slopes))
        options.prior.write_text(text, encoding="utf-8")
    stages = {
        name: experiment(usable, rows, slopes, processes, _told)
        for name, experiment in (("first-stage", first_stage), ("half", half))
        if name in options.learn
    }
    intervals = coverage(usable, rows, slopes) if "coverage" in options.learn else None

    def show(console: Console) -> None:
        for name, found in stages.items():
            _print_stages(console, name, found)
        if intervals is not None:
            console.print(_covered_text(covered(intervals)), soft_wrap=True)

    def document() -> dict[str, object]:
        found: dict[str, object] = {"runs": len(usable)}
        for name, its in stages.items():
            found[name] = {
                "stages": msgspec.to_builtins(its),
                **msgspec.to_builtins(compared(its)),
            }
        if intervals is not None:
            found["coverage"] = {
                "intervals": msgspec.to_builtins(intervals),
                **msgspec.to_builtins(covered(intervals)),
            }
        return found

    return Reply(show, document)


def _told(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _covered_text(found: Covered) -> str:
    inside = ", ".join(
        f"{NAMES[m]} {inside:.0f} % (median width {found.median_width_percent[m]:.1f} %)"
        for m, inside in found.inside_percent.items()
    )
    words = f"90 % intervals of {found.stages} stages, run left out, hold the measured mean"
    return f"{words}: {inside}"


_TITLES = {
    "first-stage": "Second stages, learned from the first (run left out of the prior)",
    "half": "Stages with the shift that the other half of the models shows on their GPU",
}


def _print_stages(console: Console, name: str, stages: Sequence[Stage]) -> None:
    table = Table(title=f"{_TITLES[name]}: error, %, shipped and learned", title_justify="left")
    for column in ("run", "stage", "GPU"):
        table.add_column(column)
    for metric in SHOWN:
        table.add_column(NAMES[metric], justify="right")
    for stage in stages:
        cells = [f"{stage.default[m]:+.1f} {stage.learned[m]:+.1f}" for m in SHOWN]
        table.add_row(stage.run_id, stage.stage, stage.gpu, *cells)
    console.print(table)
    found = compared(stages)
    for metric in SHOWN:
        worse = ", ".join(found.worse_by_a_point[metric]) or "none"
        console.print(
            f"{NAMES[metric]}: median |error| {found.median_default[metric]:.1f} % shipped, "
            f"{found.median_learned[metric]:.1f} % learned; better in {found.better[metric]} of "
            f"{found.stages}; worse by more than a point: {worse}",
            soft_wrap=True,
        )
