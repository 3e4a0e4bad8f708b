"""What a sweep leaves behind: results.csv, results.parquet, sweep.json, a page. No wall clock.

`emu sweep` (`sweep_command`) shows progress, and the table at the end.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from emu.apps.shared.points import Row
from emu.apps.sweeps.drive import SweepResult
from emu.documents import Document
from emu.errors import needs_extra
from emu.report.atomic import write_bytes, write_text, writing
from emu.report.csvtext import quote, text_cell
from emu.report.drawn import SHOWN, better_part, share_text


def columns_of(result: SweepResult) -> dict[str, list[Any]]:
    """Swept keys, seed and round where there are any, status, then all figures of the runs."""
    rows = result.rows
    columns: dict[str, list[Any]] = {
        key: [row.point.values.get(key) for row in rows] for key in result.keys
    }
    if any(row.point.seed is not None for row in rows):
        columns["seed"] = [row.point.seed for row in rows]
    if any(row.point.round for row in rows):
        columns["round"] = [row.point.round for row in rows]
    if any(row.meets is not None for row in rows):
        columns["meets"] = [row.meets for row in rows]
    columns["status"] = [row.result.status for row in rows]
    columns["error"] = [row.result.error for row in rows]
    columns["gpus"] = [row.result.gpus or None for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.result.figures)
    for name in names:
        columns[name] = [row.result.figures.get(name) for row in rows]
    if any(row.draws is not None for row in rows):
        columns.update(_intervals(rows))
    return columns


def _intervals(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Ends of the intervals of the figures that tables have, where they come from, and how often
    draws of a point are better than those of the first."""
    found: dict[str, list[Any]] = {}
    first = next(row.draws for row in rows if row.draws is not None)
    for name in SHOWN:
        mine = [row.draws.figures.get(name) if row.draws else None for row in rows]
        if not any(mine):
            continue
        found[f"{name}.low"] = [one and one.low for one in mine]
        found[f"{name}.high"] = [one and one.high for one in mine]
        found[f"{name}.from"] = [one and share_text(one) for one in mine]
        found[f"{name}.better"] = [
            None if row.draws is None else better_part(name, first, row.draws) for row in rows
        ]
    return found


def write_results(result: SweepResult) -> None:
    """Write the files. Raises InputError without pyarrow if the sweep asks for Parquet."""
    columns = columns_of(result)
    write_text(result.directory / "results.csv", _csv(columns))
    content = {
        "kind": result.sweep.kind,
        "keys": result.keys,
        "points": len(result.rows),
        "answer": msgspec.to_builtins(result.answer),
        **_draws_of(result.rows),
        "sweep": msgspec.to_builtins(result.sweep),
    }
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    write_bytes(result.directory / "sweep.json", text + b"\n")
    if result.sweep.parquet:
        _write_parquet(result.directory / "results.parquet", columns, result.source)


def _draws_of(rows: Sequence[Row]) -> Document:
    """What was drawn, for sweep.json; nothing without draws."""
    draws = [row.draws for row in rows]
    first = next((one for one in draws if one is not None), None)
    if first is None:
        return {}
    figures = [
        one and {name: one.figures[name] for name in SHOWN if name in one.figures} for one in draws
    ]
    return {
        "draws": {
            "count": first.count,
            "level_percent": first.level_percent,
            "engines": list(dict.fromkeys(e for one in draws if one for e in one.engines)),
            "points": msgspec.to_builtins(figures),
        }
    }


def _csv(columns: dict[str, list[Any]]) -> str:
    lines = [",".join(quote(name) for name in columns)]
    table = zip(*columns.values(), strict=True)
    lines += [",".join(map(_csv_cell, cells)) for cells in table]
    return "\n".join(lines) + "\n"


def _csv_cell(value: Any) -> str:
    return text_cell(value) if isinstance(value, str) else quote(cell_text(value))


def cell_text(value: Any) -> str:
    """A value as it stands in a table: empty for none, JSON for lists and tables."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return msgspec.json.encode(value).decode()


def _write_parquet(path: Path, columns: dict[str, list[Any]], source: str) -> None:
    with needs_extra("parquet", source):
        import pyarrow
        import pyarrow.parquet
    table = pyarrow.table({name: _parquet_column(values) for name, values in columns.items()})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    with writing(path):
        write_bytes(path, buffer.getvalue())


def _parquet_column(values: list[Any]) -> list[Any]:
    """Numbers stay numbers, a mixture becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or kinds in ({bool}, {str}):
        return [float(v) if kinds == {int, float} and v is not None else v for v in values]
    return [None if value is None else cell_text(value) for value in values]
