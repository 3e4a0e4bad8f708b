"""Where sampled tables are saved, and how they are found again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from emu.backends.aiconfigurator.database import sample_database
from emu.backends.aiconfigurator.table import FORMAT, Table, Wanted
from emu.config.input_files import read_input
from emu.errors import InputError
from emu.process.prepared import prepared


def table_path(path: str, wanted: Wanted) -> Path:
    """Where a table is saved: the file itself, or one by its content in a directory."""
    place = Path(path)
    if place.suffix == ".json":
        return place
    asked = wanted.provenance()
    parts = [
        wanted.spec.name.rpartition("/")[2],
        asked.system,
        f"tp{asked.tensor_parallel}",
        *([f"ep{asked.expert_parallel}"] if asked.expert_parallel > 1 else []),
        asked.engine + ("" if asked.version == "current" else f"-{asked.version}"),
        "-".join(dict.fromkeys(filter(None, (asked.weight_dtype, asked.expert_dtype)))),
        f"kv-{asked.kv_cache_dtype}",
    ]
    return place / f"{'-'.join(parts)}.json"


def save_table(path: Path, table: Table) -> None:
    """Write a table, one point a line."""
    head = msgspec.json.encode(msgspec.structs.replace(table, points=[])).decode()
    lines = ",\n".join(msgspec.json.encode(point).decode() for point in table.points)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("[]}") + "[\n" + lines + "\n]}\n", encoding="utf-8")


def load_table(path: Path) -> Table:
    """Read a table. Raises InputError."""
    try:
        table = msgspec.json.decode(read_input(path, "latency.path"), type=prepared(Table))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), None, "latency.path", str(error)) from None
    if table.format != FORMAT or not table.points:
        raise InputError(str(path), None, "format", f"expected {FORMAT!r} with points")
    return table


def find_table(path: str, wanted: Wanted) -> Table:
    """The saved table for these, else a fresh one, which is saved if there is a `path`."""
    if not path:
        return sample_database(wanted)
    place = table_path(path, wanted)
    if not place.exists():
        table = sample_database(wanted)
        save_table(place, table)
        return table
    table = load_table(place)
    found, asked = table.provenance.told(), wanted.provenance().told()
    if (table.our_model, found) != (wanted.spec.name, asked):
        problem = (
            f"the table is for {table.our_model} on {found}; wanted {wanted.spec.name} on {asked}"
        )
        raise InputError(str(place), None, "latency.path", problem)
    return table
