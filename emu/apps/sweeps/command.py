"""`emu sweep`: progress while it runs, the table at the end."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from emu.apps.shared.answer import Reply, progress, tell
from emu.apps.sweeps.cells import drawn_cell
from emu.apps.sweeps.drive import SweepResult, run_sweep
from emu.apps.sweeps.labels import conditions_of, figure_label, in_order, key_label, shown_figures
from emu.apps.sweeps.options import SweepCommand
from emu.apps.sweeps.page import write_page
from emu.apps.sweeps.results import columns_of, write_results
from emu.apps.sweeps.words import answer_text, drawn_lines

_ROWS_SHOWN = 30
_HEADING_COLUMNS = 12


def sweep_command(options: SweepCommand) -> int:
    """Run a sweep, write its files, print its table."""
    started_s = time.monotonic()
    with progress(options, "points") as watch:
        result = run_sweep(options, watch)
    result.wall_s = time.monotonic() - started_s
    write_results(result)
    if options.report:
        write_page(result)
    notes = [f"{row.result.status}: {row.result.error}" for row in result.rows if row.result.error]
    data = result.directory / "sweep.json"
    return tell(Reply(lambda console: print_result(result, console), data, notes), options)


def print_result(result: SweepResult, console: Console) -> None:
    """The points as a table, and the answer of a search."""
    columns = columns_of(result)
    headings = _headings(result, columns)
    table = Table(title=f"{result.source}: {len(result.rows)} points", title_justify="left")
    for heading in headings.values():
        table.add_column(broken(heading), justify="right", overflow="fold")
    for index in in_order(result)[:_ROWS_SHOWN]:
        row = result.rows[index]
        table.add_row(*(Text(drawn_cell(row, name, columns[name][index])) for name in headings))
    console.print(table)
    if len(result.rows) > _ROWS_SHOWN:
        console.print(f"... and {len(result.rows) - _ROWS_SHOWN} more in results.csv")
    for line in drawn_lines(result):
        console.print(line, soft_wrap=True)
    if result.answer is not None:
        console.print(answer_text(result.answer), soft_wrap=True)
    stored = f", {result.from_store} of them from the store" if result.from_store else ""
    took = f"{len(result.rows)} points in {result.wall_s:.1f} s{stored}"
    console.print(f"{took}; results in {result.directory}", soft_wrap=True)


def broken(key: str) -> str:
    """A key in lines of at most twelve characters where its underscores and spaces allow it."""
    lines = [""]
    for part in key.replace("_", "_\n").replace(" ", " \n").split("\n"):
        if len(lines[-1]) + len(part) > _HEADING_COLUMNS and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _headings(result: SweepResult, columns: dict[str, list[Any]]) -> dict[str, str]:
    """Column -> heading."""
    headings = {key: key_label(key, result.keys, result.roles) for key in result.keys}
    headings.update((name, name) for name in ("seed", "meets") if name in columns)
    if any(row.result.status != "completed" for row in result.rows):
        headings["status"] = "status"
    skipped = ("completed", "p99_e2el_ms")
    headings.update(
        (name, figure_label(name))
        for name in shown_figures(result, columns)
        if name not in skipped or name in conditions_of(result)
    )
    return headings
