"""What a sweep leaves behind: results.csv, results.parquet, sweep.json. No wall-clock figures."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.errors import needs_extra
from emu.report.atomic import write_bytes, write_text, writing
from emu.report.csvtext import quote, text_cell
from emu.report.drawn import SHOWN, better_part, share_text
from emu.sweeps.conditions import parse_conditions
from emu.sweeps.drive import SweepResult
from emu.sweeps.driver import Row


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


def _draws_of(rows: Sequence[Row]) -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------------
# What keys and figures of a sweep are called in tables and charts, and which are shown. Pure.

FIGURES: Final[Mapping[str, str]] = {
    "completed": "completed",
    "p99_ttft_ms": "TTFT p99",
    "p99_tpot_ms": "TPOT p99",
    "p99_e2el_ms": "E2E p99",
    "output_throughput": "tokens/s",
    "request_goodput": "goodput",
    "gpus": "GPUs",
    "gpu_seconds.total": "GPU s",
    "cost": "cost",
    "load.verdict": "load",
}
"""Figure -> its short name; those that every sweep shows."""
_LATENCY: Final = re.compile(r"(mean|median|std|p\d+)_(ttft|tpot|itl|e2el)_ms")
_METRICS: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_GROUP: Final = re.compile(r"replicas\.(\d+)\.(.+)")


def conditions_of(result: SweepResult) -> list[str]:
    """Figures that the conditions of a search name."""
    if result.sweep.search is None:
        return []
    meet = result.sweep.search.meet
    return [one.name for one in parse_conditions(meet, result.source, "search.meet")]


def shown_figures(result: SweepResult, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Figures of the tables: those of the conditions, then the usual ones.

    A condition on p95 TTFT stands in place of the usual p99.
    """
    asked = list(dict.fromkeys(conditions_of(result)))
    metrics = {match[2] for name in asked if (match := _LATENCY.fullmatch(name))}
    usual = [
        name
        for name in FIGURES
        if not ((match := _LATENCY.fullmatch(name)) and match[2] in metrics)
    ]
    return [name for name in dict.fromkeys((*asked, *usual)) if any(columns.get(name, ()))]


def latencies(result: SweepResult) -> list[str]:
    """The latencies that charts show: of the conditions, else p99 of TTFT and TPOT."""
    asked = [name for name in conditions_of(result) if _LATENCY.fullmatch(name)]
    return asked or ["p99_ttft_ms", "p99_tpot_ms"]


def plot_names(result: SweepResult) -> tuple[str, str]:
    """The axes (x, y) of the trade-off."""
    plot, pareto = result.sweep.plot, result.sweep.pareto
    if pareto is not None and len(pareto.minimize) > 1:
        return pareto.minimize[0], pareto.minimize[1]
    return plot.x, plot.y or latencies(result)[0]


def figure_label(name: str) -> str:
    """TTFT p95 for p95_ttft_ms; other names as they are."""
    match = _LATENCY.fullmatch(name)
    if match is not None:
        return f"{_METRICS[match[2]]} {match[1]}"
    return FIGURES.get(name, name)


def key_label(key: str, keys: Sequence[str], roles: Sequence[str]) -> str:
    """The last part of a dotted key, or as much of its end as tells it apart from the others.

    A group of replicas is called by its role (`prefill count`) where no other group has it.
    """
    match = _GROUP.fullmatch(key)
    if match is not None and int(match[1]) < len(roles):
        role = roles[int(match[1])]
        return f"{role if roles.count(role) == 1 else f'{role} {match[1]}'} {match[2]}"
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = parts[-count:]
        if sum(other.split(".")[-count:] == end for other in keys) <= 1:
            return ".".join(end)
    return key


def in_order(result: SweepResult) -> list[int]:
    """Rows along the axis: of a search and of random points the keys count, not the trials."""
    order = list(range(len(result.rows)))
    if result.sweep.search is None and result.sweep.random is None and result.sweep.pareto is None:
        return order

    def place(index: int) -> list[tuple[bool, float, str]]:
        values = [result.rows[index].point.values.get(key) for key in result.keys]
        return [
            (True, float(v), "")
            if isinstance(v, (int, float)) and not isinstance(v, bool)
            else (False, 0.0, str(v))
            for v in values
        ]

    return sorted(order, key=lambda index: (place(index), result.rows[index].point.seed or 0))
