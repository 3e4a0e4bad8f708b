"""The board of points on a terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.fidelity.points.board import METRICS, PointBoard, PointGroup, Spread
from emu.apps.fidelity.points.intervals import held
from emu.apps.fidelity.points.refit import Refit
from emu.errors import printable

_TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "output_tokens_per_s": "tokens/s"}
_PARTS = {"": "groups", "engine": "engines", "gpu": "GPUs", "model": "models"}
_GROUP_POINTS_MIN = 5
"""A group of fewer points has no line on the terminal; JSON has all."""


def print_points(console: Console, board: PointBoard) -> None:
    """Each point, the groups, and the rows that are left out."""
    console.print(_points(board))
    metrics = [m for m in METRICS if any(m in group.errors for group in board.groups)]
    table = Table(
        title="Measured points: |error| median, 90th percentile and bias, %", title_justify="left"
    )
    for column in ("", "points", *(_TITLES[metric] for metric in metrics), "peers"):
        table.add_column(column, justify="left" if column in ("", "peers") else "right")
    by = ""
    for group in board.groups:
        if group.by != "all" and group.points < _GROUP_POINTS_MIN:
            continue
        if group.by != by:
            table.add_section()
            by = group.by
        cells = [_errors(group.errors.get(metric)) for metric in metrics]
        table.add_row(group.name, str(group.points), *cells, "; ".join(_of_peers(group)))
    console.print(table)
    for one in held(board.intervals):
        console.print(
            f"90 % intervals of {_TITLES[one.metric]}, each of {one.groups} "
            f"{_PARTS[board.left_out_by]} left out: hold "
            f"{one.inside:.0%} of the points, {one.worst_group:.0%} of the worst, mean width "
            f"{one.width_percent:.0f} %",
            soft_wrap=True,
        )
    for refit in board.refits:
        console.print(_told(refit), soft_wrap=True, markup=False)
    left = sum(board.left_out.values())
    console.print(f"{len(board.compared)} points, {left} rows left out:")
    for reason, count in board.left_out.items():
        console.print(f"  {count:5}  {printable(reason)}", soft_wrap=True, markup=False)


def _told(refit: Refit) -> str:
    """What an engine's points of a left-out part were emulated with."""
    values = ", ".join(f"{name} {value:,g}" for name, value in refit.constants.items())
    kernels = f"kernels of {refit.kernels}; " if refit.kernels else ""
    return (
        f"{refit.engine} without {refit.left_out} (fitted to {refit.points} points): "
        f"{kernels}{values}"
    )


def _errors(found: Spread | None) -> str:
    if found is None:
        return ""
    return f"{found.median:.0f}  {found.p90:.0f}  {found.bias:+.0f}"


def _of_peers(group: PointGroup) -> Iterator[str]:
    """Median |error| of other programs over those of the group's points that they predict."""
    for tool, errors in group.peers.items():
        figures = ", ".join(f"{_TITLES[m]} {found.median:.0f}" for m, found in errors.items())
        count = max((found.points for found in errors.values()), default=0)
        yield f"{tool}: {figures} ({count})"


def _points(board: PointBoard) -> Table:
    table = Table(title="Points: measured, emulated, error %", title_justify="left")
    for column in ("point", *(_TITLES[metric] for metric in METRICS)):
        table.add_column(column, justify="left" if column == "point" else "right")
    for row in board.compared:
        cells = []
        for metric in METRICS:
            measured, emulated = row.point.figures[metric], row.emulated.figures[metric]
            known = not math.isnan(measured)
            cells.append(
                f"{measured:,.1f} {emulated:,.1f} {row.error(metric):+.0f}" if known else ""
            )
        table.add_row(printable(row.point.point_id), *cells)
    return table


def as_document(board: PointBoard) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "points": [
            {
                **msgspec.to_builtins(row.point),
                "kind": row.kind,
                "drafts_taken": row.drafts,
                "emulated": row.emulated.figures,
                "error_percent": {
                    metric: row.error(metric)
                    for metric in METRICS
                    if not math.isnan(row.error(metric))
                },
                "peers_error_percent": row.peers,
            }
            for row in board.compared
        ],
        "groups": msgspec.to_builtins(board.groups),
        "intervals": msgspec.to_builtins(board.intervals),
        "intervals_held": msgspec.to_builtins(held(board.intervals)),
        "refits": msgspec.to_builtins(board.refits),
        "left_out": board.left_out,
    }
