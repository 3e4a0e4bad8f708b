"""`emu sweep`: progress, the table at the end, exit status. A thin layer over `drive`."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from emu.errors import InputError
from emu.process.exits import open_console
from emu.sweeps.drive import SweepResult, run_sweep
from emu.sweeps.results import (
    answer_text,
    columns_of,
    conditions_of,
    drawn_cell,
    drawn_lines,
    figure_label,
    in_order,
    key_label,
    shown_figures,
    write_page,
    write_results,
)

_ROWS_SHOWN = 30
_HEADING_COLUMNS = 12


def sweep_command(
    path: Path,
    *,
    output: Path | None,
    jobs: int,
    ray: str | None,
    settings: Sequence[str],
    quiet: bool,
    report: bool,
    as_json: bool = False,
    draws: int | None = None,
) -> int:
    """Run a sweep, write its files, print its table."""
    if jobs < 0:
        raise InputError("sweep", None, "--jobs", f"must be at least 0, not {jobs}")
    started_s = time.monotonic()
    overrides = settings_of(settings)

    def go(watch: Callable[[int, int, str], None] | None) -> SweepResult:
        return run_sweep(
            path,
            jobs=jobs,
            ray=ray,
            output=output,
            settings=overrides,
            watch=watch,
            draws=draws,
        )

    try:
        if quiet or as_json or not sys.stderr.isatty():
            result = go(None)
        else:
            with Progress(
                TextColumn("points"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            ) as bar:
                task = bar.add_task("points", total=None, line="")
                result = go(
                    lambda done, known, line: bar.update(
                        task, completed=done, total=known, line=line
                    )
                )
    except KeyboardInterrupt:
        print("what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise
    result.wall_s = time.monotonic() - started_s
    write_results(result)
    if report:
        write_page(result)
    if as_json:
        print((result.directory / "sweep.json").read_text(encoding="utf-8"), end="")
    elif not quiet:
        print_result(result, open_console())
    for row in result.rows:
        if row.result.error:
            print(f"{row.result.status}: {row.result.error}", file=sys.stderr)
    return 0


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as values. Raises InputError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError("--set", None, text, "expected KEY=VALUE")
        try:
            settings[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key.strip()] = value.strip()
    return settings


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
