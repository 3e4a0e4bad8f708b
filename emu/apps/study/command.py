"""`emu study`: a bar while it runs, the table at the end."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from emu.apps.shared.answer import Reply, tell
from emu.apps.study.options import StudyOptions
from emu.apps.study.study import study
from emu.apps.study.studyfile import dotted, load_study
from emu.documents import DocumentView
from emu.errors import InputError


def study_command(options: StudyOptions) -> int:
    """Run what was not run before, write results.csv and study.json, print the tables."""
    path = options.study
    found = load_study(path)
    _check_name("--plot", options.plot, (".pdf", ".svg", ".png"))
    _check_name("--bundle", options.bundle, (".tar.gz", ".tgz"))
    beside = path.parent
    systems = {name: dotted(table) for name, table in found.systems.items()}
    for keys in systems.values():
        if "config" in keys:
            keys["config"] = beside / str(keys["config"])
    loads = {name: _beside(dotted(table), beside) for name, table in found.workloads.items()}
    place = options.output or beside / (found.output or f"runs/{path.stem}")
    try:
        done = study(
            beside / found.base,
            systems,
            seeds=found.seeds,
            workloads=loads or None,
            figures=found.figures,
            output=place,
            jobs=options.jobs,
            ray=options.ray,
            progress=not (options.quiet or options.as_json),
        )
    except KeyboardInterrupt:
        print("what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise
    data = done.write()
    if options.plot is not None:
        done.plot().save(options.plot)
    if options.bundle is not None:
        done.bundle(options.bundle)

    def show(console: Console) -> None:
        console.print(repr(done), soft_wrap=True, markup=False)
        console.print(f"every figure of every run in {place / 'results.csv'}", soft_wrap=True)

    return tell(Reply(show, data), options)


def _check_name(option: str, path: Path | None, endings: tuple[str, ...]) -> None:
    """Refuse a name before anything runs. Raises InputError."""
    if path is not None and not path.name.endswith(endings):
        problem = f"expected a name that ends in {', '.join(endings)}"
        raise InputError(str(path), None, option, problem)


def _beside(keys: DocumentView, place: Path) -> DocumentView | Path:
    """A workload of a file; a trace alone is relative to the study."""
    return place / str(keys["path"]) if set(keys) == {"path"} else keys
