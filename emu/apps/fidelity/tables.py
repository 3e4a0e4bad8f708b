"""The board on the terminal and as JSON: rows, groups, systems, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.fidelity.board import Row
from emu.apps.fidelity.fit import Fit
from emu.apps.fidelity.points.board import PointBoard
from emu.apps.fidelity.points.show import as_document, print_points
from emu.apps.fidelity.runs import METRICS, MeasuredRun, Unread
from emu.apps.fidelity.summary import Group, Summary, summarize
from emu.apps.fidelity.systems import SystemRow

NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "E2E",
    "ttft_p99": "TTFT p99",
    "e2e_p99": "E2E p99",
}


class Board(NamedTuple):
    """All that `emu fidelity` has to show."""

    runs: list[MeasuredRun]
    rows: list[Row]
    fits: dict[str, Fit]
    unread: list[Unread]
    systems: list[SystemRow]
    points: PointBoard | None


def document(board: Board) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "runs": len(board.runs),
        "rows": [
            {
                **msgspec.to_builtins(row),
                "error_percent": {metric: row.error(metric) for metric in METRICS},
                "verdict_right": row.is_judged_right,
            }
            for row in board.rows
        ],
        "summary": msgspec.to_builtins(summarize(board.rows)),
        "fits": msgspec.to_builtins(board.fits),
        "left_out": msgspec.to_builtins(board.unread),
        "systems": [
            msgspec.to_builtins(row) | {"error_percent": row.error} for row in board.systems
        ],
        **({} if board.points is None else {"points": as_document(board.points)}),
    }


def print_board(board: Board, console: Console, title: str, *, is_left_out: bool) -> None:
    """Rows and groups, systems, points, constants."""
    _print_rows(console, board.rows, summarize(board.rows), title)
    if board.systems:
        console.print(_of_systems(board.systems))
    if board.points is not None:
        print_points(console, board.points)
    for group, found in board.fits.items():
        console.print(f"without {group}: {_constants(found)}" if is_left_out else _constants(found))


def _constants(found: Fit) -> str:
    engine = msgspec.structs.asdict(found.engine)
    values = (f"{name} {engine[name]:,} +- {error:,.0f}" for name, error in found.errors.items())
    return f"{', '.join(values)} ({found.stages} stages)"


def _print_rows(console: Console, rows: Sequence[Row], summary: Summary, title: str) -> None:
    table = Table(title=f"Measured, emulated (ms) and error (%): {title}", title_justify="left")
    for column in ("run", "stage", "GPU", "regime"):
        table.add_column(column)
    for metric in METRICS:
        table.add_column(NAMES[metric], justify="right")
    table.add_column("verdict")
    table.add_column("peers E2E %")
    for row in rows:
        measured = msgspec.structs.asdict(row.measured)
        emulated = msgspec.structs.asdict(row.emulated)
        cells = [
            f"{measured[metric]:,.1f} {emulated[metric]:,.1f} {row.error(metric):+.1f}"
            for metric in METRICS
        ]
        verdict = "overloaded" if row.emulated_overloaded else "ok"
        if not row.is_judged_right:
            verdict += ", really " + ("overloaded" if row.is_overloaded else "ok")
        peers = " ".join(
            f"{name} {errors['e2e']:+.0f}" for name, errors in row.peers.items() if "e2e" in errors
        )
        table.add_row(row.run_id, row.stage, row.gpu, row.regime, *cells, verdict, peers)
    console.print(table)
    medians = Table(title="Median |error| (worst), %, stages not overloaded", title_justify="left")
    for column in ("", "stages", *(NAMES[metric] for metric in METRICS)):
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
        figures = ", ".join(f"{NAMES[m]} {errors[m]:.1f}" for m in ("e2e", "ttft") if m in errors)
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
