"""`emu fidelity DIR`: the board, a fit, or the board of what a fit has not seen.

The rim: options, tables, files. Owns no rule of comparison.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.fidelity.board import (
    Group,
    Row,
    Summary,
    SystemRow,
    Task,
    answers,
    has_runs,
    power_rows,
    rows_of,
    runs_below,
    summarize,
    tasks_of,
    throughput_rows,
)
from emu.apps.fidelity.fit import (
    SHOWN,
    Fit,
    Stage,
    compared,
    coverage,
    covered,
    evidence_of,
    first_stage,
    fit,
    fitted_runs,
    half,
    leave_out,
    prior_text,
    shipped,
    slopes_of,
    usable_runs,
)
from emu.apps.fidelity.points.board import PointBoard, point_board
from emu.apps.fidelity.points.show import as_document, print_points
from emu.apps.fidelity.points.table import tables_below
from emu.apps.fidelity.runs import METRICS, MeasuredRun, Unread
from emu.engines.registry import engine_text
from emu.errors import InputError, printable
from emu.process.exits import open_console

_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "E2E",
    "ttft_p99": "TTFT p99",
    "e2e_p99": "E2E p99",
}


def fidelity_command(
    directory: Path,
    *,
    only: Sequence[str],
    overrides: Sequence[str],
    seeds: int,
    sample: int,
    seed: int,
    left_out: str,
    fit_to: Path | None,
    rounds: int,
    experiments: Sequence[str],
    prior_to: Path | None,
    processes: int,
    as_json: bool,
) -> int:
    """Find, emulate, print. Raises InputError if neither a run nor a point is found.

    `sample`: points of the tables to emulate, 0 = all. Points (`emu/apps/fidelity/points/`) follow
    the runs, unless constants are fitted or learned. Systems of which only a series over time is
    known (`emu/apps/fidelity/board.py`) follow the board in a table of their own; nothing is fitted
    to them.
    """
    processes = processes or len(os.sched_getaffinity(0))
    needs_runs = bool(left_out or fit_to or experiments or prior_to)
    points = None
    if directory.is_dir() and not needs_runs and tables_below(directory):
        points = point_board(
            directory,
            sample=sample,
            seed=seed,
            only=only,
            overrides=tuple(overrides),
            processes=processes,
        )
        if not has_runs(directory):
            _show_points(points, as_json=as_json)
            return 0
    runs, unread = _wanted(directory, only)
    if not runs:
        raise InputError(str(directory), None, "--only", "no run has such a word in its name")
    if experiments or prior_to is not None:
        _tell(unread)
        if overrides:
            raise InputError("fidelity", None, "--set", "learning judges the engine as shipped")
        return _learning(runs, experiments, prior_to, seeds, processes, as_json=as_json)
    needs_fit = bool(left_out) or fit_to is not None
    drawn = tasks_of(runs, 1 if needs_fit else seeds, tuple(overrides))
    runs, rows, refused = _emulated(runs, drawn, processes)
    unread += refused
    _tell(unread)
    fits: dict[str, Fit] = {}
    title = "emu's defaults"
    if left_out:
        rows, fits = leave_out(runs, rows, left_out, processes, tuple(overrides))
        title = f"constants fitted without the {left_out} of the row"
    elif fit_to is not None:
        found, rows = fit(runs, rows, processes, rounds, tuple(overrides))
        fits["all"] = found
        title = f"constants fitted to these runs ({fit_to})"
        base = shipped(fitted_runs(runs)[0]).label
        fit_to.write_text(engine_text(found.engine, base), encoding="utf-8")
    systems = [] if needs_fit or only else _systems(directory, overrides)
    console = open_console()
    if as_json:
        document = _document(runs, rows, fits)
        document["left_out"] = msgspec.to_builtins(unread)
        document["systems"] = [
            msgspec.to_builtins(row) | {"error_percent": row.error} for row in systems
        ]
        if points is not None:
            document["points"] = as_document(points)
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
        return 0
    _print(console, rows, summarize(rows), title)
    if systems:
        console.print(_of_systems(systems))
    if points is not None:
        print_points(console, points)
    for group, found in fits.items():
        console.print(f"without {group}: {_constants(found)}" if left_out else _constants(found))
    return 0


def _show_points(board: PointBoard, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(as_document(board))).decode())
    else:
        print_points(open_console(), board)


def _emulated(
    runs: Sequence[MeasuredRun], tasks: Sequence[Task], processes: int
) -> tuple[list[MeasuredRun], list[Row], list[Unread]]:
    """The runs that could be emulated, their rows, and those that were refused.

    Raises InputError if all were.
    """
    found = list(answers(tasks, processes, with_refused=True))
    reasons = {answer.run_id: answer.refused for answer in found if answer.refused}
    kept = [run for run in runs if run.run_id not in reasons]
    refused = [Unread(name, reason) for name, reason in sorted(reasons.items())]
    if not kept:
        raise InputError(refused[0].run_id, None, "", refused[0].reason)
    return kept, rows_of(kept, found), refused


def _systems(directory: Path, overrides: Sequence[str]) -> list[SystemRow]:
    return [*throughput_rows(directory, overrides), *power_rows(directory, overrides)]


def _tell(unread: Sequence[Unread]) -> None:
    """The runs that are left out, with their reasons."""
    for run in unread:
        print(f"left out: {printable(run.run_id)}: {printable(run.reason)}", file=sys.stderr)


def _wanted(directory: Path, only: Sequence[str]) -> tuple[list[MeasuredRun], list[Unread]]:
    """Runs with one of these words in their names; all without words."""
    runs, unread = runs_below(directory)
    return (
        [run for run in runs if not only or any(word in run.run_id for word in only)],
        [run for run in unread if not only or any(word in run.run_id for word in only)],
    )


def _learning(
    runs: Sequence[MeasuredRun],
    experiments: Sequence[str],
    prior_to: Path | None,
    seeds: int,
    processes: int,
    *,
    as_json: bool,
) -> int:
    """Priors and experiments on what learning is worth."""

    def told(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    usable = usable_runs(runs)
    told("every run as shipped")
    rows = rows_of(usable, list(answers(tasks_of(usable, seeds), processes)))
    told("slopes")
    slopes = slopes_of(usable, processes)
    if prior_to is not None:
        text = prior_text(usable, evidence_of(rows, slopes))
        prior_to.write_text(text, encoding="utf-8")
    document: dict[str, Any] = {"runs": len(usable)}
    console = open_console()
    for name, experiment in (("first-stage", first_stage), ("half", half)):
        if name in experiments:
            stages = experiment(usable, rows, slopes, processes, told)
            document[name] = {
                "stages": msgspec.to_builtins(stages),
                **msgspec.to_builtins(compared(stages)),
            }
            if not as_json:
                _print_stages(console, name, stages)
    if "coverage" in experiments:
        intervals = coverage(usable, rows, slopes)
        found = covered(intervals)
        document["coverage"] = {
            "intervals": msgspec.to_builtins(intervals),
            **msgspec.to_builtins(found),
        }
        if not as_json:
            inside = ", ".join(
                f"{_NAMES[m]} {inside:.0f} % (median width {found.median_width_percent[m]:.1f} %)"
                for m, inside in found.inside_percent.items()
            )
            words = f"90 % intervals of {found.stages} stages, run left out, hold the measured mean"
            console.print(f"{words}: {inside}", soft_wrap=True)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    return 0


_TITLES = {
    "first-stage": "Second stages, learned from the first (run left out of the prior)",
    "half": "Stages with the shift that the other half of the models shows on their GPU",
}


def _print_stages(console: Console, name: str, stages: Sequence[Stage]) -> None:
    table = Table(title=f"{_TITLES[name]}: error, %, shipped and learned", title_justify="left")
    for column in ("run", "stage", "GPU"):
        table.add_column(column)
    for metric in SHOWN:
        table.add_column(_NAMES[metric], justify="right")
    for stage in stages:
        cells = [f"{stage.default[m]:+.1f} {stage.learned[m]:+.1f}" for m in SHOWN]
        table.add_row(stage.run_id, stage.stage, stage.gpu, *cells)
    console.print(table)
    found = compared(stages)
    for metric in SHOWN:
        worse = ", ".join(found.worse_by_a_point[metric]) or "none"
        console.print(
            f"{_NAMES[metric]}: median |error| {found.median_default[metric]:.1f} % shipped, "
            f"{found.median_learned[metric]:.1f} % learned; better in {found.better[metric]} of "
            f"{found.stages}; worse by more than a point: {worse}",
            soft_wrap=True,
        )


def _document(
    runs: Sequence[MeasuredRun], rows: Sequence[Row], fits: dict[str, Fit]
) -> dict[str, Any]:
    return {
        "runs": len(runs),
        "rows": [
            {
                **msgspec.to_builtins(row),
                "error_percent": {metric: row.error(metric) for metric in METRICS},
                "verdict_right": row.is_judged_right,
            }
            for row in rows
        ],
        "summary": msgspec.to_builtins(summarize(rows)),
        "fits": msgspec.to_builtins(fits),
    }


def _constants(found: Fit) -> str:
    values = (
        f"{name} {getattr(found.engine, name):,} +- {error:,.0f}"
        for name, error in found.errors.items()
    )
    return f"{', '.join(values)} ({found.stages} stages)"


def _print(console: Console, rows: Sequence[Row], summary: Summary, title: str) -> None:
    table = Table(title=f"Measured, emulated (ms) and error (%): {title}", title_justify="left")
    for column in ("run", "stage", "GPU", "regime"):
        table.add_column(column)
    for metric in METRICS:
        table.add_column(_NAMES[metric], justify="right")
    table.add_column("verdict")
    table.add_column("peers E2E %")
    for row in rows:
        cells = []
        for metric in METRICS:
            measured = getattr(row.measured, metric)
            emulated = getattr(row.emulated, metric)
            cells.append(f"{measured:,.1f} {emulated:,.1f} {row.error(metric):+.1f}")
        verdict = "overloaded" if row.emulated_overloaded else "ok"
        if not row.is_judged_right:
            verdict += ", really " + ("overloaded" if row.is_overloaded else "ok")
        peers = " ".join(
            f"{name} {errors['e2e']:+.0f}" for name, errors in row.peers.items() if "e2e" in errors
        )
        table.add_row(row.run_id, row.stage, row.gpu, row.regime, *cells, verdict, peers)
    console.print(table)
    medians = Table(title="Median |error| (worst), %, stages not overloaded", title_justify="left")
    for column in ("", "stages", *(_NAMES[metric] for metric in METRICS)):
        medians.add_column(column, justify="right" if column else "left")
    _add_group(medians, summary.overall)
    for groups in summary.by.values():
        medians.add_section()
        for group in groups:
            _add_group(medians, group)
    console.print(medians)
    wrong = "; ".join(summary.wrong_verdicts) or "none"
    console.print(f"{summary.stages} stages; wrong verdicts: {wrong}", soft_wrap=True)
    for name, errors in summary.peers.items():
        figures = ", ".join(f"{_NAMES[m]} {errors[m]:.1f}" for m in ("e2e", "ttft") if m in errors)
        console.print(
            f"published errors of {name}, median of {errors['runs']:.0f} runs: {figures} %",
            soft_wrap=True,
        )


def _of_systems(rows: Sequence[SystemRow]) -> Table:
    table = Table(title="Systems measured over time", title_justify="left")
    for column in ("system", "unit", "measured", "emulated", "error %", "by second %"):
        table.add_column(column, justify="left" if column in ("system", "unit") else "right")
    for row in rows:
        series = "" if row.series_error is None else f"{row.series_error:.1f}"
        figures = f"{row.measured:,.1f}", f"{row.emulated:,.1f}", f"{row.error:+.1f}"
        table.add_row(row.name, row.unit, *figures, series)
    return table


def _add_group(table: Table, group: Group) -> None:
    cells = [f"{group.median[m]:.1f} ({group.worst[m]:+.0f})" for m in METRICS if group.median]
    table.add_row(group.name, str(group.stages), *cells)
