"""`emu fidelity DIR`: the board, a fit, or the board of what a fit has not seen.

The rim: options, tables, files. Owns no rule of comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from emu.apps.fidelity.board import Row, Task, answers, has_runs, rows_of, runs_below, tasks_of
from emu.apps.fidelity.fit import Fit, fit, fitted_runs, leave_out, shipped
from emu.apps.fidelity.learning import learned
from emu.apps.fidelity.options import FidelityOptions
from emu.apps.fidelity.points.board import PointBoard, point_board
from emu.apps.fidelity.points.show import as_document, print_points
from emu.apps.fidelity.points.table import tables_below
from emu.apps.fidelity.runs import MeasuredRun, Unread
from emu.apps.fidelity.systems import SystemRow, power_rows, throughput_rows
from emu.apps.fidelity.tables import Board, document, print_board
from emu.apps.shared.answer import Reply, tell
from emu.engines.registry import engine_text
from emu.errors import InputError, printable


def fidelity_command(options: FidelityOptions) -> int:
    """Find, emulate, print. Raises InputError if neither a run nor a point is found.

    Points (`emu/apps/fidelity/points/`) follow the runs, unless constants are fitted or learned.
    Systems of which only a series over time is known (`emu/apps/fidelity/systems.py`) follow the
    board in a table of their own; nothing is fitted to them.
    """
    directory, overrides = options.directory, tuple(options.overrides)
    learns = bool(options.learn) or options.prior is not None
    needs_fit = bool(options.leave_out) or options.fit is not None
    points = None
    asked = {"--leave-out": options.leave_out == "run", "--fit": options.fit is not None}
    asked |= {"--learn": bool(options.learn), "--prior": options.prior is not None}
    has_points = not any(asked.values())
    if directory.is_file():
        _refuse_given(directory, asked)
    if has_points and tables_below(directory):
        are_alone = options.leave_out == "engine" or directory.is_file() or not has_runs(directory)
        if are_alone:
            plain = FidelityOptions(directory=directory)
            seeds, rounds = options.seeds != plain.seeds, options.rounds != plain.rounds
            _refuse_given(directory, {"--seeds": seeds, "--rounds": rounds})
        points = point_board(options)
        if are_alone:
            return tell(_told_points(points), options)
    if options.leave_out == "engine":
        problem = "engine is for point tables; runs are of one engine"
        raise InputError(str(directory), None, "--leave-out", problem)
    runs, unread = _wanted(directory, options.only)
    if not runs:
        raise InputError(str(directory), None, "--only", "no run has such a word in its name")
    if learns:
        _tell(unread)
        if overrides:
            raise InputError("fidelity", None, "--set", "learning judges the engine as shipped")
        return tell(learned(runs, options), options)
    drawn = tasks_of(runs, 1 if needs_fit else options.seeds, overrides)
    runs, rows, refused = _emulated(runs, drawn, options.processes)
    unread += refused
    _tell(unread)
    rows, fits, title = _fitted(runs, rows, options)
    systems = [] if needs_fit or options.only else _systems(directory, overrides)
    board = Board(runs, rows, fits, unread, systems, points)
    return tell(
        Reply(
            lambda console: print_board(board, console, title, is_left_out=bool(options.leave_out)),
            lambda: document(board),
        ),
        options,
    )


def _refuse_given(directory: Path, asked: Mapping[str, bool]) -> None:
    """Raises InputError for the first of these options that is given: points do not read it."""
    for option, is_given in asked.items():
        if is_given:
            problem = "is for measured runs; this is a table of points"
            raise InputError(str(directory), None, option, problem)


def _told_points(points: PointBoard) -> Reply:
    return Reply(lambda console: print_points(console, points), lambda: as_document(points))


def _fitted(
    runs: Sequence[MeasuredRun], rows: Sequence[Row], options: FidelityOptions
) -> tuple[list[Row], dict[str, Fit], str]:
    """The rows to show, the fits that they rest on, and what both are called."""
    overrides, processes = tuple(options.overrides), options.processes
    if options.leave_out:
        shown, fits = leave_out(runs, rows, options.leave_out, processes, overrides)
        return shown, fits, f"constants fitted without the {options.leave_out} of the row"
    if options.fit is None:
        return list(rows), {}, "emu's defaults"
    found, shown = fit(runs, rows, processes, options.rounds, overrides)
    base = shipped(fitted_runs(runs)[0]).label
    options.fit.write_text(engine_text(found.engine, base), encoding="utf-8")
    return shown, {"all": found}, f"constants fitted to these runs ({options.fit})"


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
