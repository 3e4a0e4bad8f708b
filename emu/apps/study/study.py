"""`emu.study`: from named systems to a table, figures and an artifact.

study = emu.study(
    "cluster.toml",
    {"static": {}, "BlitzScale": "blitzscale", "mine": {"autoscale.planner": Mine}},
    seeds=10,
)
study                     # means with intervals, differences paired by seed
study.plot().save("means.pdf")
study.bundle("artifact.tar.gz")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from emu.api import Drawing, Result, Rows, column_of, plot, table_of
from emu.apps.shared.answer import json_text
from emu.apps.shared.watching import watching
from emu.apps.study.cells import Cell, Overrides, System, run_cells, slug
from emu.apps.study.written import written_class
from emu.config.toml_text import toml_text
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.report.atomic import write_text
from emu.report.csvtext import quote, text_cell
from emu.report.drawn import SHOWN
from emu.report.grid import html_table, text_table
from emu.report.paired import TITLE, PairedComparison, SeedSet, compared, numbers_of
from emu.runs.bundle import bundle
from emu.runs.request_rows import PandasFrame, PolarsFrame, Table, write_workload

SystemGiven = DocumentView | str | Path
WorkloadGiven = DocumentView | str | Path | Table
_FAILURES_SHOWN: Final = 20
_CONFIG: Final = "config"
"""The key of a system that has a configuration of its own."""


class Study:
    """A study that has ended: runs of every system, workload and seed."""

    def __init__(self, directory: Path, cells: Sequence[Cell], figures: Sequence[str]) -> None:
        self.directory = directory
        self.cells = list(cells)
        self.figures = list(figures) or list(SHOWN)
        """Those of the table, by their names in summary.json."""
        self.systems = list(dict.fromkeys(cell.system for cell in cells))
        self.workloads = list(dict.fromkeys(cell.workload for cell in cells))

    @property
    def rows(self) -> Rows:
        """A record for each run: system, workload, seed, status, error, then every figure of
        summary.json by its dotted name (NaN where there is none)."""
        columns: dict[str, list[Any]] = {
            "system": [cell.system for cell in self.cells],
            "workload": [cell.workload for cell in self.cells],
            "seed": [cell.seed for cell in self.cells],
            "status": [cell.result.status for cell in self.cells],
            "error": [cell.result.error for cell in self.cells],
            "gpus": [cell.result.gpus for cell in self.cells],
        }
        for name in dict.fromkeys(name for cell in self.cells for name in cell.result.figures):
            columns[name] = [cell.result.figures.get(name) for cell in self.cells]
        return table_of({name: column_of(values) for name, values in columns.items()})

    @property
    def runs(self) -> dict[str, list[Result]]:
        """The completed runs of each system, for `emu.compare`, `emu.plot`; with several workloads
        the names are `system, workload`."""
        return {
            f"{system}, {workload}" if len(self.workloads) > 1 else system: [
                Result(cell.directory) for cell in done
            ]
            for system, workload, done in self._done()
        }

    @property
    def failures(self) -> list[Cell]:
        """Cells without figures."""
        return [cell for cell in self.cells if not cell.is_completed]

    @property
    def tables(self) -> list[PairedComparison]:
        """Means with intervals, a table for each workload; systems against the first that ran."""
        sets: dict[str, list[SeedSet]] = {}
        for system, workload, done in self._done():
            figures = numbers_of([cell.result.figures for cell in done])
            one = SeedSet(system, [cell.seed for cell in done], figures)
            sets.setdefault(workload, []).append(one)
        shown = {name: SHOWN.get(name, name) for name in self.figures}
        return [compared(found, workload or TITLE, shown) for workload, found in sets.items()]

    def _done(self) -> Iterator[tuple[str, str, list[Cell]]]:
        """(system, workload, completed cells) where there are any, workload by workload."""
        for workload in self.workloads:
            for system in self.systems:
                where = (system, workload)
                cells = [c for c in self.cells if (c.system, c.workload) == where]
                if done := [cell for cell in cells if cell.is_completed]:
                    yield system, workload, done

    def plot(self, figure: str = "means", **options: Any) -> Drawing:
        """`emu.plot` of the study: `means` with error bars, or distributions with bands."""
        return plot(self.runs, figure=figure, **options)

    def bundle(self, path: str | Path) -> Path:
        """Pack all completed runs, so that others can run them again; its path."""
        output = Path(path)
        bundle([cell.directory for cell in self.cells if cell.is_completed], output)
        return output

    def write(self) -> Path:
        """results.csv with every figure of every run, and study.json with the tables; the latter's
        path."""
        rows = self.rows
        lines = [",".join(quote(name) for name in rows.dtype.names or ())]
        lines += [",".join(map(_csv_cell, row)) for row in rows.tolist()]
        write_text(self.directory / "results.csv", "\n".join(lines) + "\n")
        path = self.directory / "study.json"
        content = {
            "systems": self.systems,
            "workloads": self.workloads,
            "runs": len(self.cells),
            "tables": self.tables,
            "without_figures": {"count": len(self.failures), "reasons": self._failed()[2]},
        }
        write_text(path, json_text(content))
        return path

    def __repr__(self) -> str:
        """The tables, and what failed."""
        parts = [repr(table) for table in self.tables]
        return "\n".join([*parts, *([text_table(*self._failed())] if self.failures else [])])

    def _repr_html_(self) -> str:
        parts = [table._repr_html_() for table in self.tables]
        return "".join([*parts, *([html_table(*self._failed())] if self.failures else [])])

    def _failed(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, headings and rows: runs that failed for the same reason are one row."""
        alike: dict[tuple[str, str, str], int] = {}
        for cell in self.failures:
            key = (cell.system, cell.result.status, cell.result.error)
            alike[key] = alike.get(key, 0) + 1
        rows = [[name, str(n), status, error] for (name, status, error), n in alike.items()]
        title = f"Without figures: {len(self.failures)} of {len(self.cells)} runs"
        return title, ["system", "runs", "status", "reason"], rows[:_FAILURES_SHOWN]


def study(
    config: str | Path | DocumentView,
    systems: Mapping[str, SystemGiven],
    *,
    seeds: int | Sequence[int] = 5,
    workloads: Mapping[str, WorkloadGiven] | None = None,
    figures: Sequence[str] = (),
    output: str | Path = "runs/study",
    jobs: int = 0,
    ray: str | None = None,
    progress: bool = True,
) -> Study:
    """Run each system with each workload and seed; the first system is the base of differences.

    A system is a mapping of dotted keys to values (a class is a value, too; one of a notebook is
    written to a file), with the key `config` if it has a configuration of its own; or the name of
    an autoscaling preset. A workload is such a mapping, a trace, or a table of requests. `seeds`:
    how many, from the configuration's own on, or which. What `output` holds is not run again; a
    cell that fails is a row with its reason. Raises InputError.
    """
    place = Path(output)
    _check_systems(systems)
    _check_names(workloads or {})
    if not systems:
        raise InputError("study", None, "systems", "give at least one, by name")
    given = _systems(config, systems, place)
    loads = {name: _workload(name, one, place) for name, one in (workloads or {"": {}}).items()}
    if (seeds if isinstance(seeds, int) else len(seeds)) < 1:
        raise InputError("study", None, "seeds", "give at least one")
    if not isinstance(seeds, int) and len(set(seeds)) < len(seeds):
        raise InputError("study", None, "seeds", "the same seed is given twice")
    with watching("runs", wanted=progress) as watch:
        cells = run_cells(given, loads, seeds, place, jobs=jobs, ray=ray, watch=watch)
    if all(cell.result.status == "invalid" for cell in cells):
        raise InputError("study", None, "", f"no run is possible; {cells[0].result.error}")
    return Study(place, cells, figures)


def _systems(
    config: str | Path | DocumentView, systems: Mapping[str, SystemGiven], place: Path
) -> list[System]:
    """What the names stand for. Raises InputError."""
    classes = place / "classes"
    if isinstance(config, Mapping):
        base = place / "base.toml"
        place.mkdir(parents=True, exist_ok=True)
        write_text(base, toml_text(_written(config, classes)))
    else:
        base = Path(config)
    found = []
    for name, one in systems.items():
        if isinstance(one, (str, Path)):
            is_file = str(one).endswith(".toml")
            keys: Document = {_CONFIG: one} if is_file else {"autoscale.preset": str(one)}
        else:
            keys = dict(one)
        own = Path(keys.pop(_CONFIG, base))
        found.append(System(name, own, _written(keys, classes)))
    return found


def _workload(name: str, given: WorkloadGiven, place: Path) -> Overrides:
    """What a workload overrides."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (str, Path)):
        return {"workload.path": str(Path(given).resolve())}
    if isinstance(given, (PolarsFrame, PandasFrame, list, tuple)):
        path = place / "workloads" / f"{slug(name)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_workload(given, path)
        return {"workload.path": str(path.resolve()), "workload.format": "jsonl"}
    problem = f"expected keys, a trace or a table of requests, got {type(given).__name__}"
    raise InputError("study", None, f"workloads.{name}", problem)


def _written(value: Any, classes: Path) -> Any:
    """Plain tables, with classes as the names of their files."""
    if isinstance(value, type):
        return written_class(value, classes)
    if isinstance(value, Mapping):
        return {key: _written(inner, classes) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(inner, classes) for inner in value]
    return value


def _check_systems(systems: Mapping[str, object]) -> None:
    """Refuse what is no system. Raises InputError."""
    _check_names(systems)
    for name, one in systems.items():
        if not isinstance(one, (str, Path, Mapping)):
            problem = f"expected keys, a preset or a configuration, got {type(one).__name__}"
            raise InputError("study", None, f"systems.{name}", problem)


def _check_names(names: Mapping[str, object]) -> None:
    """Refuse names that are no names of directories, or the same. Raises InputError."""
    parts: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not slug(name):
            raise InputError("study", None, f"{name}", "expected a name with a letter or digit")
        if slug(name) in parts:
            problem = f"is too much like {parts[slug(name)]!r}: both are directories {slug(name)}"
            raise InputError("study", None, name, problem)
        parts[slug(name)] = name


def _csv_cell(value: Any) -> str:
    """A value of a record; empty for NaN."""
    if isinstance(value, str):
        return text_cell(value)
    return "" if value != value else repr(value)
